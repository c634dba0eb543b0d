"""The memory of gradients and reduce buckets over a backward pass, when every rank holds whole parameters.

The engine's gradient program (:mod:`zeroplan.engines.collecting`) runs, and its peak at every place is noted. A course does not
include activations, so it serves every batch. :func:`highest` finds the peak together with activations, for one job or for a
column of jobs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, chain
from operator import ne
from typing import NamedTuple, TypeAlias, cast

from zeroplan.engines.collecting import Counts, Event, receive
from zeroplan.engines.deepspeed.gradients import Plan
from zeroplan.engines.rows import groups_of, numel
from zeroplan.ledger import Line
from zeroplan.memo import as_key, recalled
from zeroplan.numeric import Int


class Held(NamedTuple):
    """The memory of gradients at one moment. [bytes]"""

    buckets: Int = 0
    gradients: Int = 0
    """Gradients where autograd made them, and their sums over micro-batches."""
    copy: Int = 0
    """The copy that is all-reduced, a copy of a gradient, or an fp64 copy for its norm."""
    cast: Int = 0
    """A reduced gradient in fp32, before it is added to the sums."""
    own: Int = 0
    """Gradients of the current micro-batch that this rank keeps, or fp32 sums over micro-batches."""
    earlier: Int = 0
    """Gradients of earlier micro-batches that this rank has kept."""


class Seen(NamedTuple):
    """The memory of gradients, the block that runs, its kind, and its gradients made so far."""

    block: int
    """-1: the embedding; the number of blocks: the head."""
    kind: int
    """-1: the embedding; the number of kinds: the head."""
    made: int
    n_bytes: int
    """The total of ``held``. [bytes]"""
    held: Held


Place: TypeAlias = tuple[str | int, ...]
"""The place of a note:

- ``("forward",)``: before the first gradient of a micro-batch
- ``("between", kind, count)``: in the last block of a kind (-1: embedding; the number of kinds: head), when the engine has received
  so many groups of that block's gradients
