"""What becomes of gradients where parameters are whole: what every engine's program of them has, and what it requests memory of.

An engine's program receives gradients in the order of the backward. It requests memory of a course, which notes the most at each
place (:mod:`zeroplan.engines.course`), or of a log of requests (:mod:`zeroplan.engines.requests`).
"""

from collections.abc import Hashable
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, Union

from zeroplan.engines.rows import Placed, Row, numel
from zeroplan.ledger import Kind

if TYPE_CHECKING:
    from zeroplan.engines.course import Notes
    from zeroplan.engines.requests.log import Log

Event: TypeAlias = Literal["arrives", "copied", "reduced", "kept", "leaves"]
"""A gradient arrives at the engine; with offload, one that is too large for the bucket is copied; a bucket is reduced; this rank's
part of it has been kept, or leaves for the host."""
Memory: TypeAlias = Union["Log", "Notes"]
"""What a program requests memory of."""
Reduces: TypeAlias = Literal["never", "during the backward", "after the backward"]
"""When a program needs to know which gradients are this rank's own."""


class GradientPlan(Protocol):
    """What becomes of gradients depends on this alone."""

    @property
    def whole(self) -> Row:
        """The parameters that get gradients."""

    @property
    def firsts(self) -> tuple[int, ...]:
        """First block of every run of like blocks."""

    @property
    def element(self) -> int:
        """Bytes of an element of a gradient."""

    @property
    def micro_batches(self) -> int:
        """Of a step, as far as they differ."""

    @property
    def reduces(self) -> Reduces:
        """When gradients are reduced, for which this rank's share matters."""

    @property
    def highest(self) -> range:
        """The micro-batches of a step that can hold the most."""

    def of(self, partition: int, micro_batches: int) -> "GradientPlan":
        """The same for another share, and so many micro-batches."""

    def program(self, memory: Memory, ranks: int = 1) -> "Collecting":
        """What the engine does with gradients."""

    def __hash__(self) -> int:
        """Plans are remembered."""


class Collecting:
    """Gradients stay where autograd makes them until the end of the backward: nothing reduces them before."""

    def __init__(self, plan: GradientPlan, memory: Memory, ranks: int = 1) -> None:
        """Begin with no gradient."""
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
