"""A micro-batch through the model under ZeRO-3, with the gathered parameters, written into a trace.

For each kind of block it writes the last one, and earlier ones with more gathered.
"""

from functools import lru_cache
from typing import NamedTuple

from zeroplan.engines.collecting import operators_below
from zeroplan.engines.deepspeed.adapted import highest_places
from zeroplan.engines.deepspeed.buckets import unreduced_elements, waiting_elements
from zeroplan.engines.deepspeed.infinity import swaps_optimizer
from zeroplan.engines.deepspeed.notes import Gathered, Note, rising
from zeroplan.engines.deepspeed.running import gradient_counts, running_lines
from zeroplan.engines.deepspeed.stage3.job import Job, gathered_line, gradient_line, staying_lines, tied_head_lines
from zeroplan.engines.deepspeed.stage3.reducing import highest_flushes, reduce_lines, running_at, staying_until
from zeroplan.engines.deepspeed.stage12_lines import waiting
from zeroplan.engines.micro_batch import Lines
from zeroplan.engines.passes import (
    KindPass,
    Passes,
    checkpoint_beside,
    flowing_at_embedding,
    incoming_gradient,
    kept_before,
    kept_by_all,
    operators_of,
    shared_at,
)
from zeroplan.engines.rows import blocks_with_frozen, embedding_elements, embedding_symbol, has_tied_head
from zeroplan.engines.sources import INPUT_BUFFER
from zeroplan.ledger import Phase
from zeroplan.memo import Computed
from zeroplan.trace import Inside, Trace
from zeroplan.transformer.blocks import At, BackwardPoint

_GATHERING = -1
"""Replaces the elements being made, for the moment at which the module is gathered (:func:`_held`)."""
_NOWHERE = BackwardPoint("", (), 0, 0, 0)
_OF_HEAD = {At.LOSS: 0, At.HEAD: 1, At.FINAL_NORM: 2}
"""Index of a point in the trace's figures of the head, where gradients do not locate it."""
_Place = tuple[int, int, bool, bool]
"""A point of a block's backward, as an argument of :func:`_held`."""
Taken = tuple[tuple[int, ...], ...]
"""Memory beside buckets, as :func:`zeroplan.engines.deepspeed.stage3.reducing.flush_memory` returns it."""
_Highest = tuple[tuple[int, int], ...]
"""The last block, and earlier ones with more gathered; each with the gathered elements."""


class Beside(NamedTuple):
    """Later micro-batches, for the moments of an early one."""

    early: str
    """The name of the early one."""
    traces: tuple[Gathered, ...]
    spare: int
    """Elements that are alive then, besides those of the traces, and not in the early one."""
    are_higher_in_forward: bool
    """Whether the early one has no more alive in any block's forward."""

    def is_above(self, block: int, held: int, at: _Place) -> bool:
        """Whether the early one, with ``held`` elements gathered, has no more alive at a point of a block's backward."""
        return held <= _least_held(self.traces, block, at) + self.spare


