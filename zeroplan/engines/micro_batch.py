"""A micro-batch on its way through a model whose parameters are whole on every rank, written into a trace.

Over like blocks in a row, what blocks keep for their backward shrinks evenly, so that memory peaks in the last block of a run, or
in the one before that the engine's gradients choose. What gradients take comes from the program that makes the engine's requests
(:mod:`zeroplan.engines.course`).
"""

from collections.abc import Sequence
from functools import lru_cache

from zeroplan.engines.course import Courses, Held, groups_of, highest
from zeroplan.engines.passes import Passes, RunPass, checkpoint_beside, kept_before, kept_by_all, kept_bytes
from zeroplan.engines.rows import Row, embedding_elements, embedding_symbol, has_tied_head, head_elements, numel
from zeroplan.engines.running import points_of_kinds
from zeroplan.engines.sources import FLOWING, INPUT_BUFFER
from zeroplan.ledger import Kind, Line, Phase
from zeroplan.numeric import Int
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.trace import Inside, Trace
from zeroplan.transformer.blocks import At, BackwardPoint

Lines = tuple[Line, ...]


class MicroBatch:
    """The last micro-batch of a step, with what earlier ones have left. An engine says what its gradients take."""

    head_phase = Phase.BACKWARD
    """The phase to which the backward of loss and head belongs."""

    def __init__(self, trace: Trace, recipe: RecipeSpec, these: Passes, whole: Row, courses: Courses) -> None:
        """Take what blocks and the rest of the model cost, and what the engine's gradients take."""
        self.trace, self.recipe, self.these, self.whole, self.courses = trace, recipe, these, whole, courses

    # --- what an engine says ------------------------------------------------------------------------------------------------

    def gradients(self, held: Held) -> Lines:
        """What gradients, and what they are reduced in, take."""
        raise NotImplementedError

    def gradient(self, elements: int, reason: str, symbol: str = "") -> Line:
        """A whole gradient, which ``symbol`` stands for if given."""
        raise NotImplementedError

    def casts_in_forward(self, block: int) -> Lines:  # noqa: ARG002  an engine's answer needs it
        """Copies of weights that are there in the forward of a block; beyond the last one, in the loss."""
        return ()

    def casts(self, block: Int, live: int) -> Lines:  # noqa: ARG002  likewise
        """Copies of weights that are there in the backward of a block, ``live`` elements of them its own."""
        return ()

    @property
    def sums_apart(self) -> bool:
        """Whether the sum of a tied head's two gradients is a third tensor."""
        return self.recipe.loss == "full"

    # --- forward ------------------------------------------------------------------------------------------------------------

    def forward(self) -> None:
        """All blocks and the loss."""
        trace, head, these = self.trace, self.these.head, self.these
        trace.hold("gradients", *self.gradients(highest(self.courses, ("forward",)).held))
        trace.hold("shared", *head.shared)
        for run in these.runs:
            block = run.first + run.n_blocks - 1
            trace.hold("by name", *head.forward, *(head.first_input if block else ()))
            trace.hold("kept", kept_before(these, block))
            trace.at(f"forward of {self.named(run, 'the last')}", Phase.FORWARD)
            own = run.block.forward if run.recompute == "none" else run.block.forward_recompute
            trace.pass_by(*run.block.entered, *run.kept, *own, *self.casts_in_forward(block))
        trace.drop("by name")
        trace.hold("kept", *kept_by_all(these))
        trace.at("forward of the loss", Phase.LOSS, of_forward=True)
        trace.pass_by(*head.saved, *head.loss_forward, *self.casts_in_forward(these.n_blocks))

    def named(self, run: RunPass, which: str) -> str:
        """How a moment's name calls a block of a run."""
        return f"{which} {run.kind.replace('_', ' ')} block" if len(self.these.runs) > 1 else f"{which} block"

    # --- backward -----------------------------------------------------------------------------------------------------------

    def backward(self) -> None:
        """Loss and head, blocks from the last to the first, the embedding."""
        self.trace.drop("gradients")
        self.trace.hold("output", *self.these.output)
        self._head()
        for at, run in reversed(list(enumerate(self.these.runs))):
            self._blocks(at, run)
        self.trace.drop("kept", "checkpoint")

    def _head(self) -> None:
        these, head_points = self.these, self.these.head.points
        points = [self._of_head(point) for point in head_points]
        counts = received_before(_counted(points), _sizes(self.whole, these.n_blocks))
        for at, point, count in zip(head_points, points, counts, strict=True):
            self.trace.at(f"backward of the {at.name}", self.head_phase)
            waits = at.gradients and not self._sums_by_itself(at)
            held = highest(self.courses, ("between", len(these.runs), count)).held
            casts = self.casts(these.n_blocks, at.live_casts)
            self.trace.pass_by(*at.lines, *casts, *self._around(held, point, waits=bool(waits)))

    def _around(self, held: Held, point: BackwardPoint, *, waits: bool = True) -> Lines:
        """What gradients take at a point: what there was, the one being made, and that of a tied head, if it ``waits``."""
        made = self.gradient(point.current_gradient, "gradient just made")
        return (*self.gradients(held), made, *(self.tied_head() if waits else ()))

    def tied_head(self) -> Lines:
        """With a tied head, its gradient waits for the embedding's before either reaches its parameter."""
        if not has_tied_head(self.whole):
            return ()
        reason = "gradient of the tied head, waiting for the embedding's"
        return (self.gradient(embedding_elements(self.whole), reason, embedding_symbol(self.whole)),)

    def _of_head(self, point: BackwardPoint) -> BackwardPoint:
        """Return the point with the gradients that have come to their weights by then.

        A tied head's gradient waits for the embedding's. A loss in chunks adds the head's gradient up itself, and a fused loss
        makes it in the forward: both pass it on when their backward is over.
        """
        vocabulary = head_elements(self.whole)
        tied = vocabulary if has_tied_head(self.whole) else 0
        if self._sums_by_itself(point):
            received = vocabulary - tied if self.recipe.loss == "fused" or point.place.at is At.HEAD else 0
            return point._replace(gradients=received, current_gradient=point.gradients)
        return point._replace(gradients=max(0, point.gradients - tied), current_gradient=0 if tied else point.current_gradient)

    def _sums_by_itself(self, point: BackwardPoint) -> bool:
        return self.recipe.loss != "full" and point.place.at is not At.FINAL_NORM

    def _blocks(self, index: int, run: RunPass) -> None:
        """Each point of a run's last block, and each point of one before it."""
        trace, these, last = self.trace, self.these, run.first + run.n_blocks - 1
        points = [
            (point, count)
            for kind in points_of_kinds(run)
            for point, count in zip(kind, received_before(_counted(kind), _sizes(self.whole, run.first)), strict=True)
        ]
        trace.hold("checkpoint", *checkpoint_beside(run))
        trace.hold("kept", kept_before(these, last))
        inside = [(point, last, highest(self.courses, ("between", index, count)).held) for point, count in points]
        trace.pass_through(Inside(map(self._at_point, inside)), f"backward of {self.named(run, 'the last')}", Phase.BACKWARD)
        self._other_blocks(index, run, points)

    def _other_blocks(self, index: int, run: RunPass, points: Sequence[tuple[BackwardPoint, int]]) -> None:
        trace = self.trace
        for point, count in points if run.n_blocks > 1 else ():
            seen = highest(self.courses, ("before", index, count), lambda seen: kept_bytes(self.these, seen.block))
            trace.hold("kept", kept_before(self.these, seen.block))
            trace.at(f"backward of a block before the last: {point.name}", Phase.BACKWARD)
            trace.pass_by(*point.lines, *self._around(seen.held, point))

    def _at_point(self, at: tuple[BackwardPoint, Int, Held]) -> tuple[str, tuple[Lines, ...]]:
        point, block, held = at
        return point.name, (point.lines, (*self._around(held, point), *self.casts(block, point.live_casts)))

    def embedding_backward(self) -> None:
        """Each operator below the blocks, the embedding last.

        With a tied head both gradients are added up in a third tensor: autograd adds in place only to what nothing else refers to,
        and the head's is a transposed view, which refers to what it is a view of, unless it has been cast.
        """
        trace, these = self.trace, self.these
        reason = "gradient of the embedding's output"
        flowing = Line(Kind.ACTIVATION_GRADIENTS, these.head.hidden_bytes, reason, these.head.hidden_formula, FLOWING)
        trace.hold("shared", *these.head.at_embedding)
        lines: Lines = ()
        for count, (name, elements) in enumerate(_below_blocks(self.whole) or (("", 0),)):
            held = highest(self.courses, ("between", -1, count)).held
            is_table = elements and elements == embedding_elements(self.whole)
            symbol = embedding_symbol(self.whole) if is_table else ""
            lines = (
                *self.gradients(held), self.gradient(elements, "gradient of the embedding", symbol), *self.tied_head()
            )  # fmt: skip
            trace.at(f"backward of the embedding{name}", Phase.BACKWARD)
            trace.pass_by(flowing, *these.head.below_blocks, *lines)
        if has_tied_head(self.whole) and self.sums_apart:
            reason, symbol = "sum of the embedding's and the tied head's", embedding_symbol(self.whole)
            total = self.gradient(embedding_elements(self.whole), reason, symbol)
            trace.at("sum of the embedding's and the tied head's gradient", Phase.BACKWARD)
            trace.pass_by(*lines, total._replace(source=INPUT_BUFFER))


