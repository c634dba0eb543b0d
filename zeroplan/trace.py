"""A training step as a program of allocations and releases, and the moments at which memory can peak.

An engine's program puts and drops lines in the order of the engine's code. The trace keeps what is alive. Memory can only peak
right before a release, so that every release after an allocation records a moment.

A moment stores the groups of lines that are alive, key by key. The peak is the sum of the groups' totals, and a moment's lines
are joined only when code reads them.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain, repeat
from operator import attrgetter
from typing import NamedTuple, cast, overload

from zeroplan.ledger import Among, Kind, Line, Moment, Phase, total_bytes
from zeroplan.numeric import Int, maximum
from zeroplan.weights import EMPTY, Highest, Pools, Weight, most, on_one_stream, summed, together, total, weigh, weigh_each

_n_bytes = attrgetter("n_bytes")


class Inside:
    """Consecutive moments with the same other lines alive, such as the points of a block's backward."""

    def __init__(self, points: Iterable[tuple[str, tuple[tuple[Line, ...], ...]]]) -> None:
        """``points``: the name of each moment, and its lines in groups."""
        self.points = tuple(points)
        self._highest: Highest | None = None
        self._totals: list[int] = []

    @property
    def totals(self) -> list[int]:
        """The total of each moment; ints, not columns. [bytes]"""
        if not self._totals:
            self._totals = _totals(map(chain.from_iterable, [parts for _, parts in self.points]))
        return self._totals

    def most(self, without: Kind | None = None) -> Int:
        """Return the highest total, without the lines of a kind. [bytes]"""
        totals = (
            self.totals if without is None else [sum_without(chain.from_iterable(parts), without) for _, parts in self.points]
        )
        return max(totals) if set(map(type, totals)) == {int} else maximum(0, *totals)

    def highest(self, pools: Pools) -> Highest:
        """Return the highest total, and the highest of each pool. An engine always has the same pools. [bytes]"""
        if self._highest is None:
            every = [line for _, parts in self.points for lines in parts for line in lines]
            if on_one_stream(every, pools):
                highest = max(self.totals, default=0)
                self._highest = Highest(highest, (highest, 0, 0))
            else:
                points = [[*chain.from_iterable(parts)] for _, parts in self.points]
                ints = all(isinstance(line[1], int) for line in every)
                self._highest = (
                    most(weigh(lines, pools) for lines in points) if ints else weigh_each(points, pools).most()
                )  # fmt: skip
        return self._highest


class Entry(NamedTuple):
    """A recorded moment, or several consecutive moments with the same lines alive."""

    name: str
    phase: Phase
    of_forward: bool
    alive: tuple[tuple[Line, ...], ...]
    """The groups of lines that were alive."""
    inside: Inside | None = None
    """With several moments: the further lines of each. Their names follow the entry's name."""

    @property
    def n_moments(self) -> int:
        """The number of moments."""
        return 1 if self.inside is None else len(self.inside.points)

    @property
    def total_bytes(self) -> Int:
        """The total of the highest of its moments. [bytes]"""
        beside: Int = sum(map(total_bytes, self.alive))
        return beside if self.inside is None else beside + self.inside.most()

    def moment(self, at: int = 0) -> Moment:
        """Return one of the moments, with its lines joined."""
        name, parts = self.name, self.alive
        if self.inside is not None:
            point, beside = self.inside.points[at]
            name, parts = f"{name}: {point}", (*parts, *beside)
        return Moment(name, self.phase, tuple([line for lines in parts for line in lines]), self.of_forward)


#: Makes an entry of its fields in their order, faster than keywords.
_entry: Callable[[Iterable[object]], Entry] = partial(tuple.__new__, Entry)


def entry_of(moment: Moment) -> Entry:
    """Return an entry for an existing moment."""
    return Entry(moment.name, moment.phase, moment.of_forward, (moment.lines,))


