"""FSDP1 (``FullyShardedDataParallel``): its buffers are labelled by the function of torch that requests them."""

from contextlib import ExitStack
from types import ModuleType

from zeroplan.dryrun.patches import Patch
from zeroplan.ledger import Kind
from zeroplan.verify.watching.tracker import Tracker


def patches(tracker: Tracker) -> dict[str, Patch]:
    """The patch that labels FSDP1's requests (torch 2.13, ``torch/distributed/fsdp``)."""

    def label(_: ModuleType) -> None:
        from torch.distributed.fsdp import _flat_param, _runtime_utils  # noqa: PLC0415
        from torch.distributed.fsdp._flat_param import FlatParamHandle  # noqa: PLC0415

        from zeroplan.verify.training.engine import all_labelled  # noqa: PLC0415

        asking = (
            (FlatParamHandle, "_use_low_precision_shard", Kind.GATHER),
            (_flat_param, "_alloc_storage", Kind.UNSHARDED_PARAMETERS),
            (_runtime_utils, "_reduce_grad", Kind.REDUCE),
        )
        _OPEN.enter_context(all_labelled(tracker, asking))

    return {"torch.distributed.fsdp._runtime_utils": label}


_OPEN = ExitStack()