class Training:
    """Forward and backward, including the last bucket. ``trace`` already has the persistent lines.

    ``taken``: each flush's memory beside its bucket. ``later``: the moments are those of a micro-batch before these later ones.
    Points of blocks that are not higher than in them are left out.
    """

    def __init__(self, trace: Trace, job: Job, these: Passes, taken: Taken, *, later: Beside | None = None) -> None:
        self.taken, self.later = taken, later
        self.trace, self.job, self.these, self.gathered = trace, job, these, job.trace
        self.tied, self._kept = tied_head_lines(job), Computed[int, Lines](lambda block: kept_before(these, block))
        self._gathered = Computed[int, Lines](lambda elements: (gathered_line(job, elements),))
        self._swaps = swaps_optimizer(job.recipe)

    def run(self) -> None:
        """Run forward, loss and head backward, the blocks with their buckets, and the end."""
        self.forward()
        self.head_backward()
        for one in reversed(self.these.rising):
            self.trace.hold("checkpoint", *checkpoint_beside(one))
            if one.last in blocks_with_frozen(self.job.every):
                self.frozen_block_backward(one)
            else:
                self.block_backward(one)
        self.trace.hold("checkpoint")
        self.reduce_buckets()
        self.end_of_backward()

    def _at(self, name: str, phase: Phase, gathered: int, lines: Lines, beside: Lines = ()) -> None:
        """Write a moment with these lines, this many gathered elements, and the gradients beside them."""
        self.trace.at(*self._named(name, phase), of_forward=phase is Phase.LOSS or self._is_early_forward(phase))
        self.trace.pass_by(*lines, *self._gathered[gathered], *beside)

    def _named(self, name: str, phase: Phase) -> tuple[str, Phase]:
        """Return the name and the phase of moments; those of an early micro-batch are of their own phase."""
        return (name, phase) if self.later is None else (f"{self.later.early}: {name}", Phase.FIRST)

    def _is_early_forward(self, phase: Phase) -> bool:
        return self.later is not None and phase is not Phase.BACKWARD

    def _enter(self, block: int) -> None:
        """Hold the activations that the blocks before this one keep."""
        self.trace.hold("kept", *self._kept[block])

    # --- forward ------------------------------------------------------------------------------------------------------------

    def forward(self) -> None:
        """Run blocks, final norm, head and loss."""
        trace, these, head, held, phase = self.trace, self.these, self.these.head, self.gathered, Phase.FORWARD
        if head.below:
            trace.hold("shared", *head.at_embedding)
            self._at("forward before the blocks", phase, held.first, head.looked_up)
        trace.hold("shared", *head.shared)
        trace.hold("by name", *head.forward, *head.first_input)
        for one in () if self.later is not None and self.later.are_higher_in_forward else these.rising:
            own = one.block.forward if one.recompute == "none" else one.block.forward_recompute
            for block, elements in _highest_forward(held, one.blocks):
                self._enter(block)
                self._at("forward of a block", phase, elements, (*one.block.entered, *one.kept, *own))
            experts = _highest_forward(held, one.blocks, before_experts=True) if held.before_experts[one.last] else ()
            for block, elements in experts:
                self._enter(block)
                self._at("experts gathered for their forward", phase, elements, one.block.before_experts)
        self._enter(these.n_blocks)
        for lines in head.norm_forward:
            self._at("forward of the final norm", phase, held.norm_forward, lines)
        trace.hold("by name")
        trace.hold("kept", *kept_by_all(these))
        self._at("gathered for the head", phase, held.head_gathering, head.saved)
        self._at("forward of the head", phase, held.head_forward, (*head.saved, *head.output))
        self._at("loss forward", Phase.LOSS, held.loss, (*head.saved, *head.loss_forward))

    # --- loss and head, backward --------------------------------------------------------------------------------------------

    def head_backward(self) -> None:
        """Write each point of loss, head and final norm."""
        trace, these, job = self.trace, self.these, self.job
        trace.hold("kept")
        trace.hold("output", *these.output)
        at_before = -1
        for point in these.head.points:
            first = point.gradients == point.current_gradient
            tied = self.tied if point.gradients and not first else ()
            made = gradient_line(job, point.current_gradient, "gradient just made")
            trace.hold("kept", *kept_by_all(these))
            beside = (*tied, *self._unreduced_before(point))
            at, held = self._place_at_head(point), self._held_at_head(point)
            if at > at_before and self._gathers_apart:
                self._gather_at_head(point, self.gathered.head[at], held, beside)
            at_before = at
            self._at(f"backward of the {point.name}", Phase.BACKWARD, held, point.lines, (made, *beside))
            if first and point.gradients and not self.gathered.head_notes:
                self._past_head(point.gradients)

    @property
    def _gathers_apart(self) -> bool:
        """Whether the tensors alive while head and final norm are gathered for their backward are known."""
        return self.job.recipe.loss == "full" and not self.gathered.head_notes

    def _gather_at_head(self, point: BackwardPoint, gathering: int, held: int, beside: Lines) -> None:
        """Write the gather before a point of loss, head or final norm has made anything."""
        head, at_loss = self.these.head, point.place.at is At.LOSS
        if gathering > held and (at_loss or point.before):
            lines = (*head.saved, *head.loss) if at_loss else point.before
            self._at(f"gathered for the backward of the {point.name}", Phase.BACKWARD, gathering, lines, beside)

    def _place_at_head(self, point: BackwardPoint) -> int:
        """Return the index of a point in the trace's figures of the head."""
        if self.gathered.modules:
            return _OF_HEAD[point.place.at]
        return 0 if not point.gradients else 1 if point.gradients == point.current_gradient else 2

    def _held_at_head(self, point: BackwardPoint) -> int:
        gathered = self.gathered
        if gathered.head_notes:
            return _held(gathered.head_notes, point.gradients, point.current_gradient, ahead=False, apart=False)
        at = self._place_at_head(point)
        if self._gathers_apart:
            return gathered.head_runs[at]
        return max(gathered.head_runs[at], gathered.head[at] - point.current_gradient)

    def _unreduced_before(self, point: BackwardPoint) -> Lines:
        """Return the gradients after the blocks, except the current one, that wait for a reduction without a contiguous bucket."""
        if self.job.recipe.deepspeed.contiguous_gradients:
            return ()
        elements = self._unreduced(self.these.n_blocks, point) - point.current_gradient
        return (gradient_line(self.job, elements, "gradients that wait to be reduced"),)

    def _past_head(self, made: int) -> None:
        """Write the gather of the final norm's parameters while a gradient too large for the bucket waits."""
        at_head = self.these.n_blocks
        waits = self._waiting(at_head, _NOWHERE._replace(gradients=made))
        self._enter(at_head)
        lines = (*running_lines(self.these, at_head, made), *self.tied)
        self._at("gathered for the final norm's backward", Phase.BACKWARD, self.gathered.head[2], lines, waits)

    # --- blocks, backward ---------------------------------------------------------------------------------------------------

    def frozen_block_backward(self, one: KindPass) -> None:
        """Write each point of blocks with frozen weights."""
        for point in one.block.points:
            current = point.current_gradient
            for block, held, gathering in highest_places(self.gathered, one.blocks, point.place, current):
                self._enter(block)
                around = (*self._waiting(block, point), *self.tied)
                name = f"backward of a block: {point.name}"
                self._at(name, Phase.BACKWARD, held, (*around, *point.lines))
                if gathering > held:
                    self._at(f"gathered for the {name}", Phase.BACKWARD, gathering, (*around, *point.before))

    def block_backward(self, one: KindPass) -> None:
        """Write each point, and the gather of the experts before their first point."""
        experts = next((point.gradients for point in one.block.points if point.place.at is At.WEIGHTING), None)
        self._gather_again(one)
        inside, checkpoint = list[tuple[str, tuple[Lines, ...]]](), checkpoint_beside(one)
        for point in one.block.points:
            before = point.gradients - point.current_gradient
            weighting = point.place.at is At.WEIGHTING
            place = point.gradients, point.current_gradient, weighting, before == experts
            for block, held in self._highest(one, place, point):
                if self.later is not None and self.later.is_above(block, held, place):
                    continue
                stays = staying_lines(self.job, block, before) if self._swaps else ()
                beside = (*self._waiting(block, point), *self.tied, *stays)
                inside += ((point.name, (self._kept[block], checkpoint, point.lines, self._gathered[held], beside)),)
            if weighting:
                self._pass_through(inside, checkpoint)
                self._gather_experts(one, point)
                inside = []
        self._pass_through(inside, checkpoint)

    def _pass_through(self, points: list[tuple[str, tuple[Lines, ...]]], checkpoint: Lines) -> None:
        """Write points of blocks' backward, each with its block's checkpoint and what the blocks before it keep."""
        self.trace.drop("kept", "checkpoint")
        self.trace.pass_through(Inside(points), *self._named("backward of a block", Phase.BACKWARD))
        self.trace.hold("checkpoint", *checkpoint)

    def _gather_again(self, one: KindPass) -> None:
        """Write the gathers of a recomputation, with what it has saved until then."""
        if one.recompute != "full":
            return
        makers, incoming = [line.tag.module.value for line in one.block.saved], incoming_gradient(self.these)
        waits = tuple([self._waiting_elements(block) for block in one.blocks])
        for comes, block, held in _highest_again(self.gathered, one.blocks, waits):
            made = next((at for at, maker in enumerate(makers) if maker in comes), len(makers)) if comes else 0
            self._enter(block)
            beside = (*self._waiting(block, _NOWHERE), *self.tied, *staying_lines(self.job, block, 0))
            lines = (incoming, *one.block.saved[:made])
            self._at("gathered for a block's recomputation", Phase.BACKWARD, held, lines, beside)

    def _highest(self, one: KindPass, at: _Place, point: BackwardPoint) -> _Highest:
        """Return the blocks of a kind with most gathered, including gradients that wait outside a bucket."""
        blocks, backward = one.blocks, self.gathered.backward
        if self.job.recipe.deepspeed.contiguous_gradients:
            found = _highest_blocks(self.gathered, blocks, at)
            return self._with_ends(one, found, at) if self._swaps else found
        most = rising(blocks, lambda block: _held(backward[block], *at) + self._unreduced(block, point))
        return self._with_ends(one, tuple((block, _held(backward[block], *at)) for block, _ in most), at)

    def _with_ends(self, one: KindPass, found: _Highest, at: _Place) -> _Highest:
        """Add both ends of every stretch of equal blocks if gradients stay on the GPU.

        Along a stretch they grow evenly towards the first block, as activations shrink.
        """
        if not self._swaps:
            return found
        ends = self.these.order.ends[self.these.order.of_block[one.last]]
        every = {block: _held(self.gathered.backward[block], *at) for block in ends} | dict(found)
        return tuple(sorted(every.items(), reverse=True))

    def _gather_experts(self, one: KindPass, first: BackwardPoint) -> None:
        """Write the gather of experts for their backward, before its ``first`` point has made anything."""
        made = first.gradients
        at, point = (made, _GATHERING, True, True), _NOWHERE._replace(gradients=made)
        for block, held in self._highest(one, at, point):
            waits = self._waiting(block, point)
            self._enter(block)
            beside = (*waits, *self.tied, *staying_lines(self.job, block, made))
            self._at("experts gathered for their backward", Phase.BACKWARD, held, first.before, beside)

    def _waiting(self, block: int, point: BackwardPoint) -> Lines:
        """Return gradients outside the bucket: the one being made, and those that wait with it."""
        job = self.job
        if job.recipe.deepspeed.contiguous_gradients:
            return (waiting(job.buckets, job.element, block, point.gradients, point.current_gradient),)
        return (gradient_line(job, self._unreduced(block, point), "gradients that wait to be reduced"),)

    def _waiting_elements(self, block: int) -> int:
        """Return the elements of gradients of later blocks that wait outside the bucket when a block's backward begins."""
        if self.job.recipe.deepspeed.contiguous_gradients:
            return waiting_elements(self.job.buckets, block, 0)[0]
        return self._unreduced(block, _NOWHERE)

    def _unreduced(self, block: int, point: BackwardPoint) -> int:
        """Return the elements of gradients that wait outside any bucket. A tied head's waits for the embedding's first."""
        job, gradients = self.job, point.gradients
        if block == job.whole.n_blocks and has_tied_head(job.whole):
            gradients = max(point.current_gradient, gradients - embedding_elements(job.whole))
        return unreduced_elements(job.buckets, block, gradients, point.current_gradient)

    # --- buckets, and the end -----------------------------------------------------------------------------------------------

    def reduce_buckets(self) -> None:
        """Write the buckets that are reduced during the backward."""
        job, these = self.job, self.these
        for flush, held in highest_flushes(job.buckets, job.trace, gradient_counts(these), self.taken):
            self.trace.hold("shared", *shared_at(these, flush.block))
            self._enter(max(flush.block, 0))
            tied = self.tied if flush.block >= 0 else ()  # the embedding's gradient includes it from its arrival on
            beside = (*reduce_lines(job, flush), *tied, *staying_until(job, flush))
            self._at("bucket reduced during the backward", Phase.BACKWARD, held, running_at(job, these, flush), beside)

    def end_of_backward(self) -> None:
        """Write the embedding's gradient, and the last bucket."""
        trace, job, head, phase = self.trace, self.job, self.these.head, Phase.BACKWARD
        trace.hold("shared", *head.at_embedding)
        trace.hold("kept")
        elements, flowing = embedding_elements(job.whole), (flowing_at_embedding(self.these), *head.below_blocks)
        embedding = gradient_line(job, elements, "gradient of the embedding", embedding_symbol(job.whole) if elements else "")
        below = sum([made for _, made in operators_below(job.whole)[:-1]])
        waits = self._waiting(-1, _NOWHERE._replace(gradients=below))
        gradients, stay, end = (*waits, embedding, *self.tied), staying_lines(job, -1, -1), self.gathered.end
        if not head.below:
            made = 0
            for (label, of_one), note in zip(operators_below(job.whole)[:-1], self.gathered.below, strict=False):
                waiting_then = self._waiting(-1, _NOWHERE._replace(gradients=made))
                name = f"gathered for the backward before the blocks{label}"
                self._at(name, phase, note.gathering, flowing, (*waiting_then, *self.tied))
                made += of_one
        for operator, point in operators_of(self.these, operators_below(job.whole)) if head.below else ():
            note = self.gathered.below[operator]
            beside = (*self._waiting(-1, point), *self.tied, *stay)
            held = note.during if point.current_gradient else note.gathering
            self._at(f"backward before the blocks: {point.name}", phase, held, point.lines, beside)
        self._at("embedding gathered for its backward", phase, self.gathered.embedding, flowing, (*waits, *self.tied))
        self._at("backward of the embedding", phase, end, flowing, (*gradients, *stay))
        if job.recipe.keeps_gathered_linears and has_tied_head(job.whole):
            # DeepSpeed's own linear gives autograd a tensor to which the embedding's gradient is added; torch's gives a view
            reason = "sum of the embedding's and the tied head's"
            total = gradient_line(job, elements, reason, embedding_symbol(job.whole))._replace(source=INPUT_BUFFER)
            self._at(f"{reason} gradient", phase, end, (), (*stay, *gradients, total))
        self._at("end of backward: last bucket reduced", phase, end, (), (*stay, *reduce_lines(job, job.buckets.flushes[0])))
        trace.hold("output")


