"""Runs torch elastic's agent for one node: one process per rank. If a rank is lost, the agent ends the others.

:mod:`zeroplan.verify.processes.launch` starts this as ``python -m zeroplan.verify.processes.elastic TASK``. Standard output carries
the ranks' messages and the agent's own ``died``.
"""

import json
import logging
import os
import signal
import sys
from pathlib import Path

from zeroplan.spec.base import read
from zeroplan.verify.processes.launch import how_ended
from zeroplan.verify.processes.messages import Messenger, leave_with_the_parent
from zeroplan.verify.task import Task

_ENDED_BY_THE_AGENT = -signal.SIGTERM
"""The exit code of ranks that the agent ends after it lost one."""


def main() -> None:
    """Start the ranks of the task file in the first argument, and wait for them."""
    order = Path(sys.argv[1])
    task = read(Task, json.loads(order.read_text(encoding="utf-8")), where="task")
    leave_with_the_parent()
    lost = _lost(task, order)
    for rank, code in lost.items():
        Messenger(order, rank).send(died=how_ended(code))
    sys.stderr.flush()
    os._exit(1 if lost else 0)  # the rendezvous leaves threads waiting for another node


def _lost(task: Task, order: Path) -> dict[int, int]:
    """Run the ranks; return the exit codes of those that failed."""
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "2")
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs  # noqa: PLC0415  takes seconds
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # noqa: PLC0415

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # its report is sent as a message instead
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=task.job.mesh.world_size,
        run_id="zeroplan",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(order.parent / "elastic")),
    )
    try:
        elastic_launch(config, sys.executable)("-m", "zeroplan.verify.processes.worker", str(order))
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        return {rank: code for rank, code in codes.items() if code != _ENDED_BY_THE_AGENT} or codes
    return {}


if __name__ == "__main__":
    main()
