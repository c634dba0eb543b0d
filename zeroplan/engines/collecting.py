"""How an engine handles gradients when every rank holds whole parameters: the base class of all such engines.

An engine receives gradients in the order of the backward. It requests memory from a course, which records the peak at each
place (:mod:`zeroplan.engines.deepspeed.course`), or from a log of requests (:mod:`zeroplan.engines.requests`).
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, Union

from zeroplan.engines.rows import Placed, Row, groups_of, numel
from zeroplan.ledger import Kind

if TYPE_CHECKING:
    from zeroplan.engines.requests.log import Log

Event: TypeAlias = Literal["arrives", "copied", "reduced", "kept", "leaves", "updated"]
"""A gradient arrives at the engine; with offload, a gradient larger than the bucket is copied; the engine reduces a bucket.

This rank's shard of it is kept, or leaves for the host. After the last bucket, DeepSpeed's Muon computes its updates.
"""
Group: TypeAlias = tuple[Placed, ...]
Memory: TypeAlias = Union["Log", "Counts"]
"""The object that records a program's requests and releases."""


class GradientPlan(Protocol):
    """The settings on which the handling of gradients depends."""

    @property
    def whole(self) -> Row:
        """The parameters that get gradients."""

    @property
    def element(self) -> int:
        """Bytes of an element of a gradient."""

    def program(self, memory: Memory, ranks: int = 1) -> "Collecting":
        """Return the program that handles the gradients."""


class Collecting:
    """Gradients stay where autograd makes them until the backward ends. Subclasses reduce them earlier."""

    def __init__(self, plan: GradientPlan, memory: Memory, ranks: int = 1) -> None:
        self.plan, self.memory, self.ranks = plan, memory, ranks
        self.last = True
        """The micro-batch is the step's last."""
        self.made: dict[int, Hashable] = {}
        """The key of each parameter's gradient, by the parameter's start in the row."""

    def request_earlier(self) -> None:
        """Request the gradients that earlier micro-batches of the step have left: all of them."""
        for each in self.plan.whole.placed:
            self.made[each.start] = self.request_gradient(each)

    def request_gradient(self, each: Placed) -> int:
        """Request a gradient that autograd makes. Return its key, which is unique."""
        key = -1 - each.start if each.start in self.made else each.start
        self.memory.request(key, self.plan.element * numel(each), Kind.UNSHARDED_GRADIENTS, "gradient of a weight")
        return key

    def arrived(self, each: Placed, key: Hashable) -> None:
        """Give a gradient to its parameter, or add it to the parameter's gradient."""
        if each.start in self.made:
            self.memory.release(key)
        else:
            self.made[each.start] = key
        self.process_gradients(each)

    def process_gradients(self, each: Placed) -> None:
        """Run the engine's hook on a gradient that has arrived."""

    def end(self) -> None:
        """End the backward."""

    def release_gradients(self) -> None:
        """Release all gradients."""
        self.memory.release(*self.made.values())
        self.made.clear()


@dataclass(slots=True)
class Counts:
    """Counts the live bytes."""

    stream: int = 0
    alive: dict[Hashable, int] = field(default_factory=dict)
    """Live bytes by key. Keys of gradients are numbers. [bytes]"""
    gradients: int = 0
    """Size of all live gradients. [bytes]"""
    n_bytes: int = 0
    """Size of everything alive. [bytes]"""

    def request(self, key: Hashable, n_bytes: int, kind: Kind, reason: str) -> None:  # noqa: ARG002  as a log's
        """Request memory, if any. A second request under a key adds to it."""
        if n_bytes:
            self.hold(key, n_bytes)

    def hold(self, key: Hashable, n_bytes: int) -> None:
        """Hold memory, and add it to what is under the key."""
        self.alive[key] = self.alive.get(key, 0) + n_bytes
        self.n_bytes += n_bytes
        if isinstance(key, int):
            self.gradients += n_bytes

    def release(self, *keys: Hashable) -> None:
        """Release everything under these keys."""
        for key in keys:
            if n_bytes := self.alive.pop(key, 0):
                self.n_bytes -= n_bytes
                if isinstance(key, int):
                    self.gradients -= n_bytes

    def rename(self, key: Hashable, new: Hashable) -> None:
        """Move everything under a key to another key, and add it there."""
        n_bytes = self.alive[key]
        self.release(key)
        self.hold(new, n_bytes)

    def has(self, key: Hashable) -> bool:
        """Whether anything is alive under a key."""
        return key in self.alive

    def bytes_of(self, key: Hashable) -> int:
        """Return the size of everything under a key. [bytes]"""
        return self.alive.get(key, 0)

    def call(self, operation: str, n_bytes: int, ranks: int) -> None:
        """Ignore a collective: it allocates nothing itself."""

    def note(self, event: Event, copy: int = 0, cast: int = 0) -> None:
        """Record an event of a program, with a copy and a cast that it is about to request."""


class Highest(Counts):
    """Counts the live bytes, and notes their peak since ``most`` was set."""

    most: int = 0

    def request(self, key: Hashable, n_bytes: int, kind: Kind, reason: str) -> None:  # noqa: ARG002  as a log's
        """Request memory, if any."""
        self.alive[key] = self.alive.get(key, 0) + n_bytes
        self.n_bytes += n_bytes
        self.most = max(self.most, self.n_bytes)


@lru_cache(maxsize=256)
def operators_below(whole: Row) -> tuple[tuple[str, int], ...]:
    """Return a label for each operator below the blocks and the elements of its gradients, in backward order. [elements]

    The last operator is the embedding, whose label is empty. It is the only one if no weight there gets a gradient.
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
