"""What do stages 0 to 2 of DeepSpeed do with gradients, from a gradient's hook to the end of a backward, and what does that take?

The optimizer wrappers of DeepSpeed as a program: it receives gradients in the order of the backward, fills and reduces buckets, and
requests memory of whoever writes down what is alive. Methods have the names of DeepSpeed's own. The same program runs for
a course, which notes the most at each place (:func:`course_of`), and for a step that is written out request by request
(:mod:`zeroplan.engines.requests.deepspeed`). Activations are not known here, so one course serves every batch.
Source: DeepSpeed 0.19.8, ``runtime/zero/stage_1_and_2.py``.
"""

from bisect import bisect_right
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, Union

from zeroplan.engines.deepspeed.buckets import made_at_once
from zeroplan.engines.deepspeed.flat import Placed, Row, touched_elements
from zeroplan.engines.deepspeed.offload import offloads_optimizer
from zeroplan.engines.precisions import widths
from zeroplan.ledger import Kind
from zeroplan.numeric import Int
from zeroplan.spec.recipe import RecipeSpec

if TYPE_CHECKING:
    from zeroplan.engines.requests.log import Log

FP32, FP64 = 4, 8
_REDUCES = 1
"""The number of the stream on which buckets are reduced where ``overlap_comm`` is on."""

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


Place: TypeAlias = tuple[str | int, ...]
"""Where something is seen:

- ``("forward",)``: before the first gradient of a micro-batch
- ``("between", run, count)``: in the last block of a run (-1: embedding; the number of runs: head), when DeepSpeed has received so
  many groups of that block's gradients
- ``("before", run, count)``: the same in the blocks before that one, where there are any
- ``("during", event)``: at an event of the backward
- ``("end", event)``: at an event after the backward
"""
Course: TypeAlias = dict[Place, tuple[Seen, ...]]
"""The highest of what was seen, by place: no other moment at its place has both as much held and as many blocks before it."""
Group: TypeAlias = tuple[Placed, ...]
Memory: TypeAlias = Union["Log", "_Notes"]
"""What the program requests memory of."""


def sums_in_fp32(recipe: RecipeSpec) -> bool:
    """Whether 16-bit gradients are added up in fp32 (``grad_accum_dtype``)."""
    return recipe.deepspeed.grad_accum_dtype == "fp32" and recipe.precision != "fp32"


def collects(recipe: RecipeSpec) -> bool:
    """Whether gradients stay whole until the end of the backward: at stage 0, and under ``BF16_Optimizer``.

    Source: DeepSpeed 0.19.8, ``runtime/engine.py``, ``_do_optimizer_sanity_check``.
    """
    return recipe.zero_stage == 0 or (recipe.zero_stage == 1 and sums_in_fp32(recipe) and not offloads_optimizer(recipe))


