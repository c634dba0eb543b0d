"""Runs as a warm process: it imports everything that cases need, then forks for each case, which starts at once.

:mod:`zeroplan.verify.cases.bulk` starts ``python -m zeroplan.verify.processes.warm TENSORS ENGINE``. It reads orders from standard
input, a task and its environment in one line of JSON. Standard output carries the fork's messages, then ``ended``. This process
must not touch CUDA, which no fork could use afterwards.
"""

import gc
import importlib
import json
import os
import sys
import traceback
import warnings
from pathlib import Path

from zeroplan.verify.processes.launch import how_ended
from zeroplan.verify.processes.messages import Messenger, leave_with_the_parent

_TORCH = (
    "torch",
    "torch._dynamo",
    "transformers.models.auto.modeling_auto",
    "zeroplan.verify.processes.rank",
    "zeroplan.verify.training.workload",
)
_NEEDED: dict[str, tuple[str, ...]] = {
    "fake": (*_TORCH, "zeroplan.verify.backends.simulate"),
    "cpu": (*_TORCH, "zeroplan.verify.backends.cpu"),
    "cuda": (*_TORCH, "zeroplan.verify.backends.gpu_ready", "zeroplan.verify.backends.cuda"),
}
_DEEPSPEED = ("zeroplan.verify.training.deepspeed",)
"""It patches torch, so processes for other engines must not import it."""


def main() -> None:
    """Import, then run one order after the other until there are no more."""
    warnings.filterwarnings("ignore")
    # With this variable torch looks for GPUs through NVML and creates no context, which forks could not use.
    os.environ.update(PYTORCH_NVML_BASED_CUDA_CHECK="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    messages = os.dup(1)
    os.dup2(2, 1)
    tensors, engine = sys.argv[1:]
    os.environ["DS_ACCELERATOR"] = "cpu" if tensors == "cpu" else "cuda"
    for name in (*_NEEDED[tensors], *(_DEEPSPEED if engine == "deepspeed" else ())):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    os.dup2(messages, 1)
    while order := _next():
        _do(Path(order.pop("task")), order)


def _next() -> dict[str, str] | None:
    """One line of standard input, read unbuffered, since every fork would inherit the buffer."""
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(0, 1)
        if not part:
            return None
        line += part
    order: dict[str, str] = json.loads(line)
    return order


def _do(order: Path, environment: dict[str, str]) -> None:
    child = os.fork()
    if not child:
        _be_the_rank(order, environment)
    _, status = os.waitpid(child, 0)
    Messenger(order, int(environment["RANK"])).send(ended=how_ended(os.waitstatus_to_exitcode(status)))


def _be_the_rank(order: Path, environment: dict[str, str]) -> None:
    """Run the task in this fork, then exit in any case."""
    try:
        from zeroplan.verify.processes.worker import act  # noqa: PLC0415  imported in the fork only

        os.environ.update(environment)
        leave_with_the_parent()
        act(order)
    except BaseException:  # noqa: BLE001  the fork must not continue as its parent
        traceback.print_exc()
    os._exit(1)


if __name__ == "__main__":
    main()
