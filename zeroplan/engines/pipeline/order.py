"""The order of a pipeline rank's forward and backward passes through its stages.

The orders are those of torch 2.13, ``torch/distributed/pipelining/schedules.py``: ``ScheduleGPipe``, ``Schedule1F1B`` and
``ScheduleInterleaved1F1B``.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

Pass = Literal["forward", "backward", "input", "weights"]
"""The last two are the halves of a split backward (``halves_order.py``)."""


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