def plan_of(recipe: RecipeSpec, whole: Row, firsts: tuple[int, ...] = (), partition: int = 1) -> Plan:
    """What a recipe has DeepSpeed do with the gradients of these parameters, for a share of so many elements."""
    options, gathers = recipe.deepspeed, collects(recipe)
    return Plan(
        whole=whole,
        firsts=firsts,
        collects=gathers,
        stage=recipe.zero_stage,
        element=widths(recipe.precision).compute,
        bucket_size=options.reduce_bucket_size,
        overlaps=bool(options.overlap_comm) and not gathers,
        contiguous=options.contiguous_gradients,
        scatters=options.reduce_scatter,
        sums_in_fp32=sums_in_fp32(recipe),
        offloads=offloads_optimizer(recipe),
        partition=partition,
        micro_batches=1,
    )


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
    >>> {event: max(seen.held.copy for seen in course_of(two)["during", event]) for event in ("arrives", "reduced")}
    {'arrives': 0, 'reduced': 912}

    The first bucket (480 elements) is one rank's, so a view of it is reduced. The second (456) lies in both ranks' shares: its four
    slices are laid flat in a copy. The last (416) is one rank's again.
    """
    if plan.stage == 2 or plan.overlaps:
        return _gone_through(plan)
    if plan.collects:
        return _gone_through(plan._replace(partition=0)) if plan.partition else _gone_through(plan)
    return _during_the_backward(plan._replace(partition=0)) | _after_the_backward(plan)


@lru_cache(maxsize=512)
def _during_the_backward(plan: Plan) -> Course:
    """A course without its end, where nothing is reduced before that."""
    return _gone_through(plan, ends=False)


def _after_the_backward(plan: Plan) -> Course:
    notes = _Notes(plan)
    engine = Partitioned(plan, notes)
    engine.be_after_earlier()
    notes.enter(None)
    engine.end()
    return notes.course()


def _gone_through(plan: Plan, *, ends: bool = True) -> Course:
    notes = _Notes(plan)
    engine = (Collecting if plan.collects else Partitioned)(plan, notes)
    of_block = groups_of(plan.whole)
    turns = _turns(plan)
    if turns[0]:
        engine.be_after_earlier()
    for turn in turns:
        engine.last = turn == plan.micro_batches - 1
        notes.begin_micro_batch()
        for block in range(plan.whole.n_blocks, -2, -1):
            notes.enter(block)
            notes.between(0)
            for count, group in enumerate(of_block.get(block, ())):
                _receive(group, engine, notes)
                notes.between(count + 1)
        notes.enter(None)
        if ends:
            engine.end()
    return notes.course()


def _receive(group: Group, engine: "Collecting", notes: "_Notes") -> None:
    """Gradients come that one operator made."""
    notes.made += sum(map(numel, group))
    keys = [engine.request_gradient(each) for each in group]
    notes.note("arrives")
    for each, key in zip(group, keys, strict=True):
        engine.arrived(each, key)


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
    """What is alive, and the highest that has been seen at each place so far, in the micro-batch that runs and in those before."""

    plan: Plan
    stream: int = 0
    alive: dict[Hashable, int] = field(default_factory=dict)
    """By key, which is a number for a gradient. [bytes]"""
    gradients: int = 0
    """What all gradients take. [bytes]"""
    n_bytes: int = 0
    """What everything takes. [bytes]"""
    block: int | None = None
    """None: the backward is over."""
    run: int = 0
    is_last: bool = True
    """The block is the last of its run."""
    made: int = 0
    seen: dict[Place, list[Seen]] = field(default_factory=dict)
    """As in a course, but that events of the backward have a place for each run and for what is made in a block."""

    def request(self, key: Hashable, n_bytes: int, kind: Kind, reason: str) -> None:  # noqa: ARG002  as a log's
        """Request memory, if any; twice under one key is more of it."""
        if n_bytes:
            self._hold(key, n_bytes)

    def _hold(self, key: Hashable, n_bytes: int) -> None:
        self.alive[key] = self.alive.get(key, 0) + n_bytes
        self.n_bytes += n_bytes
        if isinstance(key, int):
            self.gradients += n_bytes

    def release(self, *keys: Hashable) -> None:
        """Release what these keys hold, if anything."""
        for key in keys:
            if n_bytes := self.alive.pop(key, 0):
                self.n_bytes -= n_bytes
                if isinstance(key, int):
                    self.gradients -= n_bytes

    def rename(self, key: Hashable, new: Hashable) -> None:
        """Hold what a key holds under another one, beside what that holds."""
        n_bytes = self.alive[key]
        self.release(key)
        self._hold(new, n_bytes)

    def has(self, key: Hashable) -> bool:
        """Whether a key holds anything."""
        return key in self.alive

    def call(self, operation: str, n_bytes: int, ranks: int) -> None:
        """A collective begins, which takes no memory of its own."""

    def begin_micro_batch(self) -> None:
        """Note what is there during a forward."""
        self.block, self.made = self.plan.whole.n_blocks, 0
        self._note(("forward",))

    def enter(self, block: int | None) -> None:
        """Go on with another block."""
        self.block, self.made = block, 0
        if block is not None:
            firsts = (*self.plan.firsts, self.plan.whole.n_blocks)
            self.run = bisect_right(firsts, block) - 1
            self.is_last = not 0 <= block < firsts[-1] or block == firsts[self.run + 1] - 1

    def between(self, count: int) -> None:
        """Note what is there when so many groups of a block's gradients have been received."""
        self._note(("between" if self.is_last else "before", self.run, count))

    def note(self, event: Event, copy: int = 0, cast: int = 0) -> None:
        """Note what is there at an event, beside a copy and a cast that are yet to be requested."""
        self._note(("end", event) if self.block is None else ("during", event, self.run, self.made), copy, cast)

    def _note(self, place: Place, copy: int = 0, cast: int = 0) -> None:
        """Blocks come one before the other: what is no higher than that of a later block is never the highest."""
        seen, block = self.seen.setdefault(place, []), -1 if self.block is None else self.block
        if not seen or seen[-1].block <= block or self.n_bytes + copy + cast > seen[-1].held.n_bytes:
            seen.append(Seen(block, self.made, self._held(copy, cast)))

    def _held(self, copy: int = 0, cast: int = 0) -> Held:
        buckets, own, sums, earlier = map(self.alive.get, ("buckets", "own", "sums", "averaged"), (0, 0, 0, 0))
        return Held(buckets, self.gradients, copy, cast, own + sums, earlier)

    def course(self) -> Course:
        """Return what has been noted."""
        found: Course = {}
        for place, seen in self.seen.items():
            when = place[0]
            whole, few = place[:2] if when == "during" else place, corners(seen)
            found[whole] = (*found.get(whole, ()), *(few[-1:] if when == "end" else few))
        return found


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


