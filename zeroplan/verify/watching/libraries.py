"""How much do libraries request from torch's allocator: scratch of attention kernels, workspaces of matrix products?

The library chooses the kernel, so no formula is exact to the byte. Records contain the measured sizes.
"""

import re
from collections.abc import Callable, Iterable, Iterator

import torch
from torch._C._distributed_c10d import _resolve_process_group
from torch._ops import OpOverload
from torch.distributed import ProcessGroup

from zeroplan.measurement import AttentionMeasured
from zeroplan.verify.watching.allocations import Allocation, Timeline

_ATTENTION = re.compile(r"aten::_scaled_dot_product_\w*attention\w*")
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm")


def attention_of(timeline: Timeline) -> AttentionMeasured | None:
    """The operators that computed attention, and the largest scratch that one of them held [bytes]; None if none ran."""
    found = {name for event in timeline.allocations for name in event.operators if _ATTENTION.fullmatch(name)}
    if not found:
        return None
    return AttentionMeasured(operators=tuple(sorted(found)), scratch_bytes=_most(_scratch(timeline)))


def _scratch(timeline: Timeline) -> Iterator[tuple[int, int]]:
    """Scratch of attention operators, released before the operator returns: times and changes in bytes."""
    open_requests: dict[int, Allocation] = {}
    for event in timeline.allocations:
        if event.n_bytes > 0:
            open_requests[event.address] = event
        elif (request := open_requests.pop(event.address, None)) is not None and _within(request, event):
            yield request.time_ns, request.n_bytes
            yield event.time_ns, -request.n_bytes


def _within(request: Allocation, release: Allocation) -> bool:
    """Whether a block was released inside the attention operator that requested it."""
    at = next((at for at, name in enumerate(request.operators) if _ATTENTION.fullmatch(name)), None)
    return at is not None and release.operators[: at + 1] == request.operators[: at + 1]


def _most(changes: Iterable[tuple[int, int]]) -> int:
    most = now = 0
    for _, n_bytes in sorted(changes):
        now += n_bytes
        most = max(most, now)
    return most


def kept_by_products(alive: Iterable[Allocation], owned: frozenset[int]) -> int:
    """Bytes that a matrix product requested and that are alive without a tensor: the workspace of its library. [bytes]"""
    return sum(
        block.n_bytes for block in alive if block.address not in owned and block.operators and block.operators[-1] in _PRODUCTS
    )


def _to_another_dimension(given: torch.Tensor, gathered: int, sharded: int, group: object) -> torch.Tensor:
    """The result of DTensor's all-to-all, with the buffers that its C++ allocates: sent, received and result.

    Source: torch 2.13, torch/csrc/distributed/c10d/Functional.cpp, ``shard_dim_alltoall``.
    """
    ranks = (group if isinstance(group, ProcessGroup) else _resolve_process_group(group)).size()  # type: ignore[arg-type]
    sizes = list(given.shape)
    cut = [*sizes[:sharded], ranks, sizes[sharded] // ranks, *sizes[sharded + 1 :]]
    sent = given.view(cut).movedim(sharded, 0).contiguous()
    received = torch.ops._c10d_functional.all_to_all_single(sent, [1] * ranks, [1] * ranks, group)
    sizes[sharded] //= ranks
    sizes[gathered] *= ranks
    made: torch.Tensor = received.movedim(0, gathered).contiguous().view(sizes)
    return made


INSIDE: dict[OpOverload, Callable[..., object]] = {torch.ops._dtensor.shard_dim_alltoall.default: _to_another_dimension}
"""For each operator, a function that repeats its GPU allocations with torch's operators."""
