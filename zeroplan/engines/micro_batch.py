"""A micro-batch through a model whose parameters are whole on every rank, written into a trace. DDP and DeepSpeed 0 to 2 use it.

Blocks of one kind allocate the same. Before the last of them most blocks keep activations, so memory peaks there, or in an earlier
block where the engine has more gradients.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property

from zeroplan.engines.passes import Below, KindPass, Passes, checkpoint_beside, kept_before, kept_by_all
from zeroplan.engines.rows import Row, embedding_elements, embedding_symbol, has_tied_head, head_elements
from zeroplan.engines.sources import INPUT_BUFFER
from zeroplan.ledger import Line, Phase
from zeroplan.numeric import Int
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.trace import Inside, Trace
from zeroplan.transformer.blocks import At, BackwardPoint

Lines = tuple[Line, ...]


class MicroBatch(ABC):
    """The last micro-batch of a step, with the gradients of earlier ones. An engine adds the lines of its gradients."""

    head_phase = Phase.BACKWARD
    """The phase of the loss's and the head's backward."""

    def __init__(self, trace: Trace, recipe: RecipeSpec, these: Passes, whole: Row) -> None:
        self.trace, self.recipe, self.these, self.whole = trace, recipe, these, whole
        self._kept_before = dict[int, Lines]()

    # --- what an engine says: lines of gradients and of copies of weights ---------------------------------------------------

    @abstractmethod
    def gradient(self, elements: int, reason: str, symbol: str = "") -> Line:
        """Return a whole gradient as a line, with ``symbol`` in its formula if given."""

    @abstractmethod
    def in_forward(self) -> Lines:
        """Return the lines that are alive during the whole forward."""

    def copied_in_forward(self, blocks: int) -> Lines:  # noqa: ARG002  an engine's own answer needs it
        """Return the weight copies left when the last of ``blocks`` blocks runs; one more than the model has means the loss."""
        return ()

    @abstractmethod
    def at_head(self) -> Iterable[Lines]:
        """Yield the gradients at each point of the backward of loss, head and final norm."""

    @abstractmethod
    def in_last_block(self, one: KindPass) -> Iterable[Lines]:
        """Yield the gradients at each point of the backward of a kind's last block."""

    @abstractmethod
    def before_last_block(self, one: KindPass) -> None:
        """Write the points of the kind's other blocks at which memory can peak."""

    @abstractmethod
    def below_blocks(self) -> Sequence[tuple[Below, Lines]]:
        """Return each moment of the backward below the blocks, and the gradients then."""

    @property
    def sums_apart(self) -> bool:
        """Whether autograd sums a tied head's two gradients into a third tensor."""
        return self.recipe.loss == "full"

    @property
    def below_at_sum(self) -> Lines:
        """Return the tensors of the backward below the blocks that are alive during that sum."""
        return ()

    # --- the passes ---------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run forward and backward."""
        self.forward()
        self.backward()
        self.embedding_backward()

    def forward(self) -> None:
        """Run all blocks and the loss forward."""
        trace, head, these = self.trace, self.these.head, self.these
        trace.hold("gradients", *self.in_forward())
        trace.hold("shared", *head.shared)
        for one in these.rising:
            trace.hold("by name", *head.forward, *(head.first_input if one.last else ()))
            trace.hold("kept", *self.kept_before(one.last))
            trace.at(f"forward of {self.named(one, 'the last')}", Phase.FORWARD)
            own = one.block.forward if one.recompute == "none" else one.block.forward_recompute
            trace.pass_by(*one.block.entered, *one.kept, *own, *self.copied_in_forward(one.last + 1))
        trace.drop("by name")
        trace.hold("kept", *kept_by_all(these))
        trace.at("forward of the loss", Phase.LOSS, of_forward=True)
        trace.pass_by(*head.saved, *head.loss_forward, *self.copied_in_forward(these.n_blocks + 1))

    def kept_before(self, block: int) -> Lines:
        """Return what the blocks before one keep; cached, since many points need it."""
        if block not in self._kept_before:
            self._kept_before[block] = kept_before(self.these, block)
        return self._kept_before[block]

    def named(self, one: KindPass, which: str) -> str:
        """Return the name of a block in moments, such as ``the last moe block``."""
        return f"{which} {one.kind.replace('_', ' ')} block" if len(self.these.kinds) > 1 else f"{which} block"

    def backward(self) -> None:
        """Run loss and head backward, then the blocks from the last to the first."""
        trace, these = self.trace, self.these
        trace.drop("gradients")
        trace.hold("output", *these.output)
        for point, lines in zip(these.head.points, self.at_head(), strict=True):
            trace.at(f"backward of the {point.name}", self.head_phase)
            trace.pass_by(*point.lines, *lines)
        for one in reversed(these.rising):
            trace.hold("checkpoint", *checkpoint_beside(one))
            self.pass_block(one, "the last", one.last, self.in_last_block(one))
            if len(one.blocks) > 1:
                self.before_last_block(one)
        trace.drop("kept", "checkpoint")

    def pass_block(self, one: KindPass, which: str, block: int, beside: Iterable[Lines]) -> None:
        """Write each point of a block's backward; ``beside`` has the gradients of each point."""
        self.trace.hold("kept", *self.kept_before(block))
        inside = Inside([(point.name, (point.lines, lines)) for point, lines in zip(one.block.points, beside, strict=True)])
        self.trace.pass_through(inside, f"backward of {self.named(one, which)}", Phase.BACKWARD)

    def embedding_backward(self) -> None:
        """Run each operator below the blocks backward, the embedding last.

        With a tied head autograd adds both gradients into a third tensor. It adds in place only to a tensor that nothing else
        refers to. The head's gradient is a transposed view, which refers to its base, unless it has been cast.
        """
        trace, these = self.trace, self.these
        trace.hold("shared", *these.head.at_embedding)
        lines: Lines = ()
        for point, lines in self.below_blocks():
            trace.at(f"backward of the embedding{point.name}", Phase.BACKWARD)
            trace.pass_by(*point.lines, *lines)
        if has_tied_head(self.whole) and self.sums_apart:
            reason, symbol = "sum of the embedding's and the tied head's", embedding_symbol(self.whole)
            total = self.gradient(embedding_elements(self.whole), reason, symbol)
            trace.at("sum of the embedding's and the tied head's gradient", Phase.BACKWARD)
            trace.pass_by(*self.below_at_sum, *lines, total._replace(source=INPUT_BUFFER))

    # --- the head's gradient ------------------------------------------------------------------------------------------------

    @cached_property
    def tied_head(self) -> Lines:
        """Return a tied head's gradient, which waits for the embedding's before it reaches the parameter."""
        if not has_tied_head(self.whole):
            return ()
        reason = "gradient of the tied head, waiting for the embedding's"
        return (self.gradient(embedding_elements(self.whole), reason, embedding_symbol(self.whole)),)

    def of_head(self, point: BackwardPoint) -> tuple[int, int]:
        """Return the elements of gradients that can have reached their weights by then, and those being made.

        A tied head's gradient waits for the embedding's.
        """
        if self.tied_waits(point):
            return point.gradients - head_elements(self.whole), 0
        return point.gradients, point.current_gradient

    def tied_waits(self, point: BackwardPoint) -> bool:
        """Whether loss, head and final norm have made a tied head's gradient by then.

        A traced module may have a smaller weight above its head, whose gradient comes first.
        """
        return has_tied_head(self.whole) and point.gradients >= head_elements(self.whole)

    def sums_by_itself(self, point: BackwardPoint) -> bool:
        """Whether the loss holds the head's gradient until its own backward ends.

        A chunked loss accumulates it itself; a fused loss makes it in the forward.
        """
        return self.recipe.loss in ("chunked", "fused") and point.place.at is not At.FINAL_NORM


def highest_among(sizes: Sequence[Int]) -> set[int]:
    """Return the index of the largest size; of columns the index of the largest of every job."""
    if set(map(type, sizes)) == {int}:
        return {sizes.index(max(sizes))}
    import numpy as np  # noqa: PLC0415  a single job never needs it

    return set(np.stack(np.broadcast_arrays(*sizes)).argmax(axis=0).ravel().tolist())
