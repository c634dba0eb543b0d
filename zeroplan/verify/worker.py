"""One rank, as a process of its own: takes a task, measures, leaves a record. Started by :mod:`zeroplan.verify.launch`.

On standard output go messages, one JSON object per line: ``say``, ``record`` or ``failed``. Standard input is held open by the
parent; when it closes, the parent is gone, and so is this process.
"""

import json
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from zeroplan.spec.base import read
from zeroplan.verify.failures import text_of, whose
from zeroplan.verify.task import Task

if TYPE_CHECKING:
    from zeroplan.verify.workload import Workload


def main() -> None:
    """Do the task named by the first argument as rank ``RANK``."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # DeepSpeed prints to standard output
    threading.Thread(target=_leave_with_the_parent, daemon=True).start()
    warnings.filterwarnings("ignore")
    try:
        task = read(Task, json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), where="task")
        _tell(answers, record=str(_record(task, lambda text: _tell(answers, say=text))))
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever it is, the parent is told
        traceback.print_exc()
        _tell(answers, failed=whose(error), text=text_of(error))
        answers.flush()
        os._exit(1)  # threads of a broken collective must not hold the process
    answers.flush()
    sys.stderr.flush()
    os._exit(0)  # a destroyed group's threads have nothing more to do


def _record(task: Task, say: Callable[[str], None]) -> Path:
    say("starting")
    os.environ.update(DS_ACCELERATOR="cpu", HF_HUB_OFFLINE="1")
    measure = _simulated if task.tensors == "fake" else _measured
    return measure(task, say)


def _simulated(task: Task, say: Callable[[str], None]) -> Path:
    from zeroplan.verify.record import write_record  # noqa: PLC0415  what goes wrong here is told like everything else
    from zeroplan.verify.simulate import simulate  # noqa: PLC0415
    from zeroplan.verify.workload import user_workload  # noqa: PLC0415

    rank = int(os.environ["RANK"])
    make = user_workload(task.workload, task.job) if task.workload else None
    found = simulate(task.job, rank=rank, steps=task.steps, all_layers=task.all_layers, say=say, make=make)
    return write_record(replace(found, workload=task.workload), Path(task.folder))


def _measured(task: Task, say: Callable[[str], None]) -> Path:
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415
    from torch.distributed import FileStore, HashStore  # type: ignore[attr-defined]  # noqa: PLC0415

    from zeroplan.verify.cpu import measured  # noqa: PLC0415
    from zeroplan.verify.engines import stored_dtype  # noqa: PLC0415
    from zeroplan.verify.group import join  # noqa: PLC0415
    from zeroplan.verify.record import write_record  # noqa: PLC0415
    from zeroplan.verify.workload import user_workload, workload  # noqa: PLC0415

    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = int(os.environ["RANK"])
    made = user_workload(task.workload, task.job) if task.workload else None
    ranks = task.job.mesh.world_size
    store = FileStore(task.store, ranks) if task.transport == "gloo" else HashStore()
    log = join(task.transport, store, rank=rank, ranks=ranks, timeout_s=task.timeout_s)
    build = made or (lambda: _with_weights(workload(task.job, dtype=stored_dtype(task.job.recipe))))
    found = measured(task.job, build, rank=rank, transport=task.transport, log=log, steps=task.steps, say=say)
    path = write_record(replace(found, workload=task.workload), Path(task.folder))
    dist.destroy_process_group()
    return path


def _with_weights(made: "Workload") -> "Workload":
    """Numbers instead of what the allocator left: on real tensors denormal and infinite ones would cost time."""
    import torch  # noqa: PLC0415

    with torch.no_grad():
        for parameter in made.module.parameters():
            parameter.normal_(0, 0.02)
    return made


def _leave_with_the_parent() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _tell(answers: TextIO, **message: str) -> None:
    print(json.dumps(message), file=answers, flush=True)


if __name__ == "__main__":
    main()
