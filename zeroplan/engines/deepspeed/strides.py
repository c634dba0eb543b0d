"""Equal blocks of a pass under ZeRO-3: once the coordinator's state repeats from block to block, arithmetic gives the next ones.

Blocks of one kind run the same modules, whose parameters have other indices. If layers alternate, a part is a whole period. A
coordinator that is in the same state before two parts, relative to its place, does the same in every later one. This ends where it
prefetches parameters beyond the equal parts, or where the backward is so near that it keeps parameters for it.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from zeroplan.engines.collecting import Counts
from zeroplan.engines.deepspeed.coordinator import SECOND, Coordinator
from zeroplan.engines.deepspeed.order import BACKWARD, FORWARD, Step, lowest_backward
from zeroplan.engines.rows import Row
from zeroplan.transformer.params import runs_in_order

_LONGEST = 12
"""Blocks in the longest period that is looked for."""
_FEWEST = 4
"""With fewer parts the coordinator walks through all of them."""


class Parts(NamedTuple):
    """Equal parts of one direction of a pass, in the order in which they run."""

    at: tuple[int, ...]
    """The step at which each part begins, and the one after the last part."""
    edges: tuple[int, ...]
    """The parameter at which those begin that are still to come then; in the backward, those below it are still to come."""
    low: int
    high: int
    """The range of all their parameters."""
    backward: bool

    @property
    def n_steps(self) -> int:
        """Steps of a part."""
        return self.at[1] - self.at[0]

    @property
    def n_later(self) -> int:
        """By how many places the parameters of a part come after those of the part before; negative in the backward."""
        return self.edges[1] - self.edges[0]

    def is_done(self, index: int, edge: int) -> bool:
        """Whether a parameter belongs to parts that have run."""
        return (index >= edge) is self.backward

    def last(self, edge: int) -> range:
        """Return the parameters of the part that has run last."""
        return range(min(edge, edge - self.n_later), max(edge, edge - self.n_later))


class Point(NamedTuple):
    """The coordinator before a part."""

    state: tuple[object, ...] | None
    """All that decides its next requests, with indices relative to the part; None if parameters outside the parts are in flight."""
    n_bytes: int
    n_queued: int
    calls: int
    sizes: dict[int, int]
    """The parameters gathered so far, by size."""
    counted: int
    """Elements of the parameters that are gathered or in flight."""
    second: int
    """Second partitions made so far. [bytes]"""
    room: tuple[int, ...]
    """The elements that the coordinator could still gather ahead after each module since the point before."""


@lru_cache(maxsize=64)
def parts_of(whole: Row, steps: tuple[Step, ...], recomputed: int) -> tuple[Parts, ...]:
    """Return the equal parts of the forward and those of the backward; none for models with other modules between blocks."""
    model = whole.model
    if model.profile is not None or model.vision is not None or model.is_quantised or any(step.leaf for step in steps):
        return ()
    lowest = lowest_backward(whole, recomputed)
    period, first, count = _longest([
        (kind, block < recomputed, block == lowest) for block, kind in enumerate(runs_in_order(model))
    ])  # fmt: skip
    if count < _FEWEST:
        return ()
    turn = next((at for at, step in enumerate(steps) if step.direction == BACKWARD), len(steps))
    borders = [first + period * number for number in range(count + 1)]
    found = (
        _parts(whole, steps, range(turn), borders, backward=False),
        _parts(whole, steps, range(turn, len(steps)), [block - 1 for block in reversed(borders)], backward=True),
    )
    return tuple([one for one in found if one is not None])


def _parts(whole: Row, steps: tuple[Step, ...], among: range, blocks: list[int], *, backward: bool) -> Parts | None:
    """Return the parts that begin with these blocks; None if they are not equally long or do not all run."""
    starts: dict[int, int] = {}
    for at in among:
        starts.setdefault(steps[at].block, at)
    if not all(block in starts for block in blocks):
        return None
    begins = _begins(whole)
    edges = tuple([begins[block + backward] for block in blocks])
    one = Parts(tuple([starts[block] for block in blocks]), edges, min(edges), max(edges), backward)
    lengths = {after - before for before, after in zip(one.at, one.at[1:], strict=False)}
    return one if lengths == {one.n_steps} and one.n_steps > 0 else None


def _begins(whole: Row) -> list[int]:
    """Return the index of each block's first parameter, and of the first one after the blocks."""
    first: dict[int, int] = {}
    for index, each in enumerate(whole.placed):
        first.setdefault(each.block, index)
    return [first.get(block, len(whole.placed)) for block in range(whole.n_blocks + 1)]


