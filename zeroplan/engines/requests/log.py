"""Requests and releases of memory in the order in which a program makes them."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

from zeroplan.ledger import Among, Collective, Kind, Line, Phase
from zeroplan.numeric import Int

Starts: TypeAlias = Literal["loaded", "built", "recorded"]
"""Where a model's weights are before the engine wraps it: ``loaded`` in host memory, or ``built`` on the GPU.

``recorded``: as a run on fake tensors records requests, from the first step on and with the backward on the compute stream.
"""


class Request(NamedTuple):
    """One request: its bytes, kind and reason, its layer (-1: none), its stream, and whether it is scratch inside a CUDA kernel."""

    n_bytes: int
    kind: Kind
    reason: str
    layer: int
    stream: int
    is_scratch: bool = False


Piece: TypeAlias = tuple[int, Kind, str, bool]
"""What a request does not share with its neighbours: its bytes, kind and reason, and whether it is scratch."""


class Call(NamedTuple):
    """One collective: its largest buffer in bytes, its ranks, the number of deeds before it, and the group."""

    operation: str
    n_bytes: int
    ranks: int
    start: int
    among: Among = Among.SHARDS


class Span(NamedTuple):
    """A part of the run: its step (from 0; -1: before the first), its phase, and the numbers of deeds and calls before it."""

    step: int
    phase: Phase
    start: int
    calls: int = 0


class Part(NamedTuple):
    """A part of a log: its first event, request, span and call, and the ends of each."""

    start: tuple[int, int, int, int]
    stop: tuple[int, int, int, int]
    left: tuple[tuple[Hashable, tuple[int, ...]], ...]
    """Its requests that it does not release, by key."""


class Log:
    """The requests and releases of a program so far. A second request under a key adds to it.

    >>> log = Log()
    >>> log.request("weights", 4, Kind.PARAMETERS, "weights")
    >>> log.request("input", 2, Kind.ACTIVATIONS, "an input")
    >>> log.release("weights")
    >>> log.events, log.requests[1].n_bytes
    ([0, 1, -1], 2)
    """

    def __init__(self, starts: Starts = "loaded") -> None:
        self.starts: Starts = starts
        self.requests: list[Request] = []
        self.events: list[int] = []
        """In order: the index of a request, or ``-1 - index`` of a released one."""
        self.spans = [Span(-1, Phase.INIT, 0)]
        self.calls: list[Call] = []
        self.layer, self.stream = -1, 0
        self.marked = set[int]()
        """Indices of requests whose memory another stream uses (``record_stream``). It is freed when that stream is done."""
        self.waits: dict[int, int] = {}
        """Deeds at which the program waits for the GPU, and the deed that the GPU has reached then."""
        self.products: dict[str, int] = {}
        """The deed of the first matrix product in forward and backward, where cuBLAS allocates its workspace."""
        self.repeated: dict[int, Part] = {}
        """Parts that were written again and release what they request, by the deed at which they begin again."""
        self.held: dict[Hashable, list[int]] = {}
        """Indices of each key's requests. A program that runs alternately with others has its own dictionary while it runs."""

    def begin(self, step: int, phase: Phase) -> None:
        """Begin a part of the run."""
        self.spans.append(Span(step, phase, len(self.events), len(self.calls)))

    @property
    def ends(self) -> tuple[int, int, int, int]:
        """The numbers of events, requests, spans and calls so far."""
        return len(self.events), len(self.requests), len(self.spans), len(self.calls)

    def standing(self, before: int) -> dict[Hashable, list[int]]:
        """Return what is held of the requests before one, by key."""
        found = {key: [place for place in held if place < before] for key, held in self.held.items()}
        return {key: places for key, places in found.items() if places}

    def written_since(self, start: tuple[int, int, int, int], standing: dict[Hashable, list[int]]) -> Part | None:
        """Return what was written since; None if it cannot be repeated: it waits, or changes what was ``standing`` before."""
        first, events = start[1], self.events[start[0] :]
        places = {key: tuple([place for place in held if place >= first]) for key, held in self.held.items()}
        left = tuple([(key, own) for key, own in places.items() if own])
        gone = sorted([-1 - event for event in events if event < 0] + [place for _, own in left for place in own])
        waits = any(at >= start[0] for at in self.waits) or any(place >= first for place in self.marked)
        return (
            None
            if waits or self.standing(first) != standing or gone != [*range(first, len(self.requests))]
            else Part(start, self.ends, left)
        )

    def stretches(self, *cuts: int) -> Iterator[tuple[int, int, Part | None]]:
        """Yield the log in stretches, each with its first event, its end, and the part that it is a copy of, or that was copied.

        None of them begins before one of the events ``cuts`` and ends after it.
        """
        begin = {part.start[0]: part for part in self.repeated.values()} | self.repeated
        at = 0
        for start in sorted({*begin, *cuts, len(self.events)}):
            if at < start:
                yield at, start, None
                at = start
            if start in begin:
                at += begin[start].stop[0] - begin[start].start[0]
                yield start, at, begin[start]

    def repeat(self, part: Part, step: int) -> None:
        """Write a part again, in another step."""
        (event, request, span, call), (later, more, _, _) = part.start, self.ends
        later, more, calls = later - event, more - request, len(self.calls) - call
        if not part.left:
            self.repeated[len(self.events)] = part
        self.events += [one + more if one >= 0 else one - more for one in self.events[event : part.stop[0]]]
        self.requests += self.requests[request : part.stop[1]]
        again = self.spans[span : part.stop[2]]
        self.spans += [Span(step, one.phase, one.start + later, one.calls + calls) for one in again]
        self.calls += [one._replace(start=one.start + later) for one in self.calls[call : part.stop[3]]]
        for key, places in part.left:
            self.held.setdefault(key, []).extend([place + more for place in places])

    def call(self, operation: str, n_bytes: Int, ranks: Int, among: Among = Among.SHARDS) -> None:
        """Record a collective, if it has several ranks and a payload."""
        if ranks > 1 and n_bytes:
            self.calls.append(Call(operation, int(n_bytes), int(ranks), len(self.events), among))

    def call_all(self, collectives: Iterable[Collective]) -> None:
        """Record the collectives of a step's traffic, each with the payload of all its calls."""
        for one in collectives:
            self.call(one.operation, one.payload_bytes, one.group, one.among)

    def note(self, event: str, copy: int = 0, cast: int = 0) -> None:
        """Ignore an event: only traces of moments use it."""

    def request(self, key: Hashable, n_bytes: int, kind: Kind, reason: str, *, is_scratch: bool = False) -> None:
        """Request memory, if any, and hold it under a key."""
        if n_bytes:
            place = len(self.requests)
            self.requests.append(
                tuple.__new__(Request, (n_bytes, kind, reason, self.layer, self.stream, is_scratch))
            )  # quicker
            self.events.append(place)
            self.held.setdefault(key, []).append(place)

    def write(self, made: Iterable[Piece], deeds: Iterable[int], places: list[int]) -> None:
        """Write requests and releases of a program that releases its tensors itself; ``places`` of its requests grow.

        ``deeds``: the number of a request within the program, or ``-1 - number`` of a released one.
        """
        layer, stream, new, first = self.layer, self.stream, tuple.__new__, len(self.requests)
        self.requests += [new(Request, (size, kind, reason, layer, stream, scratch)) for size, kind, reason, scratch in made]
        places += range(first, len(self.requests))
        self.events += [places[deed] if deed >= 0 else -1 - places[-1 - deed] for deed in deeds]

    def mark(self, key: Hashable) -> None:
        """Mark everything under a key as used by another stream (``record_stream``)."""
        self.marked.update(self.held.get(key, ()))

    @property
    def point(self) -> int:
        """The number of deeds so far."""
        return len(self.events)

    def wait_for(self, point: int) -> None:
        """Wait until the GPU has reached a deed."""
        self.waits[len(self.events)] = point

    def release(self, *keys: Hashable) -> None:
        """Release everything under these keys, in the order of the requests."""
        for key in keys:
            for place in self.held.pop(key, ()):
                self.events.append(-1 - place)

    # What programs call that also write moments.

    def at(self, name: str, phase: Phase) -> None:
        """Ignore the name of moments."""

    def hold(self, key: Hashable, *lines: Line) -> None:
        """Ignore lines that exist already."""

    def settle(self, *keys: Hashable) -> None:
        """Ignore that a line counts these tensors from now on."""

    def put(self, key: Hashable, *lines: Line) -> None:
        """Request lines, which are ints."""
        for line in lines:
            self.request(key, int(line.n_bytes), line.kind, line.reason)

    def pass_by(self, *lines: Line) -> None:
        """Request lines and release them at once."""
        self.put("passing", *lines)
        self.release("passing")

    def put_each(self, key: Hashable, line: Line, sizes: Iterable[int]) -> None:
        """Request tensors of these sizes, whose sum is the line."""
        self.put_all(key, [(n_bytes, line.kind, line.reason, False) for n_bytes in sizes])

    def put_all(self, key: Hashable, tensors: Iterable[Piece]) -> None:
        """Request tensors."""
        if made := [one for one in tensors if one[0]]:
            places = self.held.setdefault(key, [])
            self.write(made, range(len(places), len(places) + len(made)), places)

    def one_after_another(self, line: Line, sizes: Sequence[int], operation: str = "", ranks: Int = 1) -> None:
        """Request and release tensors of these sizes in sequence, each for a collective if given. The largest is the line."""
        for n_bytes in sizes:
            self.request("in turn", n_bytes, line.kind, line.reason)
            if operation:
                self.call(operation, n_bytes, ranks)
            self.release("in turn")

    def become(self, key: Hashable, new: Hashable, line: Line) -> None:
        """Release a key, or move it to another key if the line has bytes."""
        if line.n_bytes:
            self.rename(key, new)
        self.release(key)

    def drop(self, *keys: Hashable) -> None:
        """Release everything under these keys."""
        self.release(*keys)

    def rename(self, key: Hashable, new: Hashable) -> None:
        """Move everything under a key to another key, and add it there."""
        if key in self.held and key != new:
            self.held.setdefault(new, []).extend(self.held.pop(key))

    def part(self, key: Hashable, n_bytes: int, new: Hashable) -> None:
        """Move the latest request of this size from a key to another key, if there is one."""
        places = self.held.get(key, [])
        place = next((one for one in reversed(places) if self.requests[one].n_bytes == n_bytes), None)
        if place is not None:
            places.remove(place)
            self.held.setdefault(new, []).append(place)

    def bytes_of(self, key: Hashable) -> int:
        """Return the size of everything under a key. [bytes]"""
        return sum([self.requests[place].n_bytes for place in self.held.get(key, ())])

    def has(self, key: Hashable) -> bool:
        """Whether a key holds anything."""
        return key in self.held

    def multiplies(self, phase: str) -> None:
        """Note a matrix product."""
        self.products.setdefault(phase, len(self.events))
