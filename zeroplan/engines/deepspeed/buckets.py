"""The buckets of gradients that DeepSpeed reduces during a backward: when, and with which gradients.

A gradient enters the bucket as soon as it exists. If it does not fit, DeepSpeed first reduces the bucket. Gradients come in the
reverse order of the modules' forward, which for norms differs from ``model.parameters()``.
"""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from zeroplan.engines.rows import Placed, Row, Sizes, arrivals_of, groups_of, in_backward, is_leaf, numel


class Flush(NamedTuple):
    """One reduced bucket, and the position of the backward then."""

    fill: int
    alone: bool
    """It is one gradient too large for the bucket, which is reduced in place."""
    arriving: int
    """Elements of the gradient that did not fit, and of those that wait with it; 0 at the end of the backward."""
    block: int
    made: int
    """The block that runs, and the elements of its gradients so far, including the arriving one."""
    sizes: Sizes
    """Sizes of its gradients, each separately."""
    inside: tuple[Placed, ...]
    """Its gradients, in order of arrival."""


@dataclass(frozen=True, eq=False, slots=True)
class Schedule:
    """All buckets of one backward pass, the last one first; one object per model and size."""

    whole: Row
    size: int
    leaves: bool
    flushes: tuple[Flush, ...]
    fills: dict[int, list[tuple[int, int]]]
    """For each block, the embedding (-1) and the head: elements made and elements in the bucket, after each operator."""


@lru_cache(maxsize=256)
def schedule(whole: Row, size: int, *, leaves: bool = False) -> Schedule:
    """Return the buckets of ``size`` elements that a backward pass fills and reduces.

    With ``leaves``, gradients of a module that is gathered as one arrive together (:func:`arrivals_of`).

    Source: DeepSpeed 0.19.8, ``stage_1_and_2.py``, ``reduce_independent_p_g_buckets_and_remove_grads``.

    >>> from zeroplan.engines.rows import row
    >>> from zeroplan.spec.model import ModelSpec
    >>> tiny = ModelSpec(family="llama", hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
    ...                  num_key_value_heads=1, head_dim=4, vocab_size=10)
    >>> [flush.fill for flush in schedule(row(tiny), 10**9).flushes], len(schedule(row(tiny), 500).flushes)
    ([1352], 3)
    """
    flushes, inside, fill, made = list[Flush](), list[Placed](), 0, 0
    fills: dict[int, list[tuple[int, int]]] = {}
    groups = groups_of(whole, leaves=leaves)
    for block in range(whole.n_blocks, -2, -1):
        fills[block] = [(0, fill)]
        for together in groups.get(block, ()):
            waiting = sum([each.end - each.start for each in together])
            made = fills[block][-1][0] + waiting
            if fill + waiting <= size:
                inside, fill = [*inside, *together], fill + waiting
            else:
                for each in together:
                    if fill and fill + numel(each) > size:
                        flushes.append(_flush(inside, size, waiting, block, made))
                        inside, fill = [], 0
                    inside.append(each)
                    fill += numel(each)
                    waiting -= numel(each)
            fills[block] += ((made, fill),)
    flushes.append(_flush(inside, size, 0, -1, made))
    return Schedule(whole, size, leaves, tuple(reversed(flushes)), fills)


@lru_cache(maxsize=4096)
def leaf_elements(whole: Row, block: int) -> int:
    """Return the elements of a block's parameters in a module that is gathered as one; 0 without such a module."""
    return sum([numel(each) for each in in_backward(whole).get(block, ()) if is_leaf(whole, each.parameter.name)])


def _flush(inside: list[Placed], size: int, arriving: int, block: int, made: int) -> Flush:
    each_size = [each.end - each.start for each in inside]
    fill, sizes = sum(each_size), tuple(Counter(each_size).items())
    return Flush(fill, fill > size, arriving, block, made, sizes, tuple(inside))


@lru_cache(maxsize=4096)
def waiting_elements(buckets: Schedule, block: int, made: int) -> tuple[int, int]:
    """Return the elements that wait outside the bucket when a block's latest gradient exists, and when the one before did.

    A gradient waits if it is too large for the bucket, or if its module is not done (:func:`arrivals_of`). The last one of the
    block above waits for this block's first.
    """
    above = in_backward(buckets.whole).get(block + 1, ())
    waits, so_far = [0, _waiting_after(buckets, above[-1]) if above else 0], 0
    for each in in_backward(buckets.whole).get(block, ()):
        if so_far < made:
            so_far += numel(each)
            waits.append(_waiting_after(buckets, each))
    return waits[-1], waits[-2]


@lru_cache(maxsize=4096)
def _waiting_after(buckets: Schedule, latest: Placed) -> int:
    """Return the elements that wait after the ``latest`` gradient exists and, if its module is done, has arrived."""
    together = next(group for group in arrivals_of(buckets.whole, leaves=buckets.leaves)[latest.block] if latest in group)
    order = [each for each in in_backward(buckets.whole)[latest.block] if each in together]
    if latest is not order[-1]:
        return sum(numel(each) for each in order[: order.index(latest) + 1])
    last = numel(together[-1])
    return last if last > buckets.size else 0


def unreduced_elements(buckets: Schedule, block: int, gradients: int, current: int) -> int:
    """Return the elements that wait for a reduction without a contiguous bucket, when a block has made this many. [elements]

    They are the gradients of the current bucket, and this block's gradients that have not arrived, including ``current`` ones.
    """
    made, fill = 0, 0
    for made_then, filled in buckets.fills[block]:
        if made_then <= gradients - current:
            made, fill = made_then, filled
    return fill + gradients - made
