"""What libraries ask torch's allocator for, read from a recording: scratch of attention's kernels, workspaces of products.

No formula gives these to the byte, and which kernel runs is the library's choice; so a record names them as they were seen.
"""

import re
from collections.abc import Iterable, Iterator

from zeroplan.measurement import AttentionMeasured
from zeroplan.verify.watching.allocations import Allocation, Timeline

_ATTENTION = re.compile(r"aten::_scaled_dot_product_\w*attention\w*")
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm")


def attention_of(timeline: Timeline) -> AttentionMeasured | None:
    """The operators that computed attention, and the most scratch that one of them held; None where none ran."""
    found = {name for event in timeline.allocations for name in event.operators if _ATTENTION.fullmatch(name)}
    if not found:
        return None
    return AttentionMeasured(operators=tuple(sorted(found)), scratch_bytes=_most(_scratch(timeline)))


def _scratch(timeline: Timeline) -> Iterator[tuple[int, int]]:
    """What attention's operators ask for and give back before they are done: times with the change in bytes."""
    open_requests: dict[int, Allocation] = {}
    for event in timeline.allocations:
        if event.n_bytes > 0:
            open_requests[event.address] = event
        elif (asked := open_requests.pop(event.address, None)) is not None and _within(asked, event):
            yield asked.time_ns, asked.n_bytes
            yield event.time_ns, -asked.n_bytes


def _within(asked: Allocation, given_back: Allocation) -> bool:
    """Whether a block was given back inside the attention operator that it was asked for in."""
    at = next((at for at, name in enumerate(asked.operators) if _ATTENTION.fullmatch(name)), None)
    return at is not None and given_back.operators[: at + 1] == asked.operators[: at + 1]


def _most(changes: Iterable[tuple[int, int]]) -> int:
    most = now = 0
    for _, n_bytes in sorted(changes):
        now += n_bytes
        most = max(most, now)
    return most


def kept_by_products(alive: Iterable[Allocation], owned: frozenset[int]) -> int:
    """Blocks that a matrix product asked for itself, that are nobody's and that outlive the step: its library's. [bytes]"""
    return sum(
        block.n_bytes for block in alive if block.address not in owned and block.operators and block.operators[-1] in _PRODUCTS
    )