- ``("before", kind, count)``: the same in the blocks of the kind before that one, where there are any
- ``("during", event)``: at an event of the backward
- ``("end", event)``: at an event after the backward
"""
Course: TypeAlias = dict[Place, tuple[Seen, ...]]
"""The noted peaks, by place: no other moment at its place has both as much held and as many blocks before it."""


@lru_cache(maxsize=512)
def course_of(plan: Plan) -> Course:
    """Return the peak at every place, over the micro-batches of one optimizer step that differ.

    If gradients are reduced only after the backward, the course up to there is the same for every shard.

    >>> from zeroplan.engines.rows import row
    >>> from zeroplan.spec.model import ModelSpec
    >>> tiny = ModelSpec(family="llama", hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
    ...                  num_key_value_heads=1, head_dim=4, vocab_size=10)
    >>> from zeroplan.engines.deepspeed.gradients import Plan
    >>> two = Plan(row(tiny), (0, 0), False, 2, 2, 500, False, True, True, False, False, 2, 1)
    >>> {event: max(seen.held.copy for seen in course_of(two)["during", event]) for event in ("arrives", "reduced")}
    {'arrives': 0, 'reduced': 912}

    The first bucket (480 elements) is one rank's, so a view of it is reduced. The second (456) lies in both ranks' shares: its four
    slices are laid flat in a copy. The last (416) is one rank's again.
    """
    if plan.reduces != "after the backward":
        return _run(plan)
    return _during_the_backward(plan.of(1, plan.micro_batches)) | _after_the_backward(plan)


@lru_cache(maxsize=512)
def _during_the_backward(plan: Plan) -> Course:
    """Return the course up to the end of a backward that reduces no gradient before its end."""
    return _run(plan, ends=False)


def _after_the_backward(plan: Plan) -> Course:
    notes = Notes(plan=plan)
    engine = plan.program(notes)
    engine.request_earlier()
    notes.enter(None)
    engine.end()
    return notes.course()


def _run(plan: Plan, *, ends: bool = True) -> Course:
    notes = Notes(plan=plan)
    engine = plan.program(notes)
    of_block = groups_of(plan.whole)
    if plan.highest[0]:
        engine.request_earlier()
    for one in plan.highest:
        engine.last = one == plan.micro_batches - 1
        notes.begin_micro_batch()
        for block in range(plan.whole.n_blocks, -2, -1):
            notes.enter(block)
            notes.between(0)
            for count, group in enumerate(of_block.get(block, ())):
                notes.made += sum(map(numel, group))
                receive(group, engine)
                notes.between(count + 1)
        notes.enter(None)
        if ends:
            engine.end()
    return notes.course()


@dataclass(slots=True, kw_only=True)
class Notes(Counts):
    """Counts live bytes, and notes the peak at each place."""

    plan: Plan
    block: int | None = None
    """None: the backward has ended."""
    kind: int = 0
    is_last: bool = True
    """Whether the block is the last of its kind."""
    made: int = 0
    seen: dict[Place, list[Seen]] = field(default_factory=dict)
    """As in a course, but an event of the backward has a place for each kind and each number of gradients made in a block."""

    def begin_micro_batch(self) -> None:
        """Note the live bytes during a forward."""
        self.block, self.made = self.plan.whole.n_blocks, 0
        self._note(("forward",))

    def enter(self, block: int | None) -> None:
        """Begin the backward of another block, or end the backward."""
        self.block, self.made = block, 0
        if block is not None:
            of_block = self.plan.kinds
            inside = 0 <= block < len(of_block)
            self.kind = of_block[block] if inside else -1 if block < 0 else max(of_block) + 1
            self.is_last = not inside or self.kind not in of_block[block + 1 :]

    def between(self, count: int) -> None:
        """Note the live bytes after this many groups of a block's gradients have arrived."""
        self._note(("between" if self.is_last else "before", self.kind, count))

    def note(self, event: Event, copy: int = 0, cast: int = 0) -> None:
        """Note the live bytes at an event, with a copy and a cast that are requested next."""
        self._note(("end", event) if self.block is None else ("during", event, self.kind, self.made), copy, cast)

    def _note(self, place: Place, copy: int = 0, cast: int = 0) -> None:
        """Note the live bytes, unless as many were alive in a later block, before which more blocks keep their activations."""
        seen, block = self.seen.setdefault(place, []), -1 if self.block is None else self.block
        n_bytes = self.n_bytes + copy + cast
        if not seen or seen[-1].block <= block or n_bytes > seen[-1].n_bytes:
            seen.append(Seen(block, self.kind, self.made, n_bytes, self._held(copy, cast)))

    def _held(self, copy: int = 0, cast: int = 0) -> Held:
        buckets, own, sums, earlier = map(self.alive.get, ("buckets", "own", "sums", "averaged"), (0, 0, 0, 0))
        return Held(buckets, self.gradients, copy, cast, own + sums, earlier)

    def course(self) -> Course:
        """Return the notes as a course."""
        found: Course = {}
        stretches = tuple(accumulate(map(ne, self.plan.kinds, (*self.plan.kinds[:1], *self.plan.kinds))))
        for place, seen in self.seen.items():
            when = place[0]
            whole, few = place[:2] if when == "during" else place, corners(seen, stretches)
            found[whole] = (*found.get(whole, ()), *(few[-1:] if when == "end" else few))
        return found


def corners(seen: list[Seen], stretches: tuple[int, ...]) -> tuple[Seen, ...]:
    """Return the moments of one kind that can be the peak, whatever a block keeps for its backward; the latest block first.

    ``stretches``: for each block the number of its stretch of equal blocks. Along a stretch the activations of earlier blocks grow
    evenly, so these are the corners of the hull over its blocks.
    """
    found = list[Seen]()
    for each in sorted(seen, key=lambda one: (-one.block, -one.n_bytes)):
        if found and each.n_bytes <= found[-1].n_bytes:
            continue
        while len(found) > 1 and stretches[found[-2].block] == stretches[each.block] and _is_below(found[-1], found[-2], each):
            found.pop()
        found.append(each)
    return tuple(found)


def _is_below(point: Seen, after: Seen, before: Seen) -> bool:
    """Whether a moment is on or below the line between a later block's and an earlier block's."""
    above = (before.n_bytes - after.n_bytes) * (after.block - point.block)
    return (point.n_bytes - after.n_bytes) * (after.block - before.block) <= above


class Courses(NamedTuple):
    """A course for each pair of a shard and a number of micro-batches."""

    each: tuple[Course, ...]
    which: Int
    """For every job of a column the index of its course."""


