"""The last micro-batch of a step under DDP, with the gradients of earlier ones, written into a trace.

Blocks of one kind differ in what the blocks before them keep, and in the gradients that the blocks after them have made.
"""

from collections.abc import Iterator
from functools import cached_property
from operator import mul
from typing import NamedTuple

from zeroplan.engines.collecting import operators_below
from zeroplan.engines.ddp import lomo
from zeroplan.engines.ddp.reducer import Levels, made_above
from zeroplan.engines.formulas import blocks_sum, product, sized
from zeroplan.engines.micro_batch import Lines, MicroBatch, highest_among
from zeroplan.engines.optimizers import LocalTensor, implementation_of, step_temporary_lines
from zeroplan.engines.passes import Below, KindPass, Passes, kept_bytes, moments_below
from zeroplan.engines.rows import embedding_elements, has_tied_head
from zeroplan.engines.sources import ACCUMULATE
from zeroplan.ledger import Kind, Line, Phase
from zeroplan.memo import Computed
from zeroplan.numeric import Int, where
from zeroplan.spec.recipe import LOMO, RecipeSpec
from zeroplan.spec.releases import is_reentrant
from zeroplan.trace import Trace
from zeroplan.transformer.blocks import At, BackwardPoint

_AUTOCAST = "torch 2.13, aten/src/ATen/autocast_mode.cpp, cached_cast"
_SINK = "torch 2.13, torch/nn/parallel/distributed.py, _DDPSink"
_EMBEDDING = "torch 2.13, torch/_decomp/decompositions.py, embedding_dense_backward"
_NARROW = 2
"""Bytes of a 16-bit number."""
_REENTRANT = "torch 2.13, torch/utils/checkpoint.py, CheckpointFunction.backward"


class Casts(NamedTuple):
    """Elements that autocast copies for a block of each kind and for the head; empty without autocast."""

    in_forward: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    """Copies kept until the block's backward: none for a recomputed block."""
    of_head: int = 0


