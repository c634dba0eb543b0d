"""The order of a pipeline rank's forward and backward passes through its stages.

The orders are those of torch 2.13, ``torch/distributed/pipelining/schedules.py``: ``ScheduleGPipe``, ``Schedule1F1B``,
``ScheduleInterleaved1F1B`` and, with backwards split into inputs first and weights later, ``ScheduleInterleavedZeroBubble``
(ZB-1P of Qi et al. 2024, arXiv:2401.10241, over several stages) and ``ScheduleZBVZeroBubble``.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

Pass = Literal["forward", "backward", "input", "weights"]
"""The last two are the halves of a split backward."""


class Action(NamedTuple):
    """One pass of one micro-batch through one of the rank's stages, counted from 0 in layer order."""

    kind: Pass
    chunk: int
    micro_batch: int


@lru_cache(maxsize=4096)
def interleaved(*, rank: int, pp: int, chunks: int, micro_batches: int) -> tuple[Action, ...]:
    """Return the order of ``ScheduleInterleaved1F1B``: some forwards first, then forwards and backwards alternately.

    >>> [f"{one.kind[0]}{one.chunk}.{one.micro_batch}" for one in interleaved(rank=1, pp=2, chunks=2, micro_batches=2)]
    ['f0.0', 'f0.1', 'f1.0', 'b1.0', 'f1.1', 'b1.1', 'b0.0', 'b0.1']
    """
    in_a_round = micro_batches // max(1, micro_batches // pp)
    every = chunks * micro_batches
    ahead = min((chunks - 1) * in_a_round + 2 * (pp - 1 - rank), every)
    forwards = in_rounds("forward", every, in_a_round, chunks)
    backwards = in_rounds("backward", every, in_a_round, chunks)
    made = [next(forwards) for _ in range(ahead)]
    for forward in forwards:
        made += [forward, next(backwards)]
    return (*made, *backwards)


def in_rounds(kind: Pass, every: int, in_a_round: int, chunks: int) -> Iterator[Action]:
    """Yield passes in rounds: ``in_a_round`` micro-batches per stage, then the next stage; backwards start at the last stage."""
    taken = [0] * chunks
    for step in range(every):
        at = step // in_a_round % chunks
        chunk = at if kind == "forward" else chunks - 1 - at
        yield Action(kind, chunk, taken[chunk])
        taken[chunk] += 1


@lru_cache(maxsize=4096)
def zero_bubble(*, rank: int, pp: int, chunks: int, micro_batches: int) -> tuple[Action, ...]:
    """Return the order of ``ScheduleInterleavedZeroBubble``: weights follow inputs after as many passes as the rank's number.

    >>> [f"{one.kind[0]}{one.chunk}.{one.micro_batch}" for one in zero_bubble(rank=1, pp=2, chunks=2, micro_batches=2)]
    ['f0.0', 'f0.1', 'f1.0', 'i1.0', 'f1.1', 'i1.1', 'w1.0', 'i0.0', 'w1.1', 'i0.1', 'w0.0', 'w0.1']
    """
    in_a_round = micro_batches // max(1, micro_batches // pp)
    every = chunks * micro_batches
    ahead = min((chunks - 1) * in_a_round + pp - 1 - rank, every)
    forwards = in_rounds("forward", every, in_a_round, chunks)
    inputs = in_rounds("input", every, in_a_round, chunks)
    weights = in_rounds("weights", every, in_a_round, chunks)
    made = [next(forwards) for _ in range(ahead)]
    for turn, one in enumerate(inputs):
        made += [*_next(forwards), one]
        if turn >= rank:
            made.append(next(weights))
    return (*made, *weights)


def _next(actions: Iterator[Action]) -> list[Action]:
    one = next(actions, None)
    return [] if one is None else [one]


@lru_cache(maxsize=4096)
def v_shaped(*, rank: int, pp: int, micro_batches: int) -> tuple[Action, ...]:
    """Return the order of ``ScheduleZBVZeroBubble``: one stage on the way down, one on the way up.

    The order is made for at least 2p - 1 micro-batches; missing ones are skipped.

    >>> [f"{one.kind[0]}{one.chunk}.{one.micro_batch}" for one in v_shaped(rank=1, pp=2, micro_batches=2)]
    ['f0.0', 'f1.0', 'f0.1', 'f1.1', 'i1.0', 'w1.0', 'i0.0', 'w0.0', 'i1.1', 'w1.1', 'i0.1', 'w0.1']
    """
    made = _VOrder()
    for _ in range(2 * (pp - rank) - 1):
        made.take("forward", 0)
    for _ in range(rank):
        made.take("forward", 1)
        made.take("forward", 0)
    for _ in range(pp - rank):
        made.take("forward", 1)
        made.both(1)
    _steady(made, max(2 * pp - 1, micro_batches))
    for _ in range(rank):
        made.take("input", 0)
        made.take("input", 1)
    for _ in range(pp - rank):
        made.both(0)
    for chunk in (1, 0):
        while made.taken["weights", chunk] < made.taken["input", chunk]:
            made.take("weights", chunk)
    return tuple(one for one in made.actions if one.micro_batch < micro_batches)


def _steady(made: "_VOrder", count: int) -> None:
    while made.taken["forward", 1] < made.taken["forward", 0] or made.taken["forward", 0] < count:
        if made.taken["forward", 0] < count:
            made.take("forward", 0)
        made.both(0)
        made.take("forward", 1)
        made.both(1)


_KINDS: tuple[Pass, ...] = ("forward", "input", "weights")


class _VOrder:
    """Actions so far, and the number of each stage's actions by kind."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.taken: dict[tuple[Pass, int], int] = {(kind, chunk): 0 for kind in _KINDS for chunk in (0, 1)}

    def take(self, kind: Pass, chunk: int) -> None:
        self.actions.append(Action(kind, chunk, self.taken[kind, chunk]))
        self.taken[kind, chunk] += 1

    def both(self, chunk: int) -> None:
        """Add a backward of inputs, then one of weights."""
        self.take("input", chunk)
        self.take("weights", chunk)
