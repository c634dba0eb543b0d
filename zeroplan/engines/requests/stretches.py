"""Stretches of a program without engine hooks, written once and replayed under other keys by all layers of a run."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from zeroplan.ledger import Kind
from zeroplan.transformer.families.requested import Instruction, Sized
from zeroplan.transformer.families.tape import Do


class Part(NamedTuple):
    """Consecutive requests and releases, then the release of an older tensor."""

    deeds: tuple[int, ...]
    """In the form of a log's deeds, counted from the stretch's first request."""
    releases: int
    """The place of the older tensor; -1 at the end of a stretch."""


class Stretch(NamedTuple):
    """A program's actions between two deeds at which an engine acts."""

    requests: tuple[tuple[int, Kind, str], ...]
    """Bytes, kind and reason of each request."""
    parts: tuple[Part, ...]
    kept: tuple[tuple[int, tuple[int, ...]], ...]
    """Places of lasting tensors, and their requests."""


class _Writing:
    """A stretch that grows."""

    def __init__(self) -> None:
        self.requests: list[tuple[int, Kind, str]] = []
        self.parts: list[Part] = []
        self.deeds: list[int] = []
        self.open: dict[int, list[int]] = {}

    def request(self, one: Instruction) -> None:
        for _ in range(one.pieces if one.size else 0):
            at = len(self.requests)
            self.requests.append((one.size, one.kind, one.reason))
            self.deeds.append(at)
            self.open.setdefault(one.place, []).append(at)

    def release(self, place: int) -> None:
        if place in self.open:
            self.deeds += [-1 - at for at in self.open.pop(place)]
        else:
            self.end_part(place)

    def end_part(self, releases: int = -1) -> None:
        self.parts.append(Part(tuple(self.deeds), releases))
        self.deeds = []

    def done(self) -> Stretch:
        self.end_part()
        kept = tuple([(place, tuple(at)) for place, at in self.open.items()])
        return Stretch(tuple(self.requests), tuple(self.parts), kept)


def stretches(sized: Sized, *, forward: bool) -> tuple[Stretch | Instruction, ...]:
    """Return a program's forward or backward as stretches, and the instructions between them."""
    ends = {sized.requested.given, sized.requested.made, sized.requested.incoming, sized.requested.outgoing}
    there = ends if forward else ends | _left(sized.forward)
    return tuple(_cut(sized.forward if forward else sized.backward, there))


def _left(instructions: Iterable[Instruction]) -> set[int]:
    """Return the places of tensors that a program has requested and not released."""
    there = set[int]()
    for one in instructions:
        if one.do is Do.REQUEST:
            there.add(one.place)
        elif one.do is Do.RELEASE:
            there.discard(one.place)
    return there


def _cut(instructions: Iterable[Instruction], there: set[int]) -> Iterator[Stretch | Instruction]:
    """Yield stretches, split where the engine acts and at requests for places that may exist already (``there``)."""
    writing = _Writing()
    for one in instructions:
        if one.do is Do.REQUEST and one.place not in there:
            writing.request(one)
        elif one.do is Do.RELEASE:
            writing.release(one.place)
        else:
            if writing.parts or writing.deeds:
                yield writing.done()
            yield one
            there.update(writing.open)
            writing = _Writing()
    if writing.parts or writing.deeds:
        yield writing.done()
