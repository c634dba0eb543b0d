"""Requests and releases of memory in the order in which a program makes them."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias

from zeroplan.engines.requests.stretches import Stretch
from zeroplan.ledger import Among, Collective, Kind, Line, Phase
from zeroplan.numeric import Int

Starts: TypeAlias = Literal["loaded", "built", "recorded"]
"""Where a model's weights are before the engine takes them: in host memory, or on the GPU, where the model was built. Or the
requests are those that a run on fake tensors records: from the first step on, backward on the stream that computes."""


class Request(NamedTuple):
    """One request: its bytes, what it is for, which layer made it (-1: none), and the stream it was made on."""

    n_bytes: int
    kind: Kind
    reason: str
    layer: int
    stream: int


class Call(NamedTuple):
    """One collective: the bytes of its largest buffer, its ranks, the deeds before it, and which ranks those are."""

    operation: str
    n_bytes: int
    ranks: int
    start: int
    among: Among = Among.SHARDS


class Span(NamedTuple):
    """A part of the run: which step (the first is 0; -1 before it), which phase, how many deeds and calls there were before it."""

    step: int
    phase: Phase
    start: int
    calls: int = 0


class Log:
    """What a program has requested and released so far. What is requested again under a key that is taken is another part of it.

    >>> log = Log()
    >>> log.request("weights", 4, Kind.PARAMETERS, "weights")
    >>> log.request("input", 2, Kind.ACTIVATIONS, "an input")
    >>> log.release("weights")
    >>> log.deeds, log.requests[1].n_bytes
    ([0, 1, -1], 2)
    """

    def __init__(self, starts: Starts = "loaded") -> None:
        self.starts: Starts = starts
        self.requests: list[Request] = []
        self.deeds: list[int] = []
        """In order: the place of a request, or ``-1 - place`` of one that is released."""
        self.spans = [Span(-1, Phase.INIT, 0)]
        self.calls: list[Call] = []
        self.layer, self.stream = -1, 0
        self.marked = set[int]()
        """Places of requests whose memory another stream uses (``record_stream``): it is free when that one is done."""
        self.waits: dict[int, int] = {}
        """Where the program waits for the GPU, and how far that has come then; both in deeds."""
        self.products: dict[str, int] = {}
        """When the forward and the backward first multiply matrices, where cuBLAS takes a workspace; in deeds."""
        self.held: dict[Hashable, list[int]] = {}
        """Places of what each key holds. A program that runs alternately has one of its own while it runs."""
        self._alike: dict[tuple[int, int], list[Request]] = {}
        """A layer's requests in a stretch, which are the same in every micro-batch."""

    def begin(self, step: int, phase: Phase) -> None:
        """Begin a part of the run."""
        self.spans.append(Span(step, phase, len(self.deeds), len(self.calls)))

    def call(self, operation: str, n_bytes: Int, ranks: Int, among: Among = Among.SHARDS) -> None:
        """Begin a collective, if it is one of several ranks and something is sent."""
        if ranks > 1 and n_bytes:
            self.calls.append(Call(operation, int(n_bytes), int(ranks), len(self.deeds), among))

    def call_all(self, collectives: Iterable[Collective]) -> None:
        """Begin those of a step that the traffic lists, each with the payload of all its calls."""
        for one in collectives:
            self.call(one.operation, one.payload_bytes, one.group, one.among)

    def note(self, event: str, copy: int = 0, cast: int = 0) -> None:
        """Something happens that only moments are interested in."""

    def request(self, key: Hashable, n_bytes: int, kind: Kind, reason: str) -> None:
        """Request memory, if any, and hold it under a key."""
        if n_bytes:
            place = len(self.requests)
            self.requests.append(Request(n_bytes, kind, reason, self.layer, self.stream))
            self.deeds.append(place)
            self.held.setdefault(key, []).append(place)

    def stretch(self, layer: int, one: Stretch, ends: dict[int, Hashable]) -> None:
        """Do a stretch of a layer's program. What stays is held under the layer and its place, or under what ``ends`` says."""
        key, base, held = (id(one), layer), len(self.requests), self.held
        if key not in self._alike:
            self._alike[key] = [Request(*asked, layer, self.stream) for asked in one.requests]
        self.requests += self._alike[key]
        for deeds, place in one.parts:
            self.deeds += [deed + base if deed >= 0 else deed - base for deed in deeds]
            if gone := held.pop(ends.get(place, (layer, place)), None):
                self.deeds += [-1 - at for at in gone]
        for place, requests in one.kept:
            held[layer, place] = [base + at for at in requests]

    def mark(self, key: Hashable) -> None:
        """Another stream uses what a key holds (``record_stream``)."""
        self.marked.update(self.held.get(key, ()))

    def wait_for(self, point: int) -> None:
        """Wait until the GPU has come to a point, in deeds."""
        self.waits[len(self.deeds)] = point

    def release(self, *keys: Hashable) -> None:
        """Release what these keys hold, if anything, in the order of the requests."""
        for key in keys:
            if held := self.held.pop(key, None):
                self.deeds += [-1 - place for place in held]

    # What programs call that also write moments.

    def at(self, name: str, phase: Phase) -> None:
        """Ignore the name of moments that follow."""

    def hold(self, key: Hashable, *lines: Line) -> None:
        """Ignore what is there already."""

    def put(self, key: Hashable, *lines: Line) -> None:
        """Request lines, which are ints."""
        for line in lines:
            self.request(key, int(line.n_bytes), line.kind, line.reason)

    def pass_by(self, *lines: Line) -> None:
        """Request lines and release them at once."""
        self.put("passing", *lines)
        self.release("passing")

    def put_each(self, key: Hashable, line: Line, sizes: Sequence[int]) -> None:
        """Request tensors of these sizes, the sum of which is a line."""
        for n_bytes in sizes:
            self.request(key, n_bytes, line.kind, line.reason)

    def in_turn(self, line: Line, sizes: Sequence[int], operation: str = "", ranks: Int = 1) -> None:
        """Request and release tensors of these sizes, one after the other, for a collective or none; the line is the largest."""
        for n_bytes in sizes:
            self.request("in turn", n_bytes, line.kind, line.reason)
            if operation:
                self.call(operation, n_bytes, ranks)
            self.release("in turn")

    def become(self, key: Hashable, new: Hashable, line: Line) -> None:
        """Release what a key holds, or hold it under another key where the line says that it stays."""
        if line.n_bytes:
            self.rename(key, new)
        self.release(key)

    def drop(self, *keys: Hashable) -> None:
        """Release what these keys hold, if anything."""
        self.release(*keys)

    def rename(self, key: Hashable, new: Hashable) -> None:
        """Hold what a key holds under another one, beside what that holds."""
        if key in self.held and key != new:
            self.held.setdefault(new, []).extend(self.held.pop(key))

    def part(self, key: Hashable, n_bytes: int, new: Hashable) -> None:
        """Hold the latest part of this many bytes that a key holds under another one, if there is such a part."""
        places = self.held.get(key, [])
        place = next((one for one in reversed(places) if self.requests[one].n_bytes == n_bytes), None)
        if place is not None:
            places.remove(place)
            self.held.setdefault(new, []).append(place)

    def bytes_of(self, key: Hashable) -> int:
        """What a key holds. [bytes]"""
        return sum(self.requests[place].n_bytes for place in self.held.get(key, ()))

    def has(self, key: Hashable) -> bool:
        """Whether a key holds anything."""
        return key in self.held

    def multiplies(self, phase: str) -> None:
        """Note that matrices are multiplied here."""
        self.products.setdefault(phase, len(self.deeds))
