"""The counts behind a pipeline rank's waiting tensors in each pass: micro-batches in flight, sent tensors, gradients.

A schedule's program (:mod:`zeroplan.engines.pipeline.schedule`) drives stages that count. If backwards are split, nearly all
tensors of a micro-batch stay from the first half of its backward to the second, together with gradients of operators' outputs.
Weight gradients of a second half stay in the compute dtype until the next first half of that stage, in which FSDP2's hooks
accumulate them.

Source: torch 2.13, torch/distributed/pipelining/_backward.py, ``stage_backward_input`` and ``stage_backward_weight``; stage.py,
``backward_one_chunk`` and ``backward_weight_one_chunk``.
"""

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from operator import ge
from typing import Literal, NamedTuple

from zeroplan.engines.pipeline.order import Pass
from zeroplan.engines.pipeline.schedule import Passes, Place
from zeroplan.spec.pipeline import SINGLE, SPLIT

_FULL: tuple[Pass, ...] = ("forward", "backward")


class State(NamedTuple):
    """Counts of waiting tensors during a pass; tuples have one entry per stage of the rank.

    ``in_flight``: micro-batches between forward and backward, without the one whose pass this is; ``outputs``: outputs of the
    stage that something refers to, including that micro-batch's in its backward; ``sent``: input gradients that something
    refers to; ``earlier``: 1 if a micro-batch has left gradients; ``whole``: whether the stage's parameters are unsharded when
    the pass begins; ``reduced``: whether its gradients are reduced and it is sharded again; ``sharded``: whether the schedule
    has sharded it for now; ``begun``: whether it has run since the schedule gathered it.
    """

    kind: Pass | Literal["reducing"]
    chunk: int
    in_flight: tuple[int, ...]
    outputs: tuple[int, ...]
    sent: int
    earlier: tuple[int, ...]
    whole: tuple[bool, ...]
    reduced: tuple[bool, ...]
    sharded: tuple[bool, ...]
    begun: tuple[bool, ...]
    begins: bool = False
    """It is the stage's first pass since all of the stage was sharded."""
    between: tuple[int, ...] = ()
    """With split backwards: micro-batches between the two halves of their backward."""
    fresh: tuple[int, ...] = ()
    """With split backwards: 1 if weight gradients of a second half are not accumulated yet."""
    ahead: bool = False
    """The last stage has run a forward since its last backward, so a chunked loss has left the head's gradient."""


@lru_cache(maxsize=4096)
def states(place: Place, *, resharded: bool, widened: bool = False) -> tuple[State, ...]:
    """The states of a step that no other surpasses: a handful, however many micro-batches there are.

    ``resharded`` says that blocks are sharded again after each forward; ``widened`` that gradients are reduced in a wider dtype
    than they are made in, and add up in that.
    """
    return _highest(_walked(place, resharded=resharded, widened=widened))


def left_over(place: Place) -> int:
    """Return how many input gradients stay until the next step: ``stage_backward_input`` leaves them on the received tensors.

    A stage that gets its input from a stage of the same rank leaves none.
    """
    chunks = [chunk for chunk in range(place.chunks) if not (place.is_first(chunk) or place.stays_on_rank(chunk - 1))]
    return len(chunks) * place.micro_batches


class Gathers(NamedTuple):
    """How often a stage's blocks are gathered in a step."""

    forward: int
    backward: int


@lru_cache(maxsize=4096)
def unshards(place: Place) -> tuple[Gathers, ...]:
    """Return how often each of the rank's stages is gathered whole in a step.

    >>> unshards(Place("interleaved-1f1b", 0, 2, 4, 2))
    (Gathers(forward=1, backward=1), Gathers(forward=1, backward=0), Gathers(forward=1, backward=0), Gathers(forward=1, backward=0))
    """
    if place.schedule in SINGLE:
        return (Gathers(1, 0),)
    walk = _walked(place, resharded=False)
    return tuple(
        Gathers(*(sum(state.begins for state in walk if (state.kind, state.chunk) == (kind, chunk)) for kind in _FULL))
        for chunk in range(place.chunks)
    )


@lru_cache(maxsize=4096)
def gathers(place: Place, *, resharded: bool) -> tuple[Gathers, ...]:
    """Return the gathers of each of the rank's stages.

    >>> gathers(Place("1f1b", 0, 4, 1, 16), resharded=True)  # 4 forwards in a row, then a backward after each forward
    (Gathers(forward=4, backward=13),)
    """
    if not resharded:
        return unshards(place)
    ahead = min(place.micro_batches, place.pp - place.rank)
    if place.schedule == "gpipe":
        return (Gathers(place.micro_batches, 1),)
    if place.schedule == "1f1b":
        return (Gathers(ahead, place.micro_batches - ahead + 1),)
    walk, whole = _walked(place, resharded=True), unshards(place)
    sharded = Counter((state.kind, state.chunk, state.whole[state.chunk]) for state in walk)
    return tuple(
        Gathers(*(times + sharded[kind, chunk, False] for kind, times in zip(_FULL, whole[chunk], strict=True)))
        for chunk in range(place.chunks)
    )


def _walked(place: Place, *, resharded: bool, widened: bool = False) -> list[State]:
    """Return the state of every pass; under GPipe of the first two and the last, since everything is linear between them."""
    ahead = min(place.micro_batches, place.pp - place.rank)
    micro_batches: Iterable[int] = range(place.micro_batches)
    if place.schedule == "1f1b":  # after so many micro-batches, each one repeats the one before
        place = place._replace(micro_batches=min(place.micro_batches, 2 * ahead + 2))
    elif place.schedule == "gpipe":
        micro_batches = sorted({0, min(1, place.micro_batches - 1), place.micro_batches - 1})
    walk = _Walk(place, micro_batches, resharded=resharded, widened=widened)
    Passes(place, walk.stages).run()
    return walk.states


