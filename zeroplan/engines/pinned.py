"""How much host memory does torch use for a pinned tensor?

A block of a power of two, which the allocator keeps for the next request of that size and never frees. Source: torch 2.13,
``ATen/core/CachingHostAllocator.h``, ``CachingHostAllocatorImpl::allocate``, with its default settings
(``pinned_max_round_threshold_mb`` in ``PYTORCH_ALLOC_CONF`` would end the rounding).
"""

from collections import Counter
from collections.abc import Iterable

from zeroplan.engines.account import Symbol
from zeroplan.ledger import Kind, Line
from zeroplan.numeric import Int, next_power_of_2

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
