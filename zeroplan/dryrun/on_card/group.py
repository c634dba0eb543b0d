"""A process group for real tensors that sends nothing: it assumes that other ranks have this rank's values.

Collectives write their results, so training values stay finite: a gather repeats this rank's shard, a reduction returns this
rank's values.
"""

from collections.abc import Callable
from datetime import timedelta
from itertools import cycle

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, Store, Work

from zeroplan.dryrun.process_group import name_groups_nccl
from zeroplan.verify.nested import tensors_in
from zeroplan.verify.watching.group import WatchedGroup
from zeroplan.verify.watching.log import Log

_NAME = "alone"


_UNWRITTEN = ("reduce_scatter", "all_to_all", "gather", "scatter")
"""Collectives whose results torch's fake group leaves unwritten; it fills all-gathers itself."""


class Alone(WatchedGroup):
    """One rank of a group whose other ranks have this rank's values."""

    def run_and_log(self, operation: str, run: Callable[..., Work], arguments: tuple[object, ...]) -> Work:
        """Run a collective, and write its results."""
        work = super().run_and_log(operation, run, arguments)
        self._log.calls.clear()
        if operation in _UNWRITTEN:
            with torch.no_grad():
                _copy(list(tensors_in(arguments[0])), list(tensors_in(arguments[1:2])), mine=self.rank())
        return work


def _copy(outputs: list[torch.Tensor], inputs: list[torch.Tensor], *, mine: int) -> None:
    """Fill outputs from inputs: repeat inputs if there are fewer, begin at this rank's own if there are more."""
    first = mine * len(outputs) if len(inputs) > len(outputs) else 0
    for output, given in zip(outputs, cycle(inputs[first:]), strict=False):
        there, here = output.view(-1), given.reshape(-1)
        start = min(mine * there.numel(), max(0, here.numel() - there.numel()))
        part = here[start : start + there.numel()]
        there[: part.numel()].copy_(part)


def make_groups_alone() -> None:
    """Make every process group of the script an ``Alone`` group that reports the backend NCCL."""

    def group(_: Store, rank: int, ranks: int, __: timedelta) -> Alone:
        fake = FakeProcessGroup._create_internal(rank, ranks, FakeProcessGroup.Options())  # type: ignore[call-arg]
        return Alone(fake, (rank, ranks), Log())

    dist.Backend.register_backend(_NAME, group, devices=["cpu", "cuda"])
    name_groups_nccl(_NAME)