def _longest(kinds: list[tuple[int, bool, bool]]) -> tuple[int, int, int]:
    """Return the period, the first block and the number of periods of the longest range of equal periods.

    >>> _longest([(kind, False, False) for kind in (0, 1, 2, 1, 2, 1, 2)])
    (2, 1, 3)
    """
    found = (1, 0, 0)
    for period in range(1, min(_LONGEST, len(kinds) // 2) + 1):
        first = 0
        for block in range(period, len(kinds) + 1):
            if block < len(kinds) and kinds[block] == kinds[block - period]:
                continue
            count = (block - first) // period
            if count > 1 and count * period > found[0] * found[2]:
                found = (period, first, count)
            first = block - period + 1
    return found


class Strider:
    """Takes a coordinator over equal parts of a pass in one go."""

    def __init__(self, one: Coordinator, memory: Counts, parts: Iterable[Parts]) -> None:
        self.one, self.memory, self._before = one, memory, dict[bool, Point]()
        alike = filter(self._are_alike, parts)
        self._begins = {at: (some, number) for some in alike for number, at in enumerate(some.at)}
        self._given = [] if one.decides else sorted(one.decided)
        """The releases that an earlier pass decided, in the order of their steps."""

    def _are_alike(self, parts: Parts) -> bool:
        """Whether all parts have the same persistent parameters. ``stage3_model_persistence_threshold`` may end in one of them."""
        persistent = sorted(index for index in self.one.persistent if parts.low <= index < parts.high)
        n_parts, n_later = len(parts.at) - 1, abs(parts.n_later)
        of_one = [index - parts.low for index in persistent[: len(persistent) // n_parts]]
        return persistent == [parts.low + n * n_later + place for n in range(n_parts) for place in of_one]

    def n_steps(self, at: int) -> int:
        """Return the steps of the part that begins at a step."""
        return self._begins[at][0].n_steps

    def skip(self, at: int) -> tuple[int, int]:
        """Skip equal parts that begin at a step. Return their number, and by how many bytes memory grows with each."""
        if at not in self._begins:
            return 0, 0
        parts, number = self._begins[at]
        now, before = self._point(parts, number), self._before.get(parts.backward)
        self._before[parts.backward] = now
        if before is None or now.state is None or before.state != now.state or not self.one.queue:
            return 0, 0
        reached = (self.one.queue[0][1] - at) // parts.n_steps + 2
        times = self._times(parts, number, before, now, len(parts.at) - 1 - number - reached)
        if times > 0:
            self._move(parts, number, times, before, now)
            self._before[parts.backward] = self._point(parts, number + times)
        return times, now.n_bytes - before.n_bytes

    def _point(self, parts: Parts, number: int) -> Point:
        """Return the coordinator's state before a part. Conditions are inline, not calls: this runs before every part."""
        one, at, edge = self.one, parts.at[number], parts.edges[number]
        low, high, backward = parts.low, parts.high, parts.backward
        sent, second, room = one.sent[BACKWARD if backward else FORWARD], self.memory.bytes_of(SECOND), tuple(one.room)
        one.room.clear()
        counts = self.memory.n_bytes, len(one.queue), sent.calls, dict(sent.counted), one.counted, second, room
        if [index for index in one.in_flight if (index >= edge) is backward or not low <= index < high]:
            return Point(None, *counts)
        last, stays = parts.last(edge), one.persistent if backward else frozenset[int]()
        outside = [index for index in one.available if not low <= index < high]
        inside = [
            index - edge for index in one.available
            if low <= index < high and (index in last or ((index >= edge) is not backward and index not in stays))
        ]  # fmt: skip
        in_flight = [
            ([index - edge for index in handle.parameters], {index - edge for index in handle.waiting}, handle.arrived)
            for handle in dict.fromkeys(one.in_flight.values())
        ]  # fmt: skip
        coming = {index - edge: used - at for index, used in one.fetched_for.items() if used >= at}
        following = (one.queue[0][0] - edge, one.queue[0][1] - at) if one.queue else ()
        state = set(inside), set(outside), in_flight, coming, following, self._seconds(parts, edge)
        return Point(state, *counts)

    def _seconds(self, parts: Parts, edge: int) -> tuple[set[int], object]:
        """Return the last part's parameters whose second partition is made, and whether those of coming parts are.

        If that differs among them, the second value differs from part to part. Persistent ones are never released, so they never
        make any.
        """
        second, stays = self.one.second, frozenset[int]() if self.one.recording else self.one.persistent
        if not second:
            return set(), True
        coming = [
            index not in second for index in range(parts.low, parts.high)
            if (index >= edge) is not parts.backward and index not in stays
        ]  # fmt: skip
        made = {index - edge for index in parts.last(edge) if index not in second}
        return made, coming if True in coming and False in coming else True in coming

    def _times(self, parts: Parts, number: int, before: Point, now: Point, most: int) -> int:
        """Return how many parts, up to ``most``, prefetch and release the same parameters.

        They prefetch as many if the limit of live parameters is as far away. They release those whose next use is far enough away,
        or those that an earlier pass has decided.
        """
        one, at, more, bucket = self.one, parts.at[number], now.counted - before.counted, self.one.bucket
        released = [(when, index) for when, index in one.decided if at - parts.n_steps <= when < at] if one.decides else []
        most = self._decided_alike(parts, number, most) if self._given else most

        def differs(times: int) -> bool:
            later, on = times * parts.n_steps, times * parts.n_later
            if more and [1 for room in now.room if min(max(room, 0), bucket) != min(max(room - times * more, 0), bucket)]:
                return True
            return not all(one.is_far(index + on, when + later + 1) for when, index in released)

        return bisect_right(range(1, most + 1), 0, key=differs) if most > 0 else 0  # the backward comes nearer and nearer

    def _decided_alike(self, parts: Parts, number: int, most: int) -> int:
        """Return how many parts, up to ``most``, release the same parameters by an earlier pass's decision."""

        def released(part: int) -> list[tuple[int, int]]:
            at, edge = parts.at[part], parts.edges[part]
            low, high = (bisect_left(self._given, (step, -1)) for step in (at, parts.at[part + 1]))
            return [(when - at, index - edge) for when, index in self._given[low:high]]

        last = released(number - 1)
        return next((times for times in range(most) if released(number + times) != last), most)

    def _move(self, parts: Parts, number: int, times: int, before: Point, now: Point) -> None:
        one, at, edge = self.one, parts.at[number], parts.edges[number]
        later, on = times * parts.n_steps, times * parts.n_later
        one.queue = deque(islice(one.queue, times * (before.n_queued - now.n_queued), None))
        one.available = {
            index for each in one.available for index in self._moved(parts, each, edge, times, stays=each in one.persistent)
        }
        self.memory.alive = {
            key: n_bytes for each, n_bytes in self.memory.alive.items() for key in self._moved_keys(parts, each, edge, times)
        }
        self.memory.n_bytes += times * (now.n_bytes - before.n_bytes)
        if now.second:
            self.memory.alive[SECOND] += times * (now.second - before.second)
        self._move_seconds(parts, edge, times)
        one.counted += times * (now.counted - before.counted)
        for handle in set(one.in_flight.values()):
            handle.parameters = tuple([index + on for index in handle.parameters])
            handle.waiting = {index + on for index in handle.waiting}
        one.in_flight = {index + on: handle for index, handle in one.in_flight.items()}
        coming = {index + on: used + later for index, used in one.fetched_for.items() if used >= at}
        one.fetched_for = {index: used for index, used in one.fetched_for.items() if used < at} | coming
        released = [(when, index) for when, index in one.decided if at - parts.n_steps <= when < at] if one.decides else []
        for each in range(1, times + 1):
            one.decided |= {(when + each * parts.n_steps, index + each * parts.n_later) for when, index in released}
        sent = one.sent[BACKWARD if parts.backward else FORWARD]
        sent.calls += times * (now.calls - before.calls)
        for size, count in now.sizes.items():
            sent.counted[size] += times * (count - before.sizes.get(size, 0))

    def _move_seconds(self, parts: Parts, edge: int, times: int) -> None:
        """Take the second partitions of so many parts as made, as far as the last part has made its own."""
        second = self.one.second
        for index in parts.last(edge) if second else ():
            if index not in second:
                for each in range(1, times + 1):
                    second.pop(index + each * parts.n_later, None)

    def _moved_keys(self, parts: Parts, key: Hashable, edge: int, times: int) -> Iterator[Hashable]:
        """Yield the keys of memory after so many parts in place of one: of a parameter, or of a gather."""
        if not isinstance(key, tuple):
            yield key
            return
        what, index = key
        for moved in self._moved(parts, index, edge, times, stays=what == "saved" or index in self.one.persistent):
            yield what, moved

    def _moved(self, parts: Parts, index: int, edge: int, times: int, *, stays: bool) -> Iterator[int]:
        """Yield the parameters of which the same is known after so many parts. Skipped parts leave what the last one has left."""
        end = edge + times * parts.n_later
        if not parts.low <= index < parts.high:
            yield index
        elif parts.is_done(index, edge):
            yield index
            for each in range(1, times + 1) if index in parts.last(edge) else ():
                yield index + each * parts.n_later
        elif not (parts.backward and stays):
            yield index + times * parts.n_later
        elif not parts.is_done(index, end):
            yield index
