"""Extends recordings of two runs with few layers to a run with many.

A run with one more layer is the shorter run with repeated stretches of requests and releases. The long run contains each such
stretch once per missing layer. A release in a repeated stretch frees the block at the same position among equal blocks, counted
from the newest or from the oldest.
"""

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import groupby

from zeroplan.errors import MeasurementError
from zeroplan.ledger import Kind
from zeroplan.verify.watching.recording import STILL_HELD, Block, Call, HostSeen, Recording, Span, layer_of

_NUMBER = re.compile(r"\d+")


class NotAlikeError(MeasurementError):
    """Two runs with few layers differ in more than repeated stretches, so no longer run follows from them."""


def extended(shorter: Recording, longer: Recording, times: int) -> Recording:
    """The run that exceeds ``shorter`` by ``times`` the difference between ``longer`` and ``shorter``.

    Module names have ``*`` instead of the layer's number. Raises :class:`NotAlikeError` if the two runs are not alike enough.
    """
    calls = _calls(shorter, longer, times)
    few, more = _Events(without_flattening(shorter)), _Events(without_flattening(longer))
    if len(shorter.spans) != len(longer.spans):
        raise NotAlikeError(_NOT_ALIKE)
    writer = _Writer(more, _whole(few.recording, more.recording, times))
    for index, span in enumerate(more.recording.spans):
        start = writer.now
        done = 0
        signatures = more.signatures(index)
        stretches = _stretches(few.signatures(index), signatures)
        on = [more.layers_on(index, begin, end) for begin, end in stretches]
        ahead = (1 - times) * sum(min(step, 0) for step in on)  # a backward pass begins with the last layers
        for (begin, end), step in zip(stretches, on, strict=True):
            writer.repeat(index, done, begin, ahead)
            for again in range(
                times
            ):  # repeats follow the original, where enough equal blocks are alive to count from either end
                writer.repeat(index, 2 * begin - end, begin, ahead + (again + 1) * step)
            done, ahead = end, ahead + (times - 1) * step
        writer.repeat(index, done, len(signatures), ahead)
        writer.spans.append(Span(span.step, span.phase, start))
    return Recording(writer.blocks, writer.spans, calls, writer.now, _host(shorter.host, longer.host, times))


def _host(few: HostSeen | None, more: HostSeen | None, times: int) -> HostSeen | None:
    """Host memory of the long run, extrapolated linearly in the number of layers."""
    if few is None or more is None:
        return None
    columns = zip(few, more, strict=True)
    return HostSeen(*(tuple(a + times * (b - a) for a, b in zip(one, other, strict=True)) for one, other in columns))


def _calls(shorter: Recording, longer: Recording, times: int) -> list[Call]:
    """Every collective of the last step, as many times as the long run calls it."""
    less, found = (Counter(_of_the_last_step(recording)) for recording in (shorter, longer))
    if less - found:  # a collective grew with the layers and may split in a longer run
        raise NotAlikeError(_NOT_ALIKE)
    return [call for call, count in found.items() for _ in range(less[call] + times * (count - less[call]))]


def _of_the_last_step(recording: Recording) -> Iterator[Call]:
    """The collectives of the last step without their moments, which differ between otherwise equal runs."""
    last = recording.last_step
    return (call._replace(moment=0) for call in recording.calls if recording.spans[call.span].step == last)


# --- blocks that cover all layers --------------------------------------------------------------------------------------


def is_whole(block: Block) -> bool:
    """Whether a block covers all layers: DDP's first bucket, until the second forward, or all gradients together."""
    return block.span == 0 and block.kind in (Kind.REDUCE, Kind.GRADIENTS)


def without_flattening(recording: Recording) -> Recording:
    """The recording without the flattened parameter copies that DDP's constructor makes and frees.

    There are at most two such copies (250 MiB plus one tensor each), always smaller than the bucket that follows.
    """
    first = recording.spans[1].start if len(recording.spans) > 1 else recording.now
    passing = {block for block in recording.blocks if is_whole(block) and block.died <= first}
    ends = sorted(moment for block in passing for moment in (block.born, block.died))

    def moved(moment: int) -> int:
        return moment if moment == STILL_HELD else moment - bisect_right(ends, moment)

    blocks = []
    for block in recording.blocks:
        if block not in passing:
            blocks.append(block.again(born=moved(block.born), module=block.module))
            blocks[-1].died = moved(block.died)
    spans = [span._replace(start=moved(span.start)) for span in recording.spans]
    return Recording(blocks, spans, recording.calls, moved(recording.now))


def _whole(shorter: Recording, longer: Recording, times: int) -> dict[Block, int]:
    """The size in the long run of blocks that cover all layers. [bytes]"""
    few, more = ([block for block in recording.blocks if is_whole(block)] for recording in (shorter, longer))
    if len(few) != len(more):
        raise NotAlikeError(_NOT_ALIKE)
    return {other: one.n_bytes + times * (other.n_bytes - one.n_bytes) for one, other in zip(few, more, strict=True)}


# --- comparing two runs ------------------------------------------------------------------------------------------------


_Like = tuple[str, str, int, int, Kind | None]
"""The properties that make two blocks alike: operation, module, bytes, stream, kind."""


def _like(block: Block) -> _Like:
    n_bytes = 0 if is_whole(block) else block.n_bytes
    return block.operation, unnumbered(block.module), n_bytes, block.stream, block.kind