@lru_cache(maxsize=256)
def _highest_forward(gathered: Gathered, blocks: tuple[int, ...], *, before_experts: bool = False) -> _Highest:
    most = gathered.before_experts if before_experts else gathered.forward
    return rising(blocks, most.__getitem__)


@lru_cache(maxsize=256)
def _highest_again(
    gathered: Gathered, blocks: tuple[int, ...], waits: tuple[int, ...]
) -> tuple[tuple[frozenset[str], int, int], ...]:  # fmt: skip
    """Return the gathers of recomputations that take more than every later one: the modules to come, the block, the elements.

    Before the first module nothing is to come. ``waits``: the elements of gradients that wait when each block begins.
    """
    names, beside = [name for name, _ in gathered.again[blocks[-1]]], dict(zip(blocks, waits, strict=True))
    chosen, most = list[tuple[frozenset[str], int, int]](), 0
    for at in range(len(names) - 1, -1, -1):
        comes = frozenset(names[at:]) if at else frozenset[str]()
        highest = rising(blocks, {block: gathered.again[block][at][1] + beside[block] for block in blocks}.__getitem__)
        chosen += [(comes, block, held - beside[block]) for block, held in highest if held > most]
        most = max(most, highest[-1][1])
    return tuple(chosen)


@lru_cache(maxsize=4096)
def _least_held(traces: tuple[Gathered, ...], block: int, at: _Place) -> int:
    return min(_held(one.backward[block], *at) for one in traces)


