"""What waits on a rank whose schedule splits backwards: beside micro-batches in flight those whose weights are still to come.

Nearly all that a micro-batch has left in a stage stays from the first half of its backward to the second, and gradients of
operators' outputs with it. The first stage of all has no input to make a gradient for: its first half does nothing, and its
second is a whole backward. Stages stay unsharded from their first pass to the reduction of their gradients. Gradients of weights
that the second half makes stay in the compute dtype until the next first half of that stage, in which FSDP2's hooks take them up.

Source: torch 2.13, torch/distributed/pipelining/_backward.py, ``stage_backward_input`` and ``stage_backward_weight``; stage.py,
``backward_one_chunk`` and ``backward_weight_one_chunk``.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal

from zeroplan.engines.pipeline.halves_order import v_shaped, zero_bubble
from zeroplan.engines.pipeline.order import Action, Pass
from zeroplan.engines.pipeline.walk import Place, State, highest


def order_of(place: Place) -> tuple[Action, ...]:
    """The passes of a rank, in the order of its schedule."""
    if place.schedule == "zbv":
        return v_shaped(rank=place.rank, pp=place.pp, micro_batches=place.micro_batches)
    return zero_bubble(rank=place.rank, pp=place.pp, chunks=place.chunks, micro_batches=place.micro_batches)


@lru_cache(maxsize=4096)
def split_states(place: Place, *, widened: bool) -> tuple[State, ...]:
    """The states of a step that no other surpasses.

    ``widened`` says that gradients are reduced in a wider dtype than they are made in, and add up in that.
    """
    return highest(_Walk(place, widened=widened).states())


def left_over(place: Place) -> int:
    """Gradients of inputs that stay until the next step begins: ``stage_backward_input`` leaves them on what was received.

    What a rank hands to its own next stage is what that stage received, and counts there.
    """
    chunks = [chunk for chunk in range(place.chunks) if not (_is_first(place, chunk) or goes_by_hand(place, chunk - 1))]
    return len(chunks) * place.micro_batches


def _is_first(place: Place, chunk: int) -> bool:
    return place.rank == 0 and chunk == 0


def _is_last(place: Place, chunk: int) -> bool:
    last_rank = 0 if place.schedule == "zbv" else place.pp - 1
    return place.rank == last_rank and chunk == place.chunks - 1


def goes_by_hand(place: Place, chunk: int) -> bool:
    """Whether what this stage sends goes to the next stage of the same rank: at the bottom of the V."""
    return place.schedule == "zbv" and place.rank == place.pp - 1 and chunk == 0


class _Walk:
    """What waits, as one pass follows the other."""

    def __init__(self, place: Place, *, widened: bool) -> None:
        every = range(place.chunks)
        self.place, self.widened = place, widened
        self.flying, self.between, self.outputs = [0 for _ in every], [0 for _ in every], [0 for _ in every]
        self.earlier, self.fresh, self.done = [0 for _ in every], [0 for _ in every], [0 for _ in every]
        self.reduced, self.begun = [False for _ in every], [False for _ in every]
        self.sent = 0

    def states(self) -> Iterator[State]:
        """Every pass, with what waits while it is taken."""
        take = {"forward": self._forward, "input": self._input, "weights": self._weights}
        for action in order_of(self.place):
            yield from take[action.kind](action.chunk)
            if action.kind == "weights" and self.done[action.chunk] == self.place.micro_batches:
                yield self._state("reducing", action.chunk)
                self.reduced[action.chunk] = True

    def _state(self, kind: Pass | Literal["reducing"], chunk: int) -> State:
        flying = [count - (at == chunk and kind in ("input", "backward")) for at, count in enumerate(self.flying)]
        whole = [not done for done in self.reduced]
        between = [count - (at == chunk and kind == "weights") for at, count in enumerate(self.between)]
        return State(
            kind, chunk, tuple(flying), tuple(self.outputs), self.sent, tuple(self.earlier), tuple(whole),
            tuple(self.reduced), not self.begun[chunk], tuple(between), tuple(self.fresh),
        )  # fmt: skip

    def _forward(self, chunk: int) -> Iterator[State]:
        yield self._state("forward", chunk)
        self.begun[chunk] = True
        self.flying[chunk] += 1
        self.outputs[chunk] += not goes_by_hand(self.place, chunk)

    def _input(self, chunk: int) -> Iterator[State]:
        if _is_first(self.place, chunk):
            return
        yield self._state("input", chunk)
        self.flying[chunk] -= 1
        self.between[chunk] += 1
        self.outputs[chunk] -= _is_last(self.place, chunk)
        self.sent += not goes_by_hand(self.place, chunk - 1)
        if self.fresh[chunk]:
            self.earlier[chunk], self.fresh[chunk] = 1, 0

    def _weights(self, chunk: int) -> Iterator[State]:
        self.done[chunk] += 1
        if _is_first(self.place, chunk):
            yield self._state("backward", chunk)
            self.flying[chunk] -= 1
            self.earlier[chunk] = 1
            return
        yield self._state("weights", chunk)
        self.between[chunk] -= 1
        if self.widened:
            self.fresh[chunk] = 1
        else:
            self.earlier[chunk] = 1
