"""Layers are alike: what two runs with few layers say about one with many.

A run of one more layer is the same run with stretches of requests and releases in it that repeat what stands before them. The
long run is written down as it would be: every stretch as many times as layers are missing. What is released in a repeated
stretch is the block that stands where the longer run's stood among its like, counted from the newest or from the oldest.
"""

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import groupby

from zeroplan.errors import MeasurementError
from zeroplan.ledger import Kind, Phase
from zeroplan.verify.watching.recording import STILL_HELD, Block, Call, HostSeen, Recording, Span, layer_of

_NUMBER = re.compile(r"\d+")


class NotAlikeError(MeasurementError):
    """Runs with few layers do not say what one with many takes."""


def extended(shorter: Recording, longer: Recording, times: int) -> Recording:
    """Write down the run that is longer than ``shorter`` by ``times`` what ``longer`` is longer by.

    Modules are named with ``*`` for the number of their layer. Raises :class:`NotAlikeError` where the two runs are not alike
    enough to say.
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
        ahead = (1 - times) * sum(min(step, 0) for step in on)  # a backward begins with the last layers
        for (begin, end), step in zip(stretches, on, strict=True):
            writer.repeat(index, done, begin, ahead)
            for again in range(times):  # after the stretch before it, where more of its like stand to tell oldest from newest
                writer.repeat(index, 2 * begin - end, begin, ahead + (again + 1) * step)
            done, ahead = end, ahead + (times - 1) * step
        writer.repeat(index, done, len(signatures), ahead)
        writer.spans.append(Span(span.step, span.phase, start))
    return Recording(writer.blocks, writer.spans, calls, writer.now, _host(shorter.host, longer.host, times))


def _host(few: HostSeen | None, more: HostSeen | None, times: int) -> HostSeen | None:
    """Host memory beside the GPU: each figure as much more as it grows to, layers being alike."""
    if few is None or more is None:
        return None
    columns = zip(few, more, strict=True)
    return HostSeen(*(tuple(a + times * (b - a) for a, b in zip(one, other, strict=True)) for one, other in columns))


def _calls(shorter: Recording, longer: Recording, times: int) -> list[Call]:
    """Every collective of the last step as often as it grows to."""
    less, found = (Counter(_of_the_last_step(recording)) for recording in (shorter, longer))
    if less - found:  # a collective of the shorter run that is larger in the longer one, and may be two in a still longer one
        raise NotAlikeError(_NOT_ALIKE)
    return [call for call, count in found.items() for _ in range(less[call] + times * (count - less[call]))]


def _of_the_last_step(recording: Recording) -> Iterator[Call]:
    """The collectives of the last step. Their moments are left out: they differ between runs that are otherwise alike."""
    last = max(span.step for span in recording.spans if span.phase is Phase.STEP)
    return (call._replace(moment=0) for call in recording.calls if recording.spans[call.span].step == last)


# --- what is of all layers at once -------------------------------------------------------------------------------------


def is_whole(block: Block) -> bool:
    """Whether it is DDP's first bucket, which is one for all gradients, or is all gradients, until the second forward."""
    return block.span == 0 and block.kind in (Kind.REDUCE, Kind.GRADIENTS)


def without_flattening(recording: Recording) -> Recording:
    """Leave out what DDP's constructor takes and gives back: copies of parameters in pieces that end anywhere in a layer.

    There are at most two pieces, of 250 MiB and a tensor at the most, and never as many bytes as the bucket that comes after.
    """
    first = recording.spans[1].start if len(recording.spans) > 1 else recording.now
    passing = {block for block in recording.blocks if is_whole(block) and block.died <= first}
    gone = sorted(moment for block in passing for moment in (block.born, block.died))

    def moved(moment: int) -> int:
        return moment if moment == STILL_HELD else moment - bisect_right(gone, moment)

    blocks = []
    for block in recording.blocks:
        if block not in passing:
            blocks.append(block.again(born=moved(block.born), module=block.module))
            blocks[-1].died = moved(block.died)
    spans = [span._replace(start=moved(span.start)) for span in recording.spans]
    return Recording(blocks, spans, recording.calls, moved(recording.now))


def _whole(shorter: Recording, longer: Recording, times: int) -> dict[Block, int]:
    """Bytes in the long run of what is of all layers at once."""
    few, more = ([block for block in recording.blocks if is_whole(block)] for recording in (shorter, longer))
    if len(few) != len(more):
        raise NotAlikeError(_NOT_ALIKE)
    return {other: one.n_bytes + times * (other.n_bytes - one.n_bytes) for one, other in zip(few, more, strict=True)}