class Collecting:
    """Gradients stay where autograd makes them until the end of the backward: there is no ZeRO optimizer."""

    def __init__(self, plan: Plan, memory: Memory, ranks: int = 1) -> None:
        """Begin with no gradient."""
        self.plan, self.memory, self.ranks = plan, memory, ranks
        self.last = True
        """The micro-batch is the step's last."""
        self.made: dict[int, Hashable] = {}
        """The key of the gradient that a parameter has, by where the parameter starts."""

    def be_after_earlier(self) -> None:
        """Be as after the micro-batches before."""
        for each in self.plan.whole.placed:
            self.made[each.start] = self.request_gradient(each)

    def request_gradient(self, each: Placed) -> int:
        """Autograd makes a gradient. Return its key, which no other gradient has."""
        key = -1 - each.start if each.start in self.made else each.start
        self.memory.request(key, self.plan.element * numel(each), Kind.UNSHARDED_GRADIENTS, "gradient of a weight")
        return key

    def arrived(self, each: Placed, key: Hashable) -> None:
        """A gradient comes to its parameter, or is added to what that has."""
        if each.start in self.made:
            self.memory.release(key)
        else:
            self.made[each.start] = key
        self.process_gradients(each)

    def process_gradients(self, each: Placed) -> None:
        """What DeepSpeed's hook does with a gradient that has come."""

    def end(self) -> None:
        """The backward is over."""

    def release_gradients(self) -> None:
        """All gradients go."""
        self.memory.release(*self.made.values())
        self.made.clear()


