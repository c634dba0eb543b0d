"""FSDP2: its buffers are labelled by the function of torch that requests them."""

from contextlib import ExitStack
from types import ModuleType

from zeroplan.dryrun.patches import Patch
from zeroplan.verify.watching.tracker import Tracker


def patches(tracker: Tracker) -> dict[str, Patch]:
    """The patch that labels FSDP2's requests."""

    def label(_: ModuleType) -> None:
        from zeroplan.verify.training.fsdp2 import fsdp2_labels  # noqa: PLC0415  it imports FSDP2

        _OPEN.enter_context(fsdp2_labels(tracker))

    return {"torch.distributed.fsdp._fully_shard._fsdp_param_group": label}


_OPEN = ExitStack()
