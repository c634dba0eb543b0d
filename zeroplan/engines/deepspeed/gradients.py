"""What do gradients and reduce buckets take from event to event of a backward pass, under stages 0 to 2 of DeepSpeed?

The optimizer wrappers of DeepSpeed as a program: it receives gradients in the order of the backward, fills and reduces buckets, and
writes down what is alive after each event. Methods have the names of DeepSpeed's own. Activations are not known here, so one course
serves every batch. Source: DeepSpeed 0.19.8, ``runtime/zero/stage_1_and_2.py``.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from typing import Literal, NamedTuple, TypeAlias

from zeroplan.engines.deepspeed.buckets import made_at_once
from zeroplan.engines.deepspeed.flat import Placed, Row, touched_elements
from zeroplan.numeric import Int

FP32, FP64 = 4, 8

Event: TypeAlias = Literal["arrives", "copied", "reduced", "kept", "leaves"]
"""A gradient arrives at DeepSpeed; with offload, one that is too large for the bucket is copied; a bucket is reduced; this rank's
part of it has been kept, or leaves for the host."""


class Held(NamedTuple):
    """What gradients take at one moment. [bytes]"""

    buckets: Int = 0
    gradients: Int = 0
    """Gradients where autograd made them, and sums of those over micro-batches."""
    copy: Int = 0
    """The copy in which a bucket is all-reduced, a copy of a gradient, or one in fp64 for its norm."""
    cast: Int = 0
    """A reduced gradient in fp32, before it is added to the sums."""
    own: Int = 0
    """What this rank keeps of the micro-batch that runs, or fp32 sums over micro-batches."""
    earlier: Int = 0
    """What this rank has kept of earlier micro-batches."""

    @property
    def n_bytes(self) -> Int:
        """All of it. [bytes]"""
        return self.buckets + self.gradients + self.copy + self.cast + self.own + self.earlier


class Seen(NamedTuple):
    """What gradients take, with the block that runs (-1: embedding; the number of blocks: head) and its gradients made so far."""

    block: Int
    made: Int
    held: Held


class Plan(NamedTuple):
    """All that a course depends on."""

    whole: Row
    firsts: tuple[int, ...]
    """First block of every run of like blocks."""
    collects: bool
    """Every gradient stays until the end of the backward, and nothing reduces it before: there is no ZeRO optimizer."""
    stage: int
    element: int
    bucket_size: int
    overlaps: bool
    contiguous: bool
    scatters: bool
    sums_in_fp32: bool
    offloads: bool
    """What this rank keeps goes to the host."""
    partition: int
    """Elements of a rank's share."""
    micro_batches: int
    """How many are gone through: those in the middle of a step are alike (:func:`distinct_micro_batches`)."""


class Course(NamedTuple):
    """The highest of what was seen, by place: no other moment at its place has both as much held and as many blocks before it."""

    forward: tuple[Seen, ...]
    """Before the first gradient of a micro-batch."""
    between: dict[tuple[int, int], tuple[Seen, ...]]
    """By run (-1: embedding; the number of runs: head) and by how many groups of a block's gradients DeepSpeed has received: in the
    last block of the run."""
    before: dict[tuple[int, int], tuple[Seen, ...]]
    """The same in the blocks before it, where there are any."""
    events: dict[Event, tuple[Seen, ...]]
    """During the backward."""
    end: dict[Event, tuple[Seen, ...]]
    """After the backward."""


Group: TypeAlias = tuple[Placed, ...]


def distinct_micro_batches(stage: int, *, overlaps: bool) -> int:
    """How many micro-batches of a step differ: the first, the last, and at stage 1 with overlap one in the middle.

    Only there does the last one reduce its gradients while those of the ones before are whole.
    """
    return 3 if stage == 1 and overlaps else 2


@lru_cache(maxsize=256)
def groups_of(whole: Row) -> dict[int, tuple[Group, ...]]:
    """Return the gradients of each block in the order of the backward, those together that one operator makes."""
    return {block: tuple(groups) for block, groups in groupby(made_at_once(whole), key=lambda group: group[0].block)}


def numel(each: Placed) -> int:
    """Elements of a parameter."""
    return each.end - each.start