class Partitioned(Collecting):
    """``DeepSpeedZeroOptimizer``, stages 1 and 2."""

    def __init__(self, plan: Plan, memory: Memory, ranks: int = 1) -> None:
        """Begin with empty buckets."""
        super().__init__(plan, memory, ranks)
        self.inside: list[Placed] = []
        """The gradients that wait in the bucket, or as they are, to be reduced."""
        self.fill = 0
        self.before: list[Placed] = []
        """Gradients of other ranks that the next reduction clears."""

    def be_after_earlier(self) -> None:
        """At stage 1 gradients are whole until the last micro-batch; at stage 2 this rank's share of them is kept."""
        if self.plan.stage == 1:
            super().be_after_earlier()
            self.setup_buckets()
        elif self.plan.sums_in_fp32:
            self._request_sums()
        else:
            self._keep("averaged")

    def process_gradients(self, each: Placed) -> None:
        """The first gradient finds no bucket."""
        if self.plan.contiguous and not self.memory.has("buckets"):
            self.setup_buckets()
            self.memory.note("arrives")
        if self.plan.stage == 2 or (self.plan.overlaps and self.last):
            self.reduce_independent(each)

    def setup_buckets(self) -> None:
        """Ask for one bucket, or for two where reductions overlap."""
        for _ in range((2 if self.plan.overlaps else 1) if self.plan.contiguous else 0):
            self.memory.request("buckets", self.plan.element * self.plan.bucket_size, Kind.REDUCE, "reduce bucket")

    def reduce_independent(self, each: Placed) -> None:
        """``reduce_independent_p_g_buckets_and_remove_grads``."""
        plan, elements = self.plan, numel(each)
        if self.inside and self.fill + elements > plan.bucket_size:
            self.reduce_ipg_grads()
        if plan.contiguous and elements <= plan.bucket_size:
            self.memory.release(self.made.pop(each.start))
        elif plan.contiguous and plan.offloads:
            n_bytes = plan.element * elements
            self.memory.note("copied", n_bytes)
            self.memory.request("clone", n_bytes, Kind.TEMPORARY, "copy of a gradient too large for the bucket")
            self.memory.release("clone")
        self.inside.append(each)
        self.fill += elements

    def reduce_ipg_grads(self) -> None:
        """Reduce what waits; what reaches into this rank's share is kept."""
        plan, memory = self.plan, self.memory
        largest = max([0, *(min(each.end, plan.partition) - each.start for each in self.inside)])
        if self.before:
            self._clear(self.before)
            self.before = []
        if plan.sums_in_fp32 and largest and not memory.has("sums"):
            self._request_sums()
        memory.stream = _REDUCES if plan.overlaps else 0
        self._all_reduce(FP32 * largest if plan.sums_in_fp32 else 0)
        if plan.contiguous and largest and not plan.sums_in_fp32 and not memory.has("own"):
            self._keep("own")
        self.memory.note("kept")
        memory.stream = 0
        if plan.offloads:
            self._leave(largest)
        for each in self.inside:
            self._let_go(each)
        self.inside, self.fill = [], 0

    def _all_reduce(self, cast_bytes: int) -> None:
        """``allreduce_bucket``, in copies where the bucket is not reduced itself; what is reduced is cast to be added to sums."""
        plan, memory, copies = self.plan, self.memory, list(copies_of(self.plan, tuple(self.inside)))
        memory.note("reduced", plan.element * max(copies, default=0), cast_bytes)
        for n_elements in copies:
            memory.release("copy")
            memory.request("copy", plan.element * n_elements, Kind.REDUCE, "copy of the bucket")
        memory.call("all_reduce", plan.element * self.fill, self.ranks)
        memory.request("cast", cast_bytes, Kind.TEMPORARY, "reduced gradient cast to fp32")
        memory.release("copy", "cast")

    def _request_sums(self) -> None:
        self.memory.request("sums", FP32 * self.plan.partition, Kind.GRADIENTS, "fp32 gradients of this rank's share")

    def _keep(self, key: str) -> None:
        """``copy_grads_in_partition``: what reaches into this rank's share is kept; with offload in host memory."""
        if not self.plan.offloads:
            touched = touched_elements(self.plan.whole, self.plan.partition)
            assert isinstance(touched, int)  # noqa: S101  of one share
            reason = "gradients that reach into this rank's share"
            self.memory.request(key, self.plan.element * touched, Kind.GRADIENTS, reason)

    def _leave(self, largest: int) -> None:
        """``set_norm_for_param_grad_in_gpu``: in the last micro-batch the norm of what goes to host memory is taken in fp64."""
        self.memory.note("leaves", FP64 * largest if self.last else 0)
        for each in self.inside if self.last and largest else ():
            part = min(each.end, self.plan.partition) - each.start
            self.memory.request("norm", max(0, FP64 * part), Kind.TEMPORARY, "a gradient of the share, in fp64")
            self.memory.release("norm")

    def _let_go(self, each: Placed) -> None:
        """A reduced gradient goes, unless it is in the bucket or stays where it is to the end of the backward."""
        plan, ours = self.plan, each.start < self.plan.partition
        if plan.contiguous:
            moved = self.last if plan.offloads else not plan.sums_in_fp32
            if moved if ours else plan.stage == 2:
                self._clear([each])
        elif plan.stage == 2 and not ours and plan.overlaps:
            self.before.append(each)
        elif plan.stage == 2 and not ours:
            self._clear([each])

    def _clear(self, placed: list[Placed]) -> None:
        for each in placed:
            if each.start in self.made:
                self.memory.release(self.made.pop(each.start))

    def end(self) -> None:
        """``independent_gradient_partition_epilogue``: reduce what is left, and let go of buckets and gradients."""
        plan, memory = self.plan, self.memory
        if plan.stage == 1 and not self.last:
            return
        if plan.stage == 1 and not plan.overlaps:
            for each in plan.whole.placed:
                self.reduce_independent(each)
        self.reduce_ipg_grads()
        if not plan.sums_in_fp32 and not plan.offloads and not memory.has("averaged"):
            if memory.has("own"):
                memory.rename("own", "averaged")
            else:
                self._average()
        memory.release("own")
        self.release_gradients()
        self.before = []
        memory.release("buckets")

    def _average(self) -> None:
        """``get_flat_partition``: without a bucket to copy from, what reaches into this rank's share stays where it was made."""
        for each in self.plan.whole.placed:
            if each.start < self.plan.partition and each.start in self.made:
                self.memory.rename(self.made.pop(each.start), "averaged")


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