class Training(MicroBatch):
    """The last micro-batch of a step through DDP's model, forward and backward."""

    head_phase = Phase.LOSS

    def __init__(self, trace: Trace, recipe: RecipeSpec, these: Passes, levels: Levels, copied: Casts, wrapped: Int) -> None:
        """``wrapped``: 1 if DDP wraps the model, else 0."""
        super().__init__(trace, recipe, these, levels.plan.whole)
        self.levels, self.width, self.copied, self.wrapped = levels, levels.plan.element, copied, wrapped
        self.above, self.steps = made_above(self.whole), recipe.steps_in_backward
        self._known = dict[tuple[int, bool], tuple[int, str]]()
        if recipe.ddp.gradient_as_bucket_view:
            self.kind, self.reason = Kind.UNSHARDED_GRADIENTS, "gradients not in their buckets"
        else:
            self.kind, self.reason = Kind.GRADIENTS, "gradients made so far"

    @cached_property
    def casts_go(self) -> bool:
        """Whether a step in the backward comes after autocast's 16-bit gradient. With experts a run has as much alive anyway."""
        return bool(self.copied.in_forward) and all(len(each.parameter.shape) <= 2 for each in self.whole.executed)

    def gradient(self, elements: int, reason: str, symbol: str = "") -> Line:
        """Return a whole gradient as a line, with ``symbol`` in its formula if given."""
        return sized(self.kind, self.width, elements, reason, ACCUMULATE, symbol)

    def in_forward(self) -> Lines:
        """Return the gradients of earlier micro-batches."""
        return (self._gradients(self.these.n_blocks, 0),)

    def _made(self, block: int, made: int, current: int = 0, *, summed: bool = False) -> Lines:
        """Return gradients outside the buckets, and with a step in the backward the optimizer's temporaries for the newest ones.

        By then a line of the point is freed: autocast's 16-bit gradient, or one of the two gradients that are ``summed``.
        """
        gradients = self._gradients(block, made, current)
        if self.recipe.optimizer in LOMO:
            return (gradients, *self._of_the_weight_before(block, made, current, summed=summed))
        if not self.recipe.ddp.step_in_backward or not current:
            return (gradients,)
        optimizer, impl, tensor = self.recipe.optimizer, implementation_of(self.recipe), (LocalTensor((current,)),)
        stepping = step_temporary_lines(optimizer, impl, tensor, self.width)
        return (gradients, *self._beside_what_goes(stepping, current, summed=summed))

    def _of_the_weight_before(self, block: int, made: int, current: int, *, summed: bool) -> Lines:
        """Return LOMO's gradient of the weight before, and once the newest gradient exists that weight's update."""
        earlier = self.above[block] + made - current
        waits = lomo.waiting(self.whole, earlier, self.width)
        if not current:
            return (waits,)
        update = lomo.updating(self.whole, earlier, self.recipe.optimizer, self.width)
        return (waits, *self._beside_what_goes((update,), current, summed=summed))

    def _beside_what_goes(self, stepping: Lines, current: int, *, summed: bool) -> Lines:
        """Return an update's temporaries without the bytes of the point's lines that are freed by then."""
        freed = self.width * current if summed else 2 * current * self.casts_go
        left = [line._replace(n_bytes=max(line.n_bytes - freed, 0)) for line in stepping]
        return tuple([line._replace(formula=product(1, int(line.n_bytes))) for line in left])

    def _gradients(self, block: int, made: int, current: int = 0) -> Line:
        """Return the gradients outside the buckets when a block has ``made`` this many elements, of them ``current`` just now."""
        ddp, above = self.recipe.ddp, self.above[block] + made - current
        before = 0 if self.steps else self.levels.at(above)
        n_bytes = before + self.width * current
        if ddp.compiled:
            n_bytes = n_bytes + self.width * above * (1 if self.steps else where(self.levels.micro_batches > 1, 1, 0))
        elements = n_bytes // self.width
        return Line(self.kind, n_bytes, self.reason, product(self.width, elements), ACCUMULATE)

    @property
    def sums_apart(self) -> bool:
        """Whether a tied head's two gradients are summed into a third tensor: not under autocast, whose head gradient is a copy."""
        return not self.copied.in_forward

    @property
    def below_at_sum(self) -> Lines:
        """Return all tensors that a profile recorded below the blocks, since it does not record when each is freed."""
        return self.these.head.below_blocks

    def at_head(self) -> Iterator[Lines]:
        """Yield gradients, including a tied head's, and weight copies, all of which exist during a chunked loss."""
        for point in self.these.head.points:
            sums = self.sums_by_itself(point)
            made = (0, 0) if sums else self.of_head(point)
            apart: Lines = self.tied_head if self.tied_waits(point) else ()
            if sums:
                apart = (self.gradient(point.gradients, "gradient of the head, still the loss's"),)
            in_context = self.recipe.loss == "chunked" and point.place.at is not At.FINAL_NORM
            casts = self._casts(self.these.n_blocks, point.live_casts, in_context=in_context)
            yield (*self._made(self.these.n_blocks, *made), *apart, *casts)

    def sums_by_itself(self, point: BackwardPoint) -> bool:
        """Whether a fused loss holds the head's gradient. A chunked one runs its backward to the head's weight with every chunk."""
        return self.recipe.loss == "fused" and super().sums_by_itself(point)

    def in_last_block(self, one: KindPass) -> Iterator[Lines]:
        """Yield gradients and weight copies of each point."""
        return self._in_block(one, one.last)

    def before_last_block(self, one: KindPass) -> None:
        """Write the first block of the kind, and the one with most live bytes."""
        for block in sorted(self._highest_blocks(one) - {one.last}, reverse=True):
            which = "an earlier" if block > one.blocks[0] else "the first"
            self.pass_block(one, which, block, self._in_block(one, block))

    def _highest_blocks(self, one: KindPass) -> set[int]:
        """Return the first block of the kind, and those at which activations, gradients and weight copies are highest.

        Along a stretch of equal blocks all sizes change evenly, so only its ends count.
        """
        ends = self.these.order.ends[self.these.order.of_block[one.last]]
        held = [kept_bytes(self.these, block) + 2 * self._casts_of(block, False)[0] for block in ends]
        found = {ends[0]}
        for slope in self._slopes():
            sizes = [kept + slope * self.above[block] for block, kept in zip(ends, held, strict=True)]
            found.update([ends[at] for at in highest_among(sizes)])
        return found

    def _slopes(self) -> set[int]:
        """Return the bytes by which gradients outside the buckets can grow with each element made."""
        slopes = {0} if self.recipe.steps_in_backward else {slope for each in self.levels.of_each for _, slope in each}
        return slopes | {slope + self.width for slope in slopes} if self.recipe.ddp.compiled else slopes

    def _in_block(self, one: KindPass, block: int) -> Iterator[Lines]:
        others = (*self.tied_head, *self._run_again(one))
        made = Computed[tuple[int, int], Lines](lambda elements: self._made(block, *elements))
        casts = Computed[int, Lines](lambda elements: self._casts(block, elements))
        for point in one.block.points:
            yield (*made[point.gradients, point.current_gradient], *others, *casts[point.live_casts])

    def _run_again(self, one: KindPass) -> Lines:
        """Return the recomputed output that a reentrant checkpoint holds until its block's backward ends."""
        head = self.these.head
        if not is_reentrant(self.recipe) or one.recompute != "full":
            return ()
        reason = "this block's output, run again"
        return (Line(Kind.ACTIVATIONS, head.hidden_bytes, reason, head.hidden_formula, _REENTRANT),)

    def below_blocks(self) -> list[tuple[Below, Lines]]:
        """Return each moment below the blocks with the gradients of each table."""
        found = list[tuple[Below, Lines]]()
        for point in moments_below(self.these, operators_below(self.whole)):
            summed = has_tied_head(self.whole) and point.current == embedding_elements(self.whole)
            made = self._made(-1, point.gradients, point.current, summed=summed)
            found.append((point, (*made, *self.tied_head, *self._summed_wide(point.current))))
        return found

    def _summed_wide(self, elements: int) -> Lines:
        """Return the fp32 sum of a 16-bit embedding's gradient in compiled code, which is cast at its end."""
        if not self.recipe.ddp.compiled or self.width != _NARROW:
            return ()
        return (sized(Kind.TEMPORARY, 4, elements, "sum of the embedding's gradient, fp32", _EMBEDDING),)

    def forward(self) -> None:
        """Run all blocks and the loss; with ``find_unused_parameters`` DDP also copies the model's output."""
        super().forward()
        options, head = self.recipe.ddp, self.these.head
        if options.find_unused_parameters and not options.static_graph:
            self.trace.at("forward: DDP copies the model's output", Phase.FORWARD)
            made = (*head.saved, *head.loss, *head.output, *map(self._copy, head.output))
            self.trace.pass_by(*made, *self.copied_in_forward(self.these.n_blocks + 1))

    def _copy(self, line: Line) -> Line:
        formula = line.formula if self.recipe.wraps_one_rank else f"{line.formula}·min(1, N-1)"
        reason = f"{line.reason}, copied by DDP"
        return Line(line.kind, self.wrapped * line.n_bytes, reason, formula if line.formula else "", _SINK)

    def copied_in_forward(self, blocks: int) -> Lines:
        """Return autocast's copies, which live until its context ends after the loss. A fused loss copies the head itself."""
        beside = self.copied.of_head if blocks > self.these.n_blocks and self.recipe.loss not in ("fused", "log-probs") else 0
        return self._casts(blocks, beside, in_context=True)

    def _casts(self, blocks: int, beside: int, *, in_context: bool = False) -> Lines:
        """Return the copies of this many blocks, in autocast's context or kept by autograd after it, plus ``beside`` elements."""
        if not self.copied.in_forward:
            return ()
        elements, formula = self._casts_of(blocks, in_context)
        n_bytes, reason = 2 * (elements + beside), "autocast's 16-bit copies of the weights"
        formula = f"2·({formula} + {beside})" if beside else f"2·({formula})"
        return (Line(Kind.WEIGHT_CASTS, n_bytes, reason, formula, _AUTOCAST),)

    def _casts_of(self, blocks: int, in_context: bool) -> tuple[int, str]:  # noqa: FBT001  part of a key
        found = self._known.get((blocks, in_context))
        if found is None:
            each, letter = (self.copied.in_forward, "C") if in_context else (self.copied.kept, "K")
            counts = self.these.order.before[min(blocks, self.these.n_blocks)]
            found = sum(map(mul, counts, each)), blocks_sum(letter, counts, self.these.names)
            self._known[blocks, in_context] = found
        return found
