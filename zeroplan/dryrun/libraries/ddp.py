"""DistributedDataParallel: its reducer's requests are labelled as buckets."""

from contextlib import ExitStack
from types import ModuleType
from typing import TYPE_CHECKING

from zeroplan.dryrun.patches import Patch
from zeroplan.ledger import Kind
from zeroplan.verify.watching.tracker import Tracker

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


def patches(tracker: Tracker) -> dict[str, Patch]:
    """The patch that labels the reducer's buckets: the first with the wrapper, others in the second forward."""

    def label(_: ModuleType) -> None:
        from torch._C._distributed_c10d import Reducer  # noqa: PLC0415
        from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

        from zeroplan.verify.training.engine import labelled  # noqa: PLC0415

        made: tuple[AbstractContextManager[None], ...] = (
            labelled(tracker, DistributedDataParallel, "_ddp_init_helper", Kind.REDUCE),
            labelled(tracker, Reducer, "_rebuild_buckets", Kind.REDUCE),
        )
        for one in made:
            _OPEN.enter_context(one)

    return {"torch.nn.parallel.distributed": label}


_OPEN = ExitStack()