@lru_cache(maxsize=4096)
def _highest_blocks(gathered: Gathered, blocks: tuple[int, ...], at: _Place) -> _Highest:
    notes = {id(gathered.backward[block]): gathered.backward[block] for block in blocks}
    held = {shared: _held(some, *at) for shared, some in notes.items()}
    return rising(blocks, lambda block: held[id(gathered.backward[block])])


def _held(notes: tuple[Note, ...], gradients: int, current: int, ahead: bool, apart: bool) -> int:  # noqa: FBT001  hashed as a tuple above
    """Return the elements gathered at a point after this many gradients, ``current`` elements of which are being made.

    ``ahead``: the running module has no gradient yet. While parameters are gathered, their module has no gradient: a moment
    ``apart``, or one with the point's lines. Saved tensors of the module's parameters are freed as their gradients are made.
    """
    at = next((at for at, note in enumerate(notes) if note.made >= gradients + ahead), len(notes) - 1)
    note, before = notes[at], notes[at - 1].made if at else 0
    if current == _GATHERING:
        return note.gathering
    freed = min(max(gradients - current - before, 0), note.during - note.handing)
    if current:
        return max(note.during - freed, note.gathering - current if gradients - current <= before and not apart else 0)
    return note.during - freed if note.made > gradients else note.after
