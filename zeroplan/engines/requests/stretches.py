"""Stretches of a program that no engine has a part in, written out at once: layers of a run repeat them under other keys."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from zeroplan.ledger import Kind
from zeroplan.transformer.families.requested import Instruction, Sized
from zeroplan.transformer.families.tape import Do


class Part(NamedTuple):
    """Requests and releases one after the other, then the release of something that was there before."""

    deeds: tuple[int, ...]
    """As a log has them, counted from the stretch's first request on."""
    releases: int
    """The place of what was there before; -1 at the end of a stretch."""


class Stretch(NamedTuple):
    """What a program does between two deeds in which an engine has a part."""

    requests: tuple[tuple[int, Kind, str], ...]
    """Of each the bytes, what it is for, and the reason."""
    parts: tuple[Part, ...]
    kept: tuple[tuple[int, tuple[int, ...]], ...]
    """Places of what stays, and its requests."""


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
    """A program's forward or backward in stretches, and what is between them."""
    ends = {sized.requested.given, sized.requested.made, sized.requested.incoming, sized.requested.outgoing}
    there = ends if forward else ends | _left(sized.forward)
    return tuple(_cut(sized.forward if forward else sized.backward, there))


def _left(instructions: Iterable[Instruction]) -> set[int]:
    """Places of what a program has requested and not released."""
    there = set[int]()
    for one in instructions:
        if one.do is Do.REQUEST:
            there.add(one.place)
        elif one.do is Do.RELEASE:
            there.discard(one.place)
    return there


def _cut(instructions: Iterable[Instruction], there: set[int]) -> Iterator[Stretch | Instruction]:
    """Cut where something is the engine's, and at a request for what may be ``there`` before."""
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
