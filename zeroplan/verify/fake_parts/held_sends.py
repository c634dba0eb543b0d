"""Makes sends and receives end at once, and hold their tensors as long as NCCL's do.

A batch holds its tensors until ``wait``, a single send or receive as long as its ``Work`` lives. Source: torch 2.13,
``pointToPoint`` in torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (``work->outputs_``).
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from zeroplan.verify.replaced import put

Work = dist.Work
Function = Callable[..., "Work | None"]


class Held:
    """Wraps torch's ``Work`` and holds the tensors."""

    def __init__(self, work: Work | None, tensors: Sequence[torch.Tensor], *, batched: bool) -> None:
        self._work, self._tensors, self._batched = work, tensors, batched

    def wait(self, *args: object) -> bool:
        """Wait for torch's ``Work``; a batch releases its tensors."""
        if self._batched:
            self._tensors = []
        return True if self._work is None else self._work.wait(*args)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> object:
        """Any other attribute of torch's ``Work``."""
        return getattr(self._work, name)


def hold_sent_tensors() -> None:
    """Make sends and receives hold their tensors, for the rest of the process."""
    alone = {name: _held(getattr(c10d, name)) for name in ("isend", "irecv")}
    for owner in (dist, c10d):
        put(owner, **alone, batch_isend_irecv=_batched(c10d.batch_isend_irecv))


def _held(function: Function) -> Function:
    @wraps(function)
    def held(tensor: torch.Tensor, *args: object, **kwargs: object) -> Work | None:
        work = function(tensor, *args, **kwargs)
        return work if work is None else cast("Work", Held(work, [tensor], batched=False))

    return held


def _batched(function: Callable[[list[dist.P2POp]], list[Work]]) -> Callable[[list[dist.P2POp]], list[Work]]:
    """Return one ``Work`` for a whole batch, as NCCL does."""

    @wraps(function)
    def batched(p2p_op_list: list[dist.P2POp]) -> list[Work]:
        works = [one._work if isinstance(one, Held) else one for one in function(p2p_op_list)]
        return [cast("Work", Held(works[-1], [one.tensor for one in p2p_op_list], batched=True))] if works else []

    return batched
