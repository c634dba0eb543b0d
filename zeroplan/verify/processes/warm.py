"""A process that has imported what cases need, and is copied for each: a case then begins in no time.

``python -m zeroplan.verify.processes.warm TENSORS ENGINE`` is started by :mod:`zeroplan.verify.cases.bulk`. To standard input come
orders, a task and its environment in one flat JSON line; on standard output go the messages of the copy that does it, and ``ended``
when it has. CUDA must not be touched here, since no copy of a process that has could use it.
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
from zeroplan.verify.processes.messages import Teller, leave_with_the_parent

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
"""It patches torch, so what other engines' cases are copied from must not know it."""


def main() -> None:
    """Import, and then do one order after the other until there are no more."""
    warnings.filterwarnings("ignore")
    # Asked through NVML, whether there is a GPU makes no context, which copies could not use.
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
    """One line of standard input, read as it is: what is buffered here would be in every copy."""
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
    Teller(order, int(environment["RANK"])).tell(ended=how_ended(os.waitstatus_to_exitcode(status)))


def _be_the_rank(order: Path, environment: dict[str, str]) -> None:
    """Do the task in this copy, which ends with it whatever happens."""
    try:
        from zeroplan.verify.processes.worker import act  # noqa: PLC0415  a copy's own

        os.environ.update(environment)
        leave_with_the_parent()
        act(order)
    except BaseException:  # noqa: BLE001  it must not go on as its parent
        traceback.print_exc()
    os._exit(1)


if __name__ == "__main__":
    main()