@lru_cache(maxsize=256)
def _below_blocks(whole: Row) -> tuple[tuple[str, int], ...]:
    """Of each operator below the blocks, in the order of the backward, the elements of its gradients, and a name if it has none."""
    groups = groups_of(whole).get(-1, ())
    names = [f": {group[0].parameter.name}" for group in groups[:-1]]
    return tuple(zip((*names, ""), [sum(map(numel, group)) for group in groups], strict=False))


@lru_cache(maxsize=4096)
def received_before(points: tuple[tuple[int, int], ...], groups: tuple[int, ...]) -> tuple[int, ...]:
    """Return how many groups of gradients have come to their weights when each point of a block's backward is reached.

    A point has the elements made by then and those being made; the latter arrive when it is over.

    >>> received_before(((4, 4), (4, 0), (11, 5)), (4, 2, 5))
    (0, 1, 2)
    """
    counts, made, count = [], 0, 0
    for gradients, current in points:
        latest = 0
        while count < len(groups) and made + groups[count] <= gradients:
            made += groups[count]
            count += 1
            latest = 1 if current and made == gradients else 0
        counts.append(count - latest)
    return tuple(counts)


def _counted(points: Sequence[BackwardPoint]) -> tuple[tuple[int, int], ...]:
    return tuple([(point.gradients, point.current_gradient) for point in points])


@lru_cache(maxsize=4096)
def _sizes(whole: Row, block: int) -> tuple[int, ...]:
    return tuple([sum(map(numel, group)) for group in groups_of(whole).get(block, ())])