def courses_of(plan: Plan, ranks: Int, micro_batches: Int) -> Courses:
    """Return the courses of ``plan`` for every number of ranks and micro-batches. Both may be columns of equal length."""
    return recalled(lambda: (courses_of, plan, as_key(ranks), as_key(micro_batches)), lambda: _made(plan, ranks, micro_batches))


def _made(plan: Plan, ranks: Int, micro_batches: Int) -> Courses:
    if isinstance(ranks, int) and isinstance(micro_batches, int):
        return Courses((course_of(plan.of(ranks, micro_batches)),), 0)
    import numpy as np  # noqa: PLC0415  a single job never needs it

    pairs = np.stack(np.broadcast_arrays(ranks, micro_batches), axis=-1)
    distinct, which = np.unique(pairs.reshape(-1, 2), axis=0, return_inverse=True)
    found = tuple(course_of(plan.of(int(share), int(number))) for share, number in distinct)
    return Courses(found, cast("Int", which.reshape(pairs.shape[:-1]) if len(found) > 1 else 0))


class Highest(NamedTuple):
    """The candidates for the highest moment, and for every job of a column the index of its highest one."""

    each: tuple[Seen, ...]
    at: Int

    def of(self, size: Callable[[Seen], Int]) -> Int:
        """Return a size at the highest moment."""
        return size(self.each[self.at]) if isinstance(self.at, int) else _picked([size(one) for one in self.each], self.at)

    @property
    def held(self) -> Held:
        """The memory of gradients then."""
        if isinstance(self.at, int):
            return self.each[self.at].held
        return Held(*(_picked(sizes, self.at) for sizes in zip(*(one.held for one in self.each), strict=True)))

    def lines(self, make: Callable[[Seen], tuple[Line, ...]]) -> tuple[Line, ...]:
        """Return the lines then, which have the same kinds at every moment."""
        if isinstance(self.at, int):
            return make(self.each[self.at])
        rows = zip(*map(make, self.each), strict=True)
        return tuple(row[0]._replace(n_bytes=_picked([line.n_bytes for line in row], self.at), formula="") for row in rows)


def _picked(sizes: Sequence[Int], at: Int) -> Int:
    """Return the size with the index of each job of a column."""
    are_ints = all(isinstance(one, int) for one in sizes)
    if are_ints and all(one == sizes[0] for one in sizes):
        return sizes[0]
    import numpy as np  # noqa: PLC0415  a single job never needs it

    if are_ints:
        return cast("Int", np.array(sizes, dtype=np.int64)[at])
    which, *columns = np.broadcast_arrays(at, *sizes)
    return cast("Int", np.take_along_axis(np.stack(columns), which[None], axis=0)[0])


def highest(courses: Courses, place: Place, beside: Callable[[Seen], Int] = lambda _: 0) -> Highest:
    """Return the first moment at a place with most live bytes, including those that ``beside`` returns. [bytes]"""
    if len(courses.each) == 1:
        seen = courses.each[0][place]
        if len(seen) == 1:
            return Highest(seen, 0)
        sizes = [beside(one) + one.n_bytes for one in seen]
        if set(map(type, sizes)) == {int}:
            return Highest((seen[sizes.index(max(sizes))],), 0)
    every, which = [course[place] for course in courses.each], courses.which
    if all(seen == every[0] for seen in every):
        every, which = every[:1], 0
    if all(len(seen) == 1 for seen in every):
        return Highest(tuple([one for one, *_ in every]), which)
    alive = {one: beside(one) + one.n_bytes for one in dict.fromkeys(chain.from_iterable(every))}
    if all(isinstance(n_bytes, int) for n_bytes in alive.values()):
        return Highest(tuple([max(seen, key=alive.__getitem__) for seen in every]), which)
    import numpy as np  # noqa: PLC0415  a single job never needs it

    has = [np.array([one in seen for seen in every])[which] for one in alive]  # whether a job's course has the moment
    own = [np.where(there, size, -1) for there, size in zip(has, alive.values(), strict=True)]
    at = np.stack(np.broadcast_arrays(*own)).argmax(axis=0)
    used, seen = np.flatnonzero(np.bincount(at.ravel())), tuple(alive)
    chosen = tuple([seen[one] for one in used.tolist()])
    return Highest(chosen, 0 if len(chosen) == 1 else cast("Int", np.searchsorted(used, at)))
