"""When does DeepSpeed reduce a bucket of gradients during the backward pass, and which gradients are in it?

A gradient goes into the bucket when it is made; one that no longer fits sends the bucket off first. Gradients are made in the
reverse of the order in which the modules run, which differs from that of ``model.parameters()`` for norms.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from zeroplan.engines.deepspeed.flat import Placed, Row, count_below
from zeroplan.numeric import Int


class Flush(NamedTuple):
    """One bucket that is reduced, and where the backward stands then."""

    low: int
    high: int
    """The elements of the row of parameters between which its own lie."""
    fill: int
    single: bool
    """It is one gradient."""
    alone: bool
    """It is one gradient too large for the bucket, reduced where it is."""
    arriving: int
    """Elements of the gradient that did not fit; 0 at the end of the backward."""
    block: int
    made: int
    """The block that runs and the elements of its gradients made, the arriving one included."""


@dataclass(frozen=True, eq=False, slots=True)
class Schedule:
    """All buckets of one backward pass, the last one first, so that their places ascend; one object per model and size."""

    whole: Row
    size: int
    flushes: tuple[Flush, ...]
    lows: tuple[int, ...]
    highs: tuple[int, ...]
    fills: tuple[int, ...]
    arriving: tuple[int, ...]
    blocks: tuple[int, ...]
    made: tuple[int, ...]
    held: tuple[int, ...]
    """Elements of a gradient that is reduced where it is, beside the bucket."""


@lru_cache(maxsize=256)
def schedule(whole: Row, size: int) -> Schedule:
    """Fill and reduce buckets of ``size`` elements as the backward pass goes.

    Source: DeepSpeed 0.19.8, ``stage_1_and_2.py``, ``reduce_independent_p_g_buckets_and_remove_grads``.

    >>> from zeroplan.engines.deepspeed.flat import row
    >>> from zeroplan.spec.model import ModelSpec
    >>> tiny = ModelSpec(family="llama", hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
    ...                  num_key_value_heads=1, head_dim=4, vocab_size=10)
    >>> [flush.fill for flush in schedule(row(tiny), 10**9).flushes], len(schedule(row(tiny), 500).flushes)
    ([1352], 3)
    """
    flushes: list[Flush] = []
    inside: list[Placed] = []
    fill, made, block = 0, 0, whole.n_blocks
    for each in reversed(whole.executed):
        numel = each.end - each.start
        made = numel + (made if each.block == block else 0)
        block = each.block
        if fill and fill + numel > size:
            flushes.append(_flush(inside, fill, size, numel)._replace(block=block, made=made))
            inside, fill = [], 0
        inside.append(each)
        fill += numel
    flushes.append(_flush(inside, fill, size, 0))
    return _columns(whole, size, tuple(reversed(flushes)))


def _flush(inside: list[Placed], fill: int, size: int, arriving: int) -> Flush:
    low, high = min(each.start for each in inside), max(each.end for each in inside)
    return Flush(low, high, fill, len(inside) == 1, fill > size, arriving, -1, 0)


def _columns(whole: Row, size: int, flushes: tuple[Flush, ...]) -> Schedule:
    return Schedule(
        whole,
        size,
        flushes,
        tuple(flush.low for flush in flushes),
        tuple(flush.high for flush in flushes),
        tuple(flush.fill for flush in flushes),
        tuple(flush.arriving for flush in flushes),
        tuple(flush.block for flush in flushes),
        tuple(flush.made for flush in flushes),
        tuple(flush.fill if flush.alone else 0 for flush in flushes),
    )


def flush_over(buckets: Schedule, element: Int) -> Int:
    """Index of the bucket that holds the element before ``element``, so one that spans a border there if any does."""
    index: Int = count_below(buckets.lows, element) - 1
    return index


@lru_cache(maxsize=256)
def first_bucket_elements(buckets: Schedule) -> int:
    """Fill of the first bucket when gradients are reduced after the backward, in the order of the parameters. [elements]"""
    fill = 0
    for each in buckets.whole.placed:
        numel = each.end - each.start
        if fill and fill + numel > buckets.size:
            break
        fill += numel
    return fill


@lru_cache(maxsize=4096)
def waiting_elements(buckets: Schedule, block: int, made: int) -> tuple[int, int]:
    """Of a block's latest gradient and of the one before: elements that wait outside the bucket, too large for it."""
    sizes = [each.end - each.start for each in reversed(buckets.whole.executed) if each.block == block]
    numels = [size for size, before in zip(sizes, (0, *accumulate(sizes)), strict=False) if before < made]
    latest, before = ([0, 0, *numels][-1], [0, 0, *numels][-2])
    return (latest if latest > buckets.size else 0), (before if before > buckets.size else 0)
