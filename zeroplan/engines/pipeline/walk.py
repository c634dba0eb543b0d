"""What waits on a pipeline rank while it takes one pass: micro-batches in flight, tensors that sends still hold, gradients.

Everything here follows from the order of passes and from what the schedule's code refers to. Outputs of stages and gradients of
their inputs are freed when nobody refers to them: the schedule's own variables hold the last ones, and a send holds its tensor
until it is dropped, which GPipe and the interleaved schedules do at the end of the step only.

Source: torch 2.13, torch/distributed/pipelining/schedules.py, ``_step_microbatches`` of each schedule; stage.py,
``fwd_cache``.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

from zeroplan.engines.pipeline.order import Pass, interleaved
from zeroplan.spec.pipeline import SINGLE, PipelineSchedule


class State(NamedTuple):
    """What waits while a pass is taken; one entry for each of the rank's stages where there are several.

    ``flying``: micro-batches between their forward and their backward, the one whose pass this is left out; ``outputs``: outputs
    of the stage that somebody refers to, that one's among them in its backward; ``sent``: gradients of inputs that somebody refers
    to; ``earlier``: 1 where a micro-batch has left gradients; ``whole``: whether the stage's parameters are unsharded when the
    pass begins; ``reduced``: whether its gradients are, and it is sharded again.
    """

    kind: Pass | Literal["reducing"]
    chunk: int
    flying: tuple[int, ...]
    outputs: tuple[int, ...]
    sent: int
    earlier: tuple[int, ...]
    whole: tuple[bool, ...]
    reduced: tuple[bool, ...]
    begins: bool = False
    """It is the stage's first pass of the step, before which all of it was sharded."""
    between: tuple[int, ...] = ()
    """Of schedules that split backwards (``halves_walk.py``): micro-batches between the two halves of their backward."""
    fresh: tuple[int, ...] = ()
    """Of the same: 1 where gradients of weights are as they were made, and not taken up yet."""
    ahead: bool = False
    """The last stage has run a micro-batch forward since its last backward: a loss in chunks has left the head's gradient."""

    def has_begun(self, at: int) -> bool:
        """Whether a micro-batch has been through one of the stages in this step, and is there or has left gradients."""
        return bool(self.flying[at] or self.earlier[at] or (self.between and (self.between[at] or self.fresh[at])))


class Place(NamedTuple):
    """Where in a pipeline a rank stands: structure, and the number of micro-batches."""

    schedule: PipelineSchedule
    rank: int
    pp: int
    chunks: int
    micro_batches: int


@lru_cache(maxsize=4096)
def states(place: Place, *, resharded: bool) -> tuple[State, ...]:
    """The states of a step that no other surpasses: a handful, however many micro-batches there are.

    ``resharded`` says that blocks are sharded again after each forward.
    """
    walks = {"gpipe": _gpipe, "1f1b": _one_forward_one_backward}
    walk = walks[place.schedule](place) if place.schedule in SINGLE else _interleaved(place)
    return highest(_with_the_head(_with_parameters(walk, resharded=resharded, at_first=place.schedule not in SINGLE)))


class Gathers(NamedTuple):
    """How often a stage's blocks are gathered in a step."""

    forward: int
    backward: int


@lru_cache(maxsize=4096)
def gathers(place: Place, *, resharded: bool) -> tuple[Gathers, ...]:
    """Count for each of the rank's stages.

    >>> gathers(Place("1f1b", 0, 4, 1, 16), resharded=True)  # 4 forwards in a row, then a backward after each forward
    (Gathers(forward=4, backward=13),)
    """
    if not resharded:
        return (Gathers(1, 0),) * place.chunks
    ahead = min(place.micro_batches, place.pp - place.rank)
    if place.schedule == "gpipe":
        return (Gathers(place.micro_batches, 1),)
    if place.schedule == "1f1b":
        return (Gathers(ahead, place.micro_batches - ahead + 1),)
    walk = tuple(_with_parameters(_interleaved(place), resharded=True, at_first=True))
    return tuple(
        Gathers(1 + _sharded(walk, "forward", chunk), _sharded(walk, "backward", chunk)) for chunk in range(place.chunks)
    )


def _sharded(walk: tuple[State, ...], kind: str, chunk: int) -> int:
    """Passes of one kind that find their stage sharded."""
    return sum((state.kind, state.chunk, state.whole[chunk]) == (kind, chunk, False) for state in walk)


def _gpipe(place: Place) -> Iterator[State]:
    """All forwards, then all backwards; sends are held until the step ends, and the last stage's last output too."""
    count, is_first, is_last = place.micro_batches, place.rank == 0, place.rank == place.pp - 1
    for index in _ends(count):
        yield _single("forward", index, index, 0, 0)
    for index in _ends(count):
        outputs = count - index if is_last else count
        yield _single("backward", count - 1 - index, outputs, 0 if is_first else index, min(index, 1))
    yield _single("reducing", 0, 1 if is_last else count, 0 if is_first else count, 1)


def _ends(count: int) -> tuple[int, ...]:
    """The first two and the last: between them everything is linear."""
    return tuple(sorted({0, min(1, count - 1), count - 1}))


