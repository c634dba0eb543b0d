"""How much host memory does torch use for pinned tensors, and for offloaded activations?

A pinned tensor takes a block of a power of two, which the allocator keeps for the next request of that size and never frees.
Source: torch 2.13, ``ATen/core/CachingHostAllocator.h``, ``CachingHostAllocatorImpl::allocate``, with its default settings
(``pinned_max_round_threshold_mb`` in ``PYTORCH_ALLOC_CONF`` would end the rounding).
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from zeroplan.engines.account import Account, Symbol
from zeroplan.engines.formulas import blocks_sum
from zeroplan.ledger import Kind, Line, total_bytes
from zeroplan.numeric import Int, next_power_of_2
from zeroplan.spec.recipe import Recompute
from zeroplan.transformer.blocks import BlockPass
from zeroplan.transformer.offloaded import SAVED_ON_CPU

PINNED = "torch 2.13, ATen/core/CachingHostAllocator.h, CachingHostAllocatorImpl::allocate"


def rounding(n_bytes: Int) -> Int:
    """Return how much a pinned tensor's block exceeds it; ``n_bytes`` is at least 1. [bytes]

    >>> rounding(4096), rounding(5000)
    (0, 3192)
    """
    return next_power_of_2(n_bytes) - n_bytes


def block_bytes(n_bytes: int) -> int:
    """Return the size of the block for one pinned tensor of at least 1 byte. [bytes]

    >>> block_bytes(5000)
    8192
    """
    return 1 << (n_bytes - 1).bit_length()


def pinned_bytes(freed: Iterable[int], requests: Iterable[int]) -> int:
    """Return the size of all blocks after requests ``requests``, which first reuse the blocks of the ``freed`` tensors. [bytes]

    >>> pinned_bytes(freed=[3000, 900], requests=[4000, 5000])
    13312
    """
    free = Counter(block_bytes(n_bytes) for n_bytes in freed)
    taken = sum(size * count for size, count in free.items())
    for n_bytes in requests:
        size = block_bytes(n_bytes)
        if free[size]:
            free[size] -= 1
        else:
            taken += size
    return taken


def beyond(n_bytes: Int) -> Line:
    """Return the size of pinned blocks beyond their tensors, as symbol ``H_p``. [bytes]"""
    reason = "pinned memory beyond the tensors in it: rounded up to powers of two, and blocks kept for reuse"
    return Line(Kind.WORKSPACE, n_bytes, reason, "1·H_p", PINNED)


def beyond_symbol(n_bytes: Int) -> Symbol:
    """Return the symbol of :func:`beyond`."""
    return Symbol("H_p", n_bytes, "bytes that torch's allocator of pinned memory takes beyond the tensors in it")


_REASON = "inputs of all blocks, from their forward to their backward"
_SAVED = "all that blocks save, each tensor as often as it is saved and views of weights among them"


def note(recompute: Recompute) -> str:
    """Return the note on offloaded activations."""
    what = _SAVED if recompute == "none" else "inputs of blocks"
    return f"{what}, {'is' if recompute == 'none' else 'are'} in pinned host memory from their forward to their backward"


class OffloadedActivations(NamedTuple):
    """The offloaded tensors as lines, and the extra bytes of their pinned blocks. [bytes]"""

    lines: tuple[Line, ...]
    beyond_bytes: Int
    symbols: tuple[Symbol, ...] = ()
    """The symbols in the formulas of the lines."""


NOTHING = OffloadedActivations((), 0)


def offloaded_activations(recompute: Recompute, blocks: Iterable[tuple[str, BlockPass, int]]) -> OffloadedActivations:
    """Return the host memory of this many layers of each kind at the end of the forward. Each tensor is pinned separately."""
    n_bytes: Int = 0
    rounded: Int = 0
    layers_of, each, formula = dict[str, int](), dict[str, Int](), ""
    for kind, block, layers in blocks:
        layers_of[kind], each[kind] = layers_of.get(kind, 0) + layers, total_bytes(block.on_host)
        for line in block.on_host:
            n_bytes, rounded = n_bytes + layers * line.n_bytes, rounded + layers * rounding(line.n_bytes)
            formula = f"L·{line.formula}"  # in all kinds of blocks a block's input has the same size
    if not formula:
        return NOTHING
    if recompute != "none":
        return OffloadedActivations((Line(Kind.ACTIVATIONS, n_bytes, _REASON, formula, SAVED_ON_CPU),), rounded)
    formula = blocks_sum("H", tuple(layers_of.values()), tuple(layers_of))
    symbols = [Symbol(f"H_{kind}", size, f"bytes one {kind} block has in host memory") for kind, size in each.items()]
    return OffloadedActivations((Line(Kind.ACTIVATIONS, n_bytes, _SAVED, formula, SAVED_ON_CPU),), rounded, tuple(symbols))


def with_offloaded_activations(answer: Account, recompute: Recompute, blocks: Iterable[tuple[str, BlockPass, int]]) -> Account:
    """Add offloaded activations to the account of an engine that offloads nothing else."""
    offloaded = offloaded_activations(recompute, blocks)
    return answer._replace(
        host=(*answer.host, *offloaded.lines, beyond(offloaded.beyond_bytes)),
        symbols=(*answer.symbols, *offloaded.symbols, beyond_symbol(offloaded.beyond_bytes)),
        notes=(*answer.notes, note(recompute)),
    )