@lru_cache(maxsize=512)
def course_of(plan: Plan) -> Course:
    """Go through the micro-batches of one optimizer step that differ; what is not reduced before its end is the same for any share.

    >>> from zeroplan.engines.deepspeed.flat import row
    >>> from zeroplan.spec.model import ModelSpec
    >>> tiny = ModelSpec(family="llama", hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
    ...                  num_key_value_heads=1, head_dim=4, vocab_size=10)
    >>> two = Plan(row(tiny), (0,), False, 2, 2, 500, False, True, True, False, False, 676, 1)
    >>> {event: max(seen.held.copy for seen in course_of(two).events[event]) for event in ("arrives", "reduced")}
    {'arrives': 0, 'reduced': 912}

    The first bucket (480 elements) is one rank's, so a view of it is reduced. The second (456) lies in both ranks' shares: its four
    slices are laid flat in a copy. The last (416) is one rank's again.
    """
    if plan.stage == 2 or plan.overlaps:
        return _gone_through(plan)
    if plan.collects:
        return _gone_through(plan._replace(partition=0)) if plan.partition else _gone_through(plan)
    return _during_the_backward(plan._replace(partition=0))._replace(end=_after_the_backward(plan))


@lru_cache(maxsize=512)
def _during_the_backward(plan: Plan) -> Course:
    """A course without its end, where nothing is reduced before that."""
    return _gone_through(plan, ends=False)


def _after_the_backward(plan: Plan) -> dict[Event, tuple[Seen, ...]]:
    notes = _Notes(plan)
    engine = _Engine(plan, notes)
    engine.begin(first=True, last=True)
    engine.gradients = plan.element * plan.whole.n_elements
    engine.setup_buckets()
    notes.enter(None)
    engine.reduce_gradients()
    return notes.course().end


def _gone_through(plan: Plan, *, ends: bool = True) -> Course:
    notes = _Notes(plan)
    engine = _Engine(plan, notes)
    of_block = groups_of(plan.whole)
    turns = _turns(plan)
    if turns[0]:
        engine.go_through_earlier()
    for turn in turns:
        engine.begin(first=turn == 0, last=turn == plan.micro_batches - 1)
        for block in range(plan.whole.n_blocks, -2, -1):
            notes.enter(block)
            notes.between(0, engine)
            for count, group in enumerate(of_block.get(block, ())):
                engine.receive(group)
                notes.between(count + 1, engine)
        notes.enter(None)
        if ends:
            engine.reduce_gradients()
    return notes.course()


def _turns(plan: Plan) -> range:
    """The micro-batches that are gone through: what the first has is there in the next one too, beside what that adds.

    At stage 1 with overlap the last one has less than those before, as it reduces what they have added up. With offload it lets go
    of gradients too large for the bucket as they leave for the host, which those before keep to the end of their backward.
    """
    last = plan.micro_batches - 1
    has_less = (plan.stage == 1 and plan.overlaps) or plan.offloads
    return range(max(0, last - 1) if has_less else last, last + 1)


@dataclass(slots=True)
class _Notes:
    """The highest that has been seen at each place so far, in the micro-batch that runs and in those before."""

    plan: Plan
    block: int | None = None
    """None: the backward is over."""
    run: int = 0
    is_last: bool = True
    """The block is the last of its run."""
    made: int = 0
    forward: list[Seen] = field(default_factory=list)
    last: dict[tuple[int, int], list[Seen]] = field(default_factory=dict)
    before: dict[tuple[int, int], list[Seen]] = field(default_factory=dict)
    events: dict[tuple[Event, int, int], list[Seen]] = field(default_factory=dict)
    end: dict[Event, list[Seen]] = field(default_factory=dict)

    def enter(self, block: int | None) -> None:
        """Go on with another block."""
        self.block, self.made = block, 0
        if block is not None:
            firsts = (*self.plan.firsts, self.plan.whole.n_blocks)
            self.run = bisect_right(firsts, block) - 1
            self.is_last = not 0 <= block < firsts[-1] or block == firsts[self.run + 1] - 1

    def between(self, count: int, engine: "_Engine") -> None:
        """Note what is there when so many groups of a block's gradients have been received."""
        places = self.last if self.is_last else self.before
        self._note(places.setdefault((self.run, count), []), engine)

    def event(self, event: Event, engine: "_Engine", copy: int = 0, cast: int = 0) -> None:
        """Note what is there at an event."""
        if self.block is None:
            self._note(self.end.setdefault(event, []), engine, copy, cast)
        else:
            self._note(self.events.setdefault((event, self.run, self.made), []), engine, copy, cast)

    def _note(self, seen: list[Seen], engine: "_Engine", copy: int = 0, cast: int = 0) -> None:
        """Blocks come one before the other: what is no higher than that of a later block is never the highest."""
        block = -1 if self.block is None else self.block
        held = Held(engine.buckets, engine.gradients, copy, cast, engine.own, engine.earlier)
        if not seen or seen[-1].block <= block or held.n_bytes > seen[-1].held.n_bytes:
            seen.append(Seen(block, self.made, held))

    def course(self) -> Course:
        """Return what has been noted."""
        during: dict[Event, tuple[Seen, ...]] = {}
        for (event, _, _), seen in self.events.items():
            during[event] = (*during.get(event, ()), *corners(seen))
        return Course(
            corners(self.forward),
            {place: corners(seen) for place, seen in self.last.items()},
            {place: corners(seen) for place, seen in self.before.items()},
            during,
            {event: corners(seen)[-1:] for event, seen in self.end.items()},
        )