class Moments(Sequence[Moment]):
    """The recorded moments of a program. Each is built when code first reads it.

    Equal to a tuple of the same moments.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        """``entries``: what the trace recorded, in order."""
        self.entries = tuple(entries)
        self._made: tuple[Moment, ...] | None = None

    @property
    def made(self) -> tuple[Moment, ...]:
        """All moments."""
        if self._made is None:
            self._made = tuple([entry.moment(at) for entry in self.entries for at in range(entry.n_moments)])
        return self._made

    def __len__(self) -> int:
        return sum(entry.n_moments for entry in self.entries)

    @overload
    def __getitem__(self, at: int) -> Moment: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Moment, ...]: ...
    def __getitem__(self, at: int | slice) -> Moment | tuple[Moment, ...]:
        return self.made[at]

    def __iter__(self) -> Iterator[Moment]:
        return iter(self.made)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (tuple, Moments)) and self.made == tuple(other)

    def __hash__(self) -> int:
        return hash(self.made)

    def __repr__(self) -> str:
        return repr(self.made)

    @property
    def are_columns(self) -> bool:
        """Whether some sizes are columns."""
        every = (line for entry in self.entries for lines in entry.alive for line in lines)
        points = [point for entry in self.entries if entry.inside for point in entry.inside.points]
        inside = (line for _, parts in points for lines in parts for line in lines)
        return not all(isinstance(line.n_bytes, int) for line in (*every, *inside))

    @cached_property
    def highest_entry(self) -> Entry | None:
        """The entry with the highest moment, the first of equal ones; None if sizes are columns."""
        found = totals_of(self.entries)
        return None if found is None else self.entries[found.index(max(found))]

    def peak(self) -> Moment:
        """Return the highest moment, the first of equal ones. Sizes must be ints."""
        best = self.highest_entry
        assert best is not None  # noqa: S101  of one job
        return best.moment() if best.inside is None else best.moment(best.inside.totals.index(max(best.inside.totals)))

    def highest(self, pools: Pools) -> Highest:
        """Return the peak, and the highest total of each pool; ints or columns. [bytes]"""
        return highest_of(self.entries, pools)


def totals_of(entries: Sequence[Entry], without: Kind | None = None) -> list[int] | None:
    """Return the total of each entry's highest moment, without the lines of a kind; None if sizes are columns. [bytes]

    Entries share groups of lines. Each group is added up once.
    """
    alive = [entry.alive for entry in entries]
    keys = [tuple(map(id, groups)) for groups in alive]
    groups = dict(zip(chain.from_iterable(keys), chain.from_iterable(alive), strict=True))
    insides: list[Int] = [0 if entry.inside is None else entry.inside.most(without) for entry in entries]
    every = map(_n_bytes, chain.from_iterable(groups.values()))
    if not set(map(type, chain(every, insides))) <= {int}:
        return None
    totals = _totals(groups.values()) if without is None else [sum_without(some, without) for some in groups.values()]
    of_group = cast("dict[int, int]", dict(zip(groups, totals, strict=True)))
    return [*map(sum, map(map, repeat(of_group.__getitem__), keys), cast("list[int]", insides))]


def _totals(groups: Iterable[Iterable[Line]]) -> list[int]:
    return [*map(sum, map(map, repeat(_n_bytes), groups))]


def sum_without(lines: Iterable[Line], kind: Kind) -> Int:
    """Return the total of the lines that are not of a kind. [bytes]"""
    total: Int = 0
    for line in lines:
        if line[0] is not kind:
            total = total + line[1]
    return total


def highest_of(entries: Sequence[Entry], pools: Pools) -> Highest:
    """Return the peak of the entries, and the highest total of each pool outside the initialisation; ints or columns. [bytes]

    Pools of a first micro-batch count where it is the peak (:meth:`~zeroplan.weights.Highest.with_first`).
    """
    groups = {id(lines): lines for entry in entries for lines in entry.alive}
    if all(isinstance(line[1], int) for lines in groups.values() for line in lines):
        return _highest_of_ints(entries, groups, pools)
    place = dict(zip(groups, range(len(groups)), strict=True))
    weights = weigh_each(groups.values(), pools).summed([[*map(place.__getitem__, map(id, one.alive))] for one in entries])
    rows: dict[tuple[Phase | None, int], list[int]] = {}
    insides = {id(entry.inside): entry.inside for entry in entries}
    for at, entry in enumerate(entries):
        apart = entry.phase if entry.phase in _APART else None
        rows.setdefault((apart, id(entry.inside)), []).append(at)
    found, others = EMPTY, dict.fromkeys(_APART, EMPTY)
    for (phase, of), some in rows.items():
        most, inside = weights.at(some).most(), insides[of]
        most = most if inside is None else inside.highest(pools).and_of(most)
        if phase is not None:
            others[phase] = others[phase].or_of(most)
        else:
            found = found.or_of(most)
    return _with_others(found, others[Phase.INIT], others[Phase.FIRST])


#: The phases whose moments are not those of a step.
_APART = (Phase.INIT, Phase.FIRST)


def _with_others(found: Highest, begun: Highest, first: Highest) -> Highest:
    """Return the maxima of a step with those of the initialisation and of the first micro-batch."""
    found = found if first is EMPTY else found.with_first(first)
    return found if begun is EMPTY else Highest(maximum(found.peak_bytes, begun.peak_bytes), found.pools)


def _highest_of_ints(entries: Iterable[Entry], groups: Mapping[int, Sequence[Line]], pools: Pools) -> Highest:
    """Return the same if the lines of all groups are ints; those inside entries may be columns."""
    weights = {known: weigh(lines, pools) for known, lines in groups.items()}
    single: dict[Phase | None, list[Weight]] = {None: [], **{phase: [] for phase in _APART}}
    found = dict.fromkeys(single, EMPTY)
    for entry in entries:
        weight, apart = together([weights[id(lines)] for lines in entry.alive]), entry.phase if entry.phase in _APART else None
        if entry.inside is not None:
            found[apart] = found[apart].or_of(beside(entry.inside.highest(pools), weight))
        else:
            single[apart].append(weight)
    every, begun, first = (found[apart].or_of(most(some)) if some else found[apart] for apart, some in single.items())
    return _with_others(every, begun, first)


def beside(inside: Highest, weight: Weight) -> Highest:
    """Return the maxima with other lines alive at the same time."""
    if not isinstance(weight, dict):
        pools = [one + more for one, more in zip(inside.pools, weight, strict=True)]
        return Highest(inside.peak_bytes + total(weight), tuple(pools))
    pools = [
        summed([more, *(n_bytes for (at, _), n_bytes in weight.items() if at == pool)])
        for pool, more in enumerate(inside.pools)
    ]
    return Highest(summed([inside.peak_bytes, *weight.values()]), tuple(pools))


class Trace:
    """Records what is alive while a program runs, and its moments.

    >>> from zeroplan.ledger import Kind
    >>> trace, one, two = Trace(), Line(Kind.PARAMETERS, 4, "weights"), Line(Kind.ACTIVATIONS, 2, "an input")
    >>> trace.at("forward", Phase.FORWARD)
    >>> trace.put("weights", one)
    >>> trace.put("input", two)
    >>> trace.drop("input")
    >>> [(moment.name, moment.total_bytes) for moment in Moments(trace.finished())]
    [('forward', 6)]
    """

    def __init__(self) -> None:
        self._alive: dict[Hashable, tuple[Line, ...]] = {}
        self._together: tuple[tuple[Line, ...], ...] | None = ()
        self._entries: list[Entry] = []
        self._name, self._phase, self._of_forward = "", Phase.FORWARD, False
        self._risen = False
        self.recording = True
        """Whether it records moments. A program turns this off for layers that cannot hold the maximum."""
        self.stream, self.point = 0, 0
        """A log's stream and its number of deeds, which moments do not need."""

    def at(self, name: str, phase: Phase, *, of_forward: bool = False) -> None:
        """Name the moments that follow. A moment never spans two phases."""
        if self._risen and (phase is not self._phase or of_forward is not self._of_forward):
            self._close()
        self._name, self._phase, self._of_forward = name, phase, of_forward

    def put(self, key: Hashable, *lines: Line) -> None:
        """Allocate lines under a key. They replace, and may contain, what the key held."""
        if lines:
            self._alive[key] = lines
            self._together, self._risen = None, True
        elif key in self._alive:
            self.hold(key)

    def hold(self, key: Hashable, *lines: Line) -> None:
        """Hold lines that are already alive, under another key or as part of something: it allocates nothing."""
        if lines:
            self._alive[key] = lines
            self._together = None
        elif key in self._alive:
            del self._alive[key]
            self._together = None

    def drop(self, *keys: Hashable) -> None:
        """Free what these keys hold, if anything."""
        for key in keys:
            if key in self._alive:
                if self._risen:
                    self._close()
                del self._alive[key]
                self._together = None

    def shrink(self, key: Hashable, *lines: Line) -> None:
        """Free part of what a key holds; ``lines`` stay."""
        if self._risen and key in self._alive:
            self._close()
        if lines:
            self._alive[key] = lines
            self._together = None
        elif key in self._alive:
            self.hold(key)

    def pass_by(self, *lines: Line) -> None:
        """Allocate lines and free them at once."""
        if lines:
            self._close(lines)

    def put_each(self, key: Hashable, line: Line, sizes: Sequence[int]) -> None:  # noqa: ARG002  a log writes each of them
        """Allocate a line, which is the sum of tensors of these sizes."""
        self.put(key, line)

    def one_after_another(self, line: Line, sizes: Sequence[int], operation: str = "", ranks: Int = 1) -> None:  # noqa: ARG002  likewise
        """Allocate and free tensors of these sizes, one after the other, for a collective or none; the line is the largest."""
        self.pass_by(line)

    def call(self, operation: str, n_bytes: Int, ranks: Int, among: Among = Among.SHARDS) -> None:
        """Ignore a collective: it takes no memory of its own."""

    def mark(self, key: Hashable) -> None:
        """Ignore that another stream uses memory: a moment counts memory until the host frees it."""

    def wait_for(self, point: int) -> None:
        """Ignore that the program waits for the GPU."""

    def settle(self, *keys: Hashable) -> None:
        """Leave the lines of these keys to a line that sums layers. The keys stay, without lines, until they are dropped."""
        for key in keys:
            if key in self._alive:
                if self._risen:
                    self._close()
                self._alive[key] = ()
                self._together = None

    def become(self, key: Hashable, new: Hashable, line: Line) -> None:
        """Free the lines of a key except this one, which moves to another key."""
        self.drop(key)
        self.hold(new, line)

    def look(self) -> None:
        """Record a moment, whatever was allocated before."""
        self._risen = True
        self._close()

    def pass_through(self, inside: Inside, name: str, phase: Phase) -> None:
        """Allocate and free the lines of each of several moments, one after the other."""
        self.at(name, phase)
        if inside.points:
            self._close(inside=inside)

    def rename(self, key: Hashable, new: Hashable) -> None:
        """Hold a key's lines under another key."""
        if key in self._alive:
            self._alive[new] = self._alive.pop(key)
            self._together = None

    def has(self, key: Hashable) -> bool:
        """Whether a key holds anything."""
        return key in self._alive

    @property
    def written(self) -> int:
        """The number of entries recorded so far."""
        return len(self._entries)

    def finished(self) -> tuple[Entry, ...]:
        """Return all entries, including the last moment."""
        if self._risen:
            self._close()
        return tuple(self._entries)

    def _close(self, *beside: tuple[Line, ...], inside: Inside | None = None) -> None:
        """Record a moment after an allocation."""
        self._risen = False
        if not self.recording:
            return
        if self._together is None:
            self._together = tuple(filter(None, self._alive.values()))
        alive = (*self._together, *beside) if beside else self._together
        self._entries.append(_entry((self._name, self._phase, self._of_forward, alive, inside)))