def _single(kind: Literal["forward", "backward", "reducing"], flying: int, outputs: int, sent: int, earlier: int) -> State:
    return State(kind, 0, (flying,), (outputs,), sent, (earlier,), (False,), (False,))


def _one_forward_one_backward(place: Place) -> Iterator[State]:
    """Follow the variables of ``Schedule1F1B``: which outputs and gradients the last sends still hold."""
    is_first, is_last = place.rank == 0, place.rank == place.pp - 1
    ahead = min(place.micro_batches, place.pp - place.rank)
    count = min(place.micro_batches, 2 * ahead + 2)  # after so many, every one goes as the one before it
    cached: set[int] = set()
    named: set[int] = set()  # `output`
    to_send: set[int] = set()  # `fwd_sends`
    in_work: set[int] = set()  # `send_work`, while micro-batches go forward only
    sent = 0  # `bwd_sends`, whose tensor `send_work` holds too at the end
    done = 0

    def state(kind: Literal["forward", "backward", "reducing"], flying: int) -> State:
        return _single(kind, flying, len(cached | named | to_send | in_work), sent, min(done, 1))

    for index in range(count + ahead):
        if index < count:
            yield state("forward", len(cached))
            cached.add(index)
            named = {index}
            to_send = set() if is_last else {index}
            if index < ahead - 1:
                in_work = to_send
        if index < ahead - 1 or done == count:
            continue
        if index >= count:
            in_work = set()
        yield state("backward", len(cached) - 1)
        cached.discard(done)
        done += 1
        sent = 0 if is_first else 1
    in_work = set()
    yield state("reducing", 0)


def _interleaved(place: Place) -> Iterator[State]:
    """Sends are held until the step ends; a stage's gradients are reduced right after its last backward."""
    every = range(place.chunks)
    first, last = place.rank == 0, place.rank == place.pp - 1
    flying, outputs, backwards = [0 for _ in every], [0 for _ in every], [0 for _ in every]
    sent = 0
    reduced = [False for _ in every]

    def state(kind: Pass | Literal["reducing"], chunk: int) -> State:
        waiting = tuple(number - (at == chunk and kind == "backward") for at, number in enumerate(flying))
        earlier = tuple(min(number, 1) for number in backwards)
        return State(kind, chunk, waiting, tuple(outputs), sent, earlier, tuple(False for _ in every), tuple(reduced))

    order = interleaved(rank=place.rank, pp=place.pp, chunks=place.chunks, micro_batches=place.micro_batches)
    for kind, chunk, _ in order:
        yield state(kind, chunk)
        ends_here, begins_here = last and chunk == place.chunks - 1, first and chunk == 0
        if kind == "forward":
            flying[chunk] += 1
            outputs[chunk] += 1
            continue
        flying[chunk] -= 1
        backwards[chunk] += 1
        outputs[chunk] -= ends_here
        sent += not begins_here
        if backwards[chunk] == place.micro_batches:
            yield state("reducing", chunk)
            reduced[chunk] = True


def _with_parameters(walk: Iterator[State], *, resharded: bool, at_first: bool) -> Iterator[State]:
    """Say which stages are unsharded when a pass begins: from their first pass on, and until their next forward's end.

    A backward leaves its stage unsharded, since no gradient is reduced after it; the runtime of the interleaved schedules
    unshards all stages at first.
    """
    whole: list[bool] | None = None
    begun: set[int] = set()
    for state in walk:
        if whole is None:
            whole = [at_first for _ in state.flying]
        now = tuple(here and not done for here, done in zip(whole, state.reduced, strict=True))
        yield state._replace(whole=now, begins=state.chunk not in begun)
        begun.add(state.chunk)
        whole[state.chunk] = state.kind == "backward" or (state.kind == "forward" and not resharded)


def _with_the_head(walk: Iterator[State]) -> Iterator[State]:
    """Say whether the rank's last stage has run forward since it last ran backward."""
    ahead = False
    for state in walk:
        yield state._replace(ahead=ahead)
        if state.chunk == len(state.flying) - 1 and state.kind != "reducing":
            ahead = state.kind == "forward"


def highest(walk: Iterator[State]) -> tuple[State, ...]:
    """Leave out states that another surpasses everywhere."""
    kept: list[State] = []
    for state in dict.fromkeys(walk):
        if any(_surpasses(other, state) for other in kept):
            continue
        kept = [other for other in kept if not _surpasses(state, other)]
        kept.append(state)
    return tuple(kept)


def _surpasses(one: State, other: State) -> bool:
    """Whether as much waits everywhere, or more; what is reduced already is less."""
    if (one.kind, one.chunk, one.whole, one.begins) != (other.kind, other.chunk, other.whole, other.begins):
        return False
    if (one.fresh, one.ahead) != (other.fresh, other.ahead):
        return False
    mine, theirs = ((*state.flying, *state.outputs, state.sent, *state.earlier, *state.between) for state in (one, other))
    left = all(now <= then for now, then in zip(one.reduced, other.reduced, strict=True))
    return left and all(here >= there for here, there in zip(mine, theirs, strict=True))
