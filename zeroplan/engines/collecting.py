"""What happens to gradients where parameters are whole: what every engine's program of them has, and what it requests memory of.

An engine's program receives gradients in the order of the backward. It requests memory of a course, which notes the most at each
place (:mod:`zeroplan.engines.deepspeed.course`), or of a log of requests (:mod:`zeroplan.engines.requests`).
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, Union

from zeroplan.engines.rows import Placed, Row, made_at_once, numel
from zeroplan.ledger import Kind

if TYPE_CHECKING:
    from zeroplan.engines.requests.log import Log

Event: TypeAlias = Literal["arrives", "copied", "reduced", "kept", "leaves"]
"""A gradient arrives at the engine; with offload, one that is too large for the bucket is copied; a bucket is reduced; this rank's
part of it has been kept, or leaves for the host."""
Group: TypeAlias = tuple[Placed, ...]
Memory: TypeAlias = Union["Log", "Counts"]
"""What a program requests memory of."""


class GradientPlan(Protocol):
    """What happens to gradients depends on this alone."""

    @property
    def whole(self) -> Row:
        """The parameters that get gradients."""

    @property
    def element(self) -> int:
        """Bytes of an element of a gradient."""

    def program(self, memory: Memory, ranks: int = 1) -> "Collecting":
        """What the engine does with gradients."""


class Collecting:
    """Gradients stay where autograd makes them until the end of the backward: nothing reduces them before."""

    def __init__(self, plan: GradientPlan, memory: Memory, ranks: int = 1) -> None:
        self.plan, self.memory, self.ranks = plan, memory, ranks
        self.last = True
        """The micro-batch is the step's last."""
        self.made: dict[int, Hashable] = {}
        """The key of the gradient that a parameter has, by where the parameter starts."""

    def request_earlier(self) -> None:
        """Request what earlier micro-batches of the step have left: all gradients."""
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
        """What the engine's hook does with a gradient that has come."""

    def end(self) -> None:
        """The backward is over."""

    def release_gradients(self) -> None:
        """All gradients go."""
        self.memory.release(*self.made.values())
        self.made.clear()


@dataclass(slots=True)
class Counts:
    """Counts what is alive."""

    stream: int = 0
    alive: dict[Hashable, int] = field(default_factory=dict)
    """By key, which is a number for a gradient. [bytes]"""
    gradients: int = 0
    """What all gradients take. [bytes]"""
    n_bytes: int = 0
    """What everything takes. [bytes]"""

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

    def note(self, event: Event, copy: int = 0, cast: int = 0) -> None:
        """An event of a program, beside a copy and a cast that are yet to be requested."""


@lru_cache(maxsize=256)
def groups_of(whole: Row) -> dict[int, tuple[Group, ...]]:
    """Return the gradients of each block in the order of the backward, those together that one operator makes."""
    return {block: tuple(groups) for block, groups in groupby(made_at_once(whole), key=lambda group: group[0].block)}


@lru_cache(maxsize=256)
def operators_below(whole: Row) -> tuple[tuple[str, int], ...]:
    """Return what tells each operator below the blocks apart, and its gradients, in the order of the backward. [elements]

    The last is the embedding, which needs nothing to tell it; where nothing there gets a gradient, it is the only one.
    """
    groups = groups_of(whole).get(-1, ())
    names = [f": {group[0].parameter.name}" for group in groups[:-1]]
    return tuple(zip((*names, ""), [sum(map(numel, group)) for group in groups] or (0,), strict=True))


def receive(group: Group, engine: Collecting) -> None:
    """Give an engine the gradients that one operator made."""
    keys = [engine.request_gradient(each) for each in group]
    engine.memory.note("arrives")
    for each, key in zip(group, keys, strict=True):
        engine.arrived(each, key)