_Event = tuple[bool, _Like]
"""Whether an event is a request, and the properties of its block."""


class _Events:
    """A recording as a list of requests and releases, by span."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.at: list[tuple[bool, Block]] = [(False, _NOBODY)] * (recording.now + 1)
        for block in recording.blocks:
            self.at[block.born] = (True, block)
            if block.died != STILL_HELD:
                self.at[block.died] = (False, block)
        for index in range(len(recording.spans)):
            self._sort_releases(index)

    def _sort_releases(self, index: int) -> None:
        """Sort consecutive releases: autocast frees its casts in the order of their addresses, which varies."""
        at = self.recording.spans[index].start + 1
        for is_request, run in groupby(self.of(index), key=lambda event: event[0]):
            events = list(run)
            if not is_request:
                self.at[at : at + len(events)] = sorted(events, key=lambda event: str(_like(event[1])))
            at += len(events)

    def of(self, index: int) -> list[tuple[bool, Block]]:
        """The requests (True) and releases of a span."""
        spans = self.recording.spans
        end = spans[index + 1].start if index + 1 < len(spans) else self.recording.now
        return self.at[spans[index].start + 1 : end + 1]

    def signatures(self, index: int) -> list[_Event]:
        """The comparable properties of a span's requests and releases."""
        return [(is_request, _like(block)) for is_request, block in self.of(index)]

    def layers_on(self, index: int, begin: int, end: int) -> int:
        """The distance in layers between a stretch and the one that it repeats; negative in a backward pass."""
        events = self.of(index)
        for (is_request, one), (_, other) in zip(events[begin:end], events[2 * begin - end : begin], strict=True):
            here, there = layer_of(one), layer_of(other)
            if is_request and here is not None and there is not None:
                return here - there
        return 0


_NOBODY = Block(0, 0, "", "", 0)


def unnumbered(module: str) -> str:
    """A module's name with ``*`` instead of numbers.

    >>> unnumbered("model.layers.3.mlp")
    'model.layers.*.mlp'
    """
    return _NUMBER.sub("*", module)


def _stretches(few: list[_Event], more: list[_Event]) -> list[tuple[int, int]]:
    """The stretches of ``more`` that ``few`` lacks; each repeats the stretch before it."""
    found: list[tuple[int, int]] = []
    at = ahead = 0
    while True:
        stop = at + _alike(few[at:], more[at + ahead :])
        if stop == len(few) == len(more) - ahead:
            return found
        added = _added(few, more, stop, ahead)
        found.append((stop + ahead, stop + ahead + added))
        at, ahead = stop, ahead + added


def _alike(few: list[_Event], more: list[_Event]) -> int:
    return next((at for at, (one, other) in enumerate(zip(few, more, strict=False)) if one != other), min(len(few), len(more)))


def _added(few: list[_Event], more: list[_Event], stop: int, ahead: int) -> int:
    """The length of the added stretch, after which the two runs agree again."""
    there = stop + ahead
    for added in range(1, min(there, len(more) - there) + 1):
        repeats = more[there : there + added] == more[there - added : there]
        if repeats and few[stop : stop + _ENOUGH] == more[there + added : there + added + _ENOUGH]:
            return added
    raise NotAlikeError(_NOT_ALIKE)


_ENOUGH = 2
"""Events that must be equal after a stretch; all later events are compared as well."""
_NOT_ALIKE = "runs with few layers differ too much to derive the memory of many layers; run all layers"


# --- writing the long run ----------------------------------------------------------------------------------------------


class _Writer:
    """Writes the long run event by event, copying stretches of a shorter run."""

    def __init__(self, model: _Events, whole: dict[Block, int]) -> None:
        self.blocks: list[Block] = []
        self.spans: list[Span] = []
        self.now = 0
        self._model, self._whole = model, whole
        self._places = _places(model)
        self._alive: dict[_Like, list[Block]] = defaultdict(list)

    def repeat(self, index: int, begin: int, end: int, ahead: int) -> None:
        """Append a stretch of one span, with layer numbers shifted by ``ahead``."""
        for is_request, block in self._model.of(index)[begin:end]:
            self.now += 1
            if is_request:
                self._request(block, ahead)
            else:
                self._release(block)

    def _request(self, block: Block, ahead: int) -> None:
        mine = block.again(born=self.now, module=unnumbered(block.module))
        layer = layer_of(block)
        mine.layer = None if layer is None else layer + ahead
        mine.n_bytes = self._whole.get(block, block.n_bytes)
        self.blocks.append(mine)
        self._alive[_like(block)].append(mine)

    def _release(self, block: Block) -> None:
        alive, place = self._alive[_like(block)], self._places[block]
        if not -len(alive) <= place < len(alive):
            raise NotAlikeError(_NOT_ALIKE)
        alive.pop(place).died = self.now


def _places(events: _Events) -> dict[Block, int]:
    """Each block's position among equal blocks at its release: from the oldest (0, 1...) or the newest (-1, -2...)."""
    alive: dict[_Like, list[Block]] = defaultdict(list)
    places: dict[Block, int] = {}
    for is_request, block in events.at[1:]:
        like = alive[_like(block)]
        if is_request:
            like.append(block)
        else:
            from_oldest = like.index(block)
            from_newest = len(like) - from_oldest
            places[block] = -from_newest if from_newest <= from_oldest + 1 else from_oldest
            del like[from_oldest]
    return places