def corners(seen: list[Seen]) -> tuple[Seen, ...]:
    """Those among which the highest is, whatever a block keeps: the corners of the hull over blocks, the latest block first.

    What the blocks before keep grows evenly with their number, and these are of one run.
    """
    found: list[tuple[int, int, Seen]] = []
    for block, n_bytes, each in sorted(map(_weighed, seen), key=lambda one: (-one[0], -one[1])):
        if found and n_bytes <= found[-1][1]:
            continue
        while len(found) > 1 and _is_below(found[-1], found[-2], (block, n_bytes)):
            found.pop()
        found.append((block, n_bytes, each))
    return tuple(each for _, _, each in found)


def _weighed(each: Seen) -> tuple[int, int, Seen]:
    assert isinstance(each.block, int)  # noqa: S101  a course has no columns
    n_bytes = each.held.n_bytes
    assert isinstance(n_bytes, int)  # noqa: S101  likewise
    return each.block, n_bytes, each


def _is_below(point: tuple[int, int, Seen], after: tuple[int, int, Seen], before: tuple[int, int]) -> bool:
    """Whether a point is not above the line between one of a later block and one of an earlier."""
    return (point[1] - after[1]) * (after[0] - before[0]) <= (before[1] - after[1]) * (after[0] - point[0])