class _Walk:
    """Records the waiting tensors as the passes run."""

    def __init__(self, place: Place, micro_batches: Iterable[int], *, resharded: bool, widened: bool) -> None:
        """``micro_batches``: the micro-batches whose passes to record."""
        self.splits, self.told, self.resharded, self.widened = (
            place.schedule in SPLIT,
            frozenset(micro_batches),
            resharded,
            widened,
        )
        self.states: list[State] = []
        self.stages = [Counted(self, chunk, is_first=place.is_first(chunk)) for chunk in range(place.chunks)]
        self.ahead = False

    def note(self, kind: Pass | Literal["reducing"], chunk: int, micro_batch: int) -> None:
        """Record the state as a pass or a stage's reduction begins."""
        of, stages = self.stages[chunk], self.stages
        if micro_batch in self.told:
            self.states.append(
                State(
                    kind, chunk, tuple([one.in_flight for one in stages]), tuple([len(one.outputs) for one in stages]),
                    sum([len(one.sends) for one in stages]), tuple([one.earlier for one in stages]),
                    tuple([one.whole and not one.reduced for one in stages]), tuple([one.reduced for one in stages]),
                    tuple([one.sharded for one in stages]), tuple([one.begun for one in stages]), not of.begun,
                    tuple([one.between for one in stages]) if self.splits else (),
                    tuple([one.fresh for one in stages]) if self.splits else (), self.ahead,
                )
            )  # fmt: skip
        of.begun = True
        if of is stages[-1] and not self.splits and kind != "reducing":
            self.ahead = kind == "forward"


class Counted:
    """Counts the tensors that a stage's micro-batches have left."""

    def __init__(self, walk: _Walk, chunk: int, *, is_first: bool) -> None:
        self.walk, self.chunk, self.is_first = walk, chunk, is_first
        self.in_flight = self.between = self.earlier = self.fresh = 0
        self.outputs, self.sends = set[int](), set[int]()
        self.begun = self.reduced = self.whole = False
        self.sharded = True

    def forward_of(self, micro_batch: int) -> None:
        """Count a forward, after which blocks may be resharded."""
        self.walk.note("forward", self.chunk, micro_batch)
        self.in_flight += 1
        self.outputs.add(micro_batch)
        self.whole = not self.walk.resharded

    def backward_of(self, micro_batch: int) -> None:
        """Count a backward. It leaves the stage unsharded, since no gradient is reduced after it."""
        self.in_flight -= 1
        self.walk.note("backward", self.chunk, micro_batch)
        self.earlier, self.whole = 1, True
        self._send(micro_batch)

    def _send(self, micro_batch: int) -> None:
        if not self.is_first:
            self.sends.add(micro_batch)

    def input_of(self, micro_batch: int) -> None:
        """Count a first half, which accumulates the gradients of an earlier second half."""
        self.in_flight -= 1
        self.walk.note("input", self.chunk, micro_batch)
        self.between += 1
        self._send(micro_batch)
        if self.fresh:
            self.earlier, self.fresh = 1, 0

    def weights_of(self, micro_batch: int) -> None:
        """Count a second half."""
        self.between -= 1
        self.walk.note("weights", self.chunk, micro_batch)
        if self.walk.widened:
            self.fresh = 1
        else:
            self.earlier = 1

    def output_of(self, micro_batch: int) -> None:
        """Release an output."""
        self.outputs.discard(micro_batch)

    def sent(self, micro_batch: int) -> None:
        """Release an input gradient."""
        self.sends.discard(micro_batch)

    def unshard_all(self) -> None:
        """Record that the stage is gathered ahead of its next pass."""
        self.whole, self.sharded, self.begun = True, False, False

    def wait_for_all(self) -> None:
        """Copy the stage out, which its pass records."""

    def reshard_all(self) -> None:
        """Record that the schedule shards the stage."""
        self.whole, self.sharded = False, True

    def reduce(self) -> None:
        """Record the reduction, after which the stage is sharded."""
        self.walk.note("reducing", self.chunk, 0)
        self.reduced = True


def _highest(walk: Iterable[State]) -> tuple[State, ...]:
    """Drop states that another state exceeds in every count."""
    alike: dict[tuple[object, ...], dict[State, tuple[int, ...]]] = {}
    states = tuple(dict.fromkeys(walk))
    for state in states:
        among = alike.setdefault(_compared_within(state), {})
        waits = _waiting(state)
        if any(_reaches(others, waits) for others in among.values()):
            continue
        for lower in [other for other, others in among.items() if _reaches(waits, others)]:
            del among[lower]
        among[state] = waits
    return tuple(state for state in states if state in alike[_compared_within(state)])


def _compared_within(state: State) -> tuple[object, ...]:
    """Return the parts of a state that must be equal for a comparison."""
    return state.kind, state.chunk, state.whole, state.sharded, state.begun, state.fresh, state.ahead


def _waiting(state: State) -> tuple[int, ...]:
    """Return the counts to compare. Reduced stages count negatively, since they hold less."""
    left = [-reduced for reduced in state.reduced]
    return (*state.in_flight, *state.outputs, state.sent, *state.earlier, *state.between, *left)


def _reaches(mine: tuple[int, ...], theirs: tuple[int, ...]) -> bool:
    return all(map(ge, mine, theirs))