# --- what is alike -----------------------------------------------------------------------------------------------------


_Like = tuple[str, str, int, int, Kind | None]
"""What blocks have in common that stand for each other: operation, module, bytes, stream, kind."""


def _like(block: Block) -> _Like:
    n_bytes = 0 if is_whole(block) else block.n_bytes
    return block.operation, unnumbered(block.module), n_bytes, block.stream, block.kind


_Event = tuple[bool, _Like]
"""A request or a release, and of what."""


class _Events:
    """A recording as a list of requests and releases, span by span."""

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
        """Give releases in a row one order: autocast gives back its casts in that of their addresses."""
        at = self.recording.spans[index].start + 1
        for asked, run in groupby(self.of(index), key=lambda event: event[0]):
            events = list(run)
            if not asked:
                self.at[at : at + len(events)] = sorted(events, key=lambda event: str(_like(event[1])))
            at += len(events)

    def of(self, index: int) -> list[tuple[bool, Block]]:
        """Return the requests (True) and releases of a span."""
        spans = self.recording.spans
        end = spans[index + 1].start if index + 1 < len(spans) else self.recording.now
        return self.at[spans[index].start + 1 : end + 1]

    def signatures(self, index: int) -> list[_Event]:
        """Return what is compared of a span's requests and releases."""
        return [(asked, _like(block)) for asked, block in self.of(index)]

    def layers_on(self, index: int, begin: int, end: int) -> int:
        """How many layers further a stretch of a span is than the one before it that it repeats: negative in a backward."""
        events = self.of(index)
        for (asked, one), (_, other) in zip(events[begin:end], events[2 * begin - end : begin], strict=True):
            here, there = layer_of(one), layer_of(other)
            if asked and here is not None and there is not None:
                return here - there
        return 0


_NOBODY = Block(0, 0, "", "", 0)


def unnumbered(module: str) -> str:
    """Return a module's name without the number of its layer.

    >>> unnumbered("model.layers.3.mlp")
    'model.layers.*.mlp'
    """
    return _NUMBER.sub("*", module)


def _stretches(few: list[_Event], more: list[_Event]) -> list[tuple[int, int]]:
    """Find where ``more`` has what ``few`` has not: stretches that repeat the one before (a layer, a layer's tensors)."""
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
    """Count how many first events are the same."""
    return next((at for at, (one, other) in enumerate(zip(few, more, strict=False)) if one != other), min(len(few), len(more)))


def _added(few: list[_Event], more: list[_Event], stop: int, ahead: int) -> int:
    """Return the length of the stretch after which the two runs are alike again."""
    there = stop + ahead
    for added in range(1, min(there, len(more) - there) + 1):
        repeats = more[there : there + added] == more[there - added : there]
        if repeats and few[stop : stop + _ENOUGH] == more[there + added : there + added + _ENOUGH]:
            return added
    raise NotAlikeError(_NOT_ALIKE)


_ENOUGH = 2
"""Events that must be alike after a stretch; all later ones are compared too, or the search fails."""
_NOT_ALIKE = "runs with few layers are not alike enough to say what many layers take; run all layers"


# --- the long run ------------------------------------------------------------------------------------------------------


class _Writer:
    """Writes the long run, event by event, after a model that it repeats."""

    def __init__(self, model: _Events, whole: dict[Block, int]) -> None:
        self.blocks: list[Block] = []
        self.spans: list[Span] = []
        self.now = 0
        self._model, self._whole = model, whole
        self._places = _places(model)
        self._alive: dict[_Like, list[Block]] = defaultdict(list)

    def repeat(self, index: int, begin: int, end: int, ahead: int) -> None:
        """Write a stretch of a span of the model once, its layers that many further on."""
        for asked, block in self._model.of(index)[begin:end]:
            self.now += 1
            if asked:
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
    """Where each block stands among its like when it is released: from the oldest (0, 1...) or the newest (-1, -2...)."""
    alive: dict[_Like, list[Block]] = defaultdict(list)
    places: dict[Block, int] = {}
    for asked, block in events.at[1:]:
        like = alive[_like(block)]
        if asked:
            like.append(block)
        else:
            from_oldest = like.index(block)
            from_newest = len(like) - from_oldest
            places[block] = -from_newest if from_newest <= from_oldest + 1 else from_oldest
            del like[from_oldest]
    return places
