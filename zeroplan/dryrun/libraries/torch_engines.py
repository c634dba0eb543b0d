"""Labels the buffers of DDP, FSDP1 and FSDP2 by the torch function that requests them."""

from contextlib import ExitStack
from types import ModuleType

from zeroplan.dryrun.patches import Patch
from zeroplan.ledger import Kind
from zeroplan.verify.watching.tracker import Tracker

_OPEN = ExitStack()


def patches(tracker: Tracker) -> dict[str, Patch]:
    """The patches that label the requests of DDP, FSDP1 and FSDP2, each applied when torch imports the engine."""

    def ddp(_: ModuleType) -> None:
        """Label the reducer's buckets, made in DDP's constructor and again in the second forward."""
        from torch._C._distributed_c10d import Reducer  # noqa: PLC0415
        from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

        from zeroplan.verify.training.engine import all_labelled  # noqa: PLC0415

        asking = ((DistributedDataParallel, "_ddp_init_helper", Kind.REDUCE), (Reducer, "_rebuild_buckets", Kind.REDUCE))
        _OPEN.enter_context(all_labelled(tracker, asking))

    def fsdp1(_: ModuleType) -> None:
        """Label FSDP1's requests (torch 2.13, ``torch/distributed/fsdp``)."""
        from torch.distributed.fsdp import _flat_param, _runtime_utils  # noqa: PLC0415
        from torch.distributed.fsdp._flat_param import FlatParamHandle  # noqa: PLC0415

        from zeroplan.verify.training.engine import all_labelled  # noqa: PLC0415

        asking = (
            (FlatParamHandle, "_use_low_precision_shard", Kind.GATHER),
            (_flat_param, "_alloc_storage", Kind.UNSHARDED_PARAMETERS),
            (_runtime_utils, "_reduce_grad", Kind.REDUCE),
        )
        _OPEN.enter_context(all_labelled(tracker, asking))

    def fsdp2(_: ModuleType) -> None:
        from zeroplan.verify.training.fsdp2 import fsdp2_labels  # noqa: PLC0415  it imports FSDP2

        _OPEN.enter_context(fsdp2_labels(tracker))

    return {
        "torch.nn.parallel.distributed": ddp,
        "torch.distributed.fsdp._runtime_utils": fsdp1,
        "torch.distributed.fsdp._fully_shard._fsdp_param_group": fsdp2,
    }
