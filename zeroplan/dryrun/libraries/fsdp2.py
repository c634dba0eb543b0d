"""FSDP2's buffers are told apart by the function of torch that asks for them."""

from contextlib import ExitStack
from types import ModuleType

from zeroplan.dryrun.patches import Patch
from zeroplan.verify.watching.tracker import Tracker


def patches(tracker: Tracker) -> dict[str, Patch]:
    """Label what FSDP2 asks for, to the end of the process."""

    def label(_: ModuleType) -> None:
        from zeroplan.verify.training.fsdp2 import fsdp2_labels  # noqa: PLC0415  it imports FSDP2

        _OPEN.enter_context(fsdp2_labels(tracker))

    return {"torch.distributed.fsdp._fully_shard._fsdp_param_group": label}


_OPEN = ExitStack()