@dataclass(slots=True)
class _Engine:
    """``DeepSpeedZeroOptimizer``, or a plain sum of gradients, from a gradient's hook to the end of a backward. [bytes]"""

    plan: Plan
    notes: _Notes
    buckets: int = 0
    gradients: int = 0
    own: int = 0
    earlier: int = 0
    inside: list[Placed] = field(default_factory=list)
    """The gradients that wait in the bucket, or as they are, to be reduced."""
    fill: int = 0
    reduced_before: int = 0
    """Gradients of other ranks that the next reduction clears. [bytes]"""
    adds: bool = False
    """Autograd adds a gradient to that of earlier micro-batches."""
    last: bool = False

    def begin(self, *, first: bool, last: bool) -> None:
        """Begin a micro-batch."""
        self.adds, self.last = not first and self.plan.stage != 2, last
        held = Held(self.buckets, self.gradients, 0, 0, self.own, self.earlier)
        self.notes.forward.append(Seen(self.plan.whole.n_blocks, 0, held))

    def go_through_earlier(self) -> None:
        """Be as after the micro-batches before."""
        plan = self.plan
        if plan.stage != 2:
            self.gradients = plan.element * plan.whole.n_elements
            if plan.stage and not plan.collects:
                self.setup_buckets()
        elif plan.sums_in_fp32:
            self.own = FP32 * plan.partition
        else:
            self.earlier = self._kept()

    def _kept(self) -> int:
        """What this rank keeps of a micro-batch, where it is not a sum in fp32. [bytes]"""
        if self.plan.offloads:
            return 0
        touched = touched_elements(self.plan.whole, self.plan.partition)
        assert isinstance(touched, int)  # noqa: S101  of one share
        return self.plan.element * touched

    def receive(self, group: Group) -> None:
        """Take in gradients that one operator made."""
        elements = sum(map(numel, group))
        self.notes.made += elements
        self.gradients += self.plan.element * elements
        self.notes.event("arrives", self)
        for each in group:
            if self.adds:
                self.gradients -= self.plan.element * numel(each)
            self._process_gradients(each)

    def _process_gradients(self, each: Placed) -> None:
        if self.plan.collects:
            return
        if self.plan.contiguous and not self.buckets:
            self.setup_buckets()
            self.notes.event("arrives", self)
        if self.plan.stage == 2 or (self.plan.overlaps and self.last):
            self._reduce_independent(each)

    def setup_buckets(self) -> None:
        """Ask for the buckets."""
        count = 2 if self.plan.overlaps else 1
        self.buckets = count * self.plan.element * self.plan.bucket_size if self.plan.contiguous else 0

    def _reduce_independent(self, each: Placed) -> None:
        elements = numel(each)
        if self.inside and self.fill + elements > self.plan.bucket_size:
            self._reduce_ipg_grads()
        if self.plan.contiguous and elements <= self.plan.bucket_size:
            self.gradients -= self.plan.element * elements
        elif self.plan.contiguous and self.plan.offloads:
            self.notes.event("copied", self, self.plan.element * elements)
        self.inside.append(each)
        self.fill += elements

    def _reduce_ipg_grads(self) -> None:
        """Reduce what waits; what reaches into this rank's share is kept."""
        plan = self.plan
        parts = [min(each.end, plan.partition) - each.start for each in self.inside]
        largest = max(0, *parts)
        if plan.overlaps:
            self.gradients -= self.reduced_before
            self.reduced_before = 0
        if plan.sums_in_fp32 and largest:
            self.own = FP32 * plan.partition
        cast = FP32 * largest if plan.sums_in_fp32 else 0
        self.notes.event("reduced", self, plan.element * copied_elements(plan, tuple(self.inside)), cast)
        if plan.contiguous and largest and not plan.sums_in_fp32:
            self.own = self._kept()
        self.notes.event("kept", self)
        if plan.offloads:
            self.notes.event("leaves", self, FP64 * largest if self.last else 0)
        for each in self.inside:
            self._clear(each)
        self.inside, self.fill = [], 0

    def _clear(self, each: Placed) -> None:
        """Let go of a reduced gradient, unless it is in the bucket or stays where it is to the end of the backward."""
        plan, elements = self.plan, numel(each)
        n_bytes = plan.element * elements
        ours = each.start < plan.partition
        if plan.contiguous:
            alone = elements > plan.bucket_size
            moved = (self.last if plan.offloads else not plan.sums_in_fp32) if ours else plan.stage == 2
            self.gradients -= n_bytes if alone and moved else 0
        elif plan.stage == 2 and not ours and plan.overlaps:
            self.reduced_before += n_bytes
        elif plan.stage == 2 and not ours:
            self.gradients -= n_bytes

    def reduce_gradients(self) -> None:
        """End a backward: reduce what is left, and let go of buckets and gradients."""
        plan = self.plan
        if plan.collects or (plan.stage == 1 and not self.last):
            return
        if plan.stage == 1 and not plan.overlaps:
            for each in plan.whole.placed:
                self._reduce_independent(each)
        self._reduce_ipg_grads()
        self.buckets = self.gradients = self.reduced_before = 0
        if not plan.sums_in_fp32:
            self.own, self.earlier = 0, self._kept()


def copied_elements(plan: Plan, inside: tuple[Placed, ...]) -> int:
    """Return the elements of the largest copy in which a bucket, or a gradient too large for it, is reduced. [elements]"""
    return max(copies_of(plan, inside), default=0)


def copies_of(plan: Plan, inside: tuple[Placed, ...]) -> Iterator[int]:
    """Yield the elements of every copy, one after the other. [elements]

    Several tensors are laid flat in a copy, a single one is not. Source: ``average_tensor``, ``allreduce_and_scatter``,
    ``buffered_reduce_fallback``.
    """
    if not plan.contiguous:
        yield from (sum(map(numel, inside)),) if len(inside) > 1 else ()
        return
    together, count = 0, 0
    for elements in _slices(plan, inside) if plan.scatters else ():
        together, count = together + elements, count + 1
        if together > plan.bucket_size:
            yield from (together,) if count > 1 else ()
            together, count = 0, 0
    if count > 1:
        yield together


def _slices(plan: Plan, inside: tuple[Placed, ...]) -> Iterator[int]:
    """Yield the elements of consecutive slices of one rank; what is added to fp32 sums is a slice by itself."""
    rank_before, waiting = -1, 0
    for each in inside:
        for rank in range(each.start // plan.partition, (each.end - 1) // plan.partition + 1):
            part = min(each.end, (rank + 1) * plan.partition) - max(each.start, rank * plan.partition)
            if waiting and (rank != rank_before or (plan.sums_in_fp32 and rank == 0)):
                yield waiting
                waiting = 0
            rank_before, waiting = rank, waiting + part
    yield waiting
