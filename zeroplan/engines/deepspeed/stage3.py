"""What does a rank hold under DeepSpeed's ZeRO-3 (``DeepSpeedZeroOptimizer_Stage3``)?

Every parameter is split on its own, each rank holding ``ceil(numel/N)`` elements of it; what a module needs is gathered before
it runs. Gradients go through one bucket that is reduce-scattered in a copy of its own.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from zeroplan.engines.account import Account, Symbol
from zeroplan.engines.deepspeed.adapted import before_its_gradient, highest_places
from zeroplan.engines.deepspeed.buckets import Flush, Schedule, leaf_elements, schedule
from zeroplan.engines.deepspeed.coordinator import gathered, gathered_by_several
from zeroplan.engines.deepspeed.flat import (
    Row,
    Sizes,
    embedding_elements,
    embedding_symbol,
    has_tied_head,
    largest_parameter,
    row,
    shares,
    trained_row,
)
from zeroplan.engines.deepspeed.infinity import (
    Shares,
    beside_swapped,
    note_on_nvme,
    nvme_lines,
    on_nvme,
    refuse_few_buffers,
    refuse_few_pipelined,
    refuse_twice,
    staying,
    staying_of,
    swaps_optimizer,
)
from zeroplan.engines.deepspeed.notes import Gathered, Note
from zeroplan.engines.deepspeed.numbers import numbers_sharded
from zeroplan.engines.deepspeed.offload import (
    kept_as,
    note,
    offloads_optimizer,
    offloads_parameters,
    on_host,
)
from zeroplan.engines.deepspeed.passes import (
    GradientCounts,
    Instant,
    Passes,
    RunPass,
    around_block,
    embedding_instant,
    forward_instant,
    gradient_counts,
    head_forward_instant,
    head_gathering_instant,
    head_instants,
    kept_before,
    kept_in_a_block,
    kept_symbols,
    loss_instant,
    passes,
    place_in_block,
    running_lines,
    shared_at,
)
from zeroplan.engines.deepspeed.quantized import sharing_of
from zeroplan.engines.deepspeed.quantized_gradients import (
    Split,
    beside_quantized,
    quantized_collectives,
    quantized_line,
    unless_quantized,
)
from zeroplan.engines.deepspeed.secondary import second_partition, within_group
from zeroplan.engines.deepspeed.stage3_offload import (
    beside_flushes,
    host_lines,
    host_symbols,
    on_the_way,
    states_on_gpu,
)
from zeroplan.engines.deepspeed.stage12_lines import waiting
from zeroplan.engines.formulas import product, times, unless_zero
from zeroplan.engines.optimizers import LocalTensor, counted, state_lines, step_temporary_lines
from zeroplan.engines.precisions import widths
from zeroplan.ledger import Collective, Kind, Line, Moment, Phase
from zeroplan.numeric import Bool, Int, ceil_div, for_each_value, where
from zeroplan.spec.batch import Batch
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import OptimizerImpl, RecipeSpec
from zeroplan.transformer.blocks import BackwardPoint
from zeroplan.transformer.params import layout

_STAGE3 = "DeepSpeed 0.19.8, runtime/zero/stage3.py"
_GATHER = "DeepSpeed 0.19.8, runtime/zero/partition_parameters.py"
_COORDINATOR = "DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py"
_MASTER = f"{_STAGE3}, _create_fp32_partitions"
_GRADIENTS = f"{_STAGE3}, grad_partitions_flat_buffer"
_ZEROS = f"{_STAGE3}, initialize_optimizer_states"
_PERSISTENT = f"{_STAGE3}, _post_step"
_SCATTER = "DeepSpeed 0.19.8, runtime/comm/coalesced_collectives.py, reduce_scatter_coalesced"
_CAST = f"{_STAGE3}, __avg_scatter_grads"
_FP64 = 8
_SCALE = 4
"""Bytes of the scale of a group of weights in 8 bits."""


#: The point in the backward of experts before any of their gradients is made.
_BEFORE_GRADIENTS = "weighting of the expert outputs"
_MADE_FIRST = ("gradients of the weighted outputs", "gradient of the expert outputs", "gradient of the routing weights")
#: How the lines begin that experts make forward.
_MADE_BY_EXPERTS = ("experts: ", "tokens sorted by expert", "weighted expert outputs")
_GATHERING = -1
"""Stands, in place of the elements being made, for the moment at which the module is gathered (:func:`_held`)."""


_OF_HEAD = {"loss": 0, "head": 1, "final norm": 2}
"""Where in the trace's figures of the head a point is, where no gradients tell."""


class _Job(NamedTuple):
    whole: Row
    """What is trained."""
    every: Row
    """That and what is frozen, which is shared out and gathered too."""
    recipe: RecipeSpec
    n_ranks: Int
    element: int
    """Bytes of a weight and of a gradient in the compute dtype."""
    master: int
    """Bytes of an element of the weights that the optimizer updates."""
    kept: int
    """Bytes of an element of a gradient kept for the step."""
    partition: Int
    buckets: Schedule
    trace: Gathered
    applies: Bool
    """Whether the number of micro-batches is the one that ``trace`` belongs to."""


def sharded_account(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch, impl: OptimizerImpl) -> Account:
    """Answer for stage 3.

    Leaves out: leaf modules, the padding of a gathered parameter (fewer than N elements each).
    """
    job = _job(model, recipe, mesh)
    everything = _states(job, impl)
    states = (*states_on_gpu(recipe, everything), *layout(model).buffers)
    refuse_few_pipelined(recipe, _groups(job))
    persistent = (*states, _bucket(job), _persistent(job))
    these = passes(model, recipe, batch)
    running = [moment for each in _by_micro_batches(job, batch) for moment in (*_forward(each, these), *_backward(each, these))]
    training = tuple(Moment(name, phase, persistent + lines) for name, phase, lines in running)
    taken = _step_temporaries(job, impl)
    steps = _step_away(job) if offloads_optimizer(recipe) else _step(job, taken)
    second = second_partition(recipe, job.element, job.partition, job.n_ranks)
    step = tuple(Moment(name, phase, (*states, _bucket(job), *second, *lines)) for name, phase, lines in steps[:-1])
    step += tuple(Moment(name, phase, (*states, _bucket(job), *lines)) for name, phase, lines in steps[-1:])
    mine = Shares(job.whole, job.n_ranks, job.partition, job.element, job.master, job.kept)
    return Account(
        (*states, _bucket(job), _persistent(job)),
        (*_init(job, states), *training, *step),
        _collectives(job, batch),
        host=host_lines(recipe, mine, everything, taken),
        symbols=(*_symbols(job), *host_symbols(recipe, mine), *kept_symbols(these), *counted(*everything, *taken)),
        notes=(*note(recipe), *note_on_nvme(recipe)),
        nvme=nvme_lines(recipe, mine),
        kept=kept_in_a_block(these),
    )


def _symbols(job: _Job) -> tuple[Symbol, ...]:
    trained = "" if job.every is job.whole else " that is trained"
    return (
        *(() if job.every is job.whole else _of_frozen(job)),
        Symbol("G_r", job.partition, f"elements of this rank's share: ceil(elements/N) of every parameter{trained}"),
        Symbol("G_g", _largest_group(job), "elements that one step of the optimizer takes: whole shares, up to sub_group_size"),
        Symbol("B", job.recipe.deepspeed.reduce_bucket_size, "reduce_bucket_size"),
        Symbol("G_max", largest_parameter(job.every), "elements of the largest parameter"),
        Symbol("G_first", job.every.placed[0].end, "elements of the first parameter"),
        Symbol("G_keep", job.trace.persistent, "elements of the parameters below stage3_param_persistence_threshold"),
    )


def _of_frozen(job: _Job) -> tuple[Symbol, ...]:
    return (
        Symbol("G_w", shares(_numels(job.every), job.n_ranks), "elements of this rank's share of all parameters"),
        Symbol("G_one", largest_parameter(job.whole), "elements of the largest parameter that is trained"),
    )


def _job(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh) -> _Job:
    width = widths(recipe.precision)
    sums_in_fp32 = recipe.deepspeed.grad_accum_dtype == "fp32"
    every, whole = row(model), trained_row(model)
    return _Job(
        whole,
        every,
        recipe,
        mesh.dp_shard,
        width.compute,
        width.stored,
        4 if sums_in_fp32 else width.compute,
        shares(_numels(whole), mesh.dp_shard),
        schedule(whole, recipe.deepspeed.reduce_bucket_size, leaves=True),
        _trace(every, recipe, mesh.dp_shard, of=gathered),
        applies=True,
    )


_Replayed: TypeAlias = Callable[..., Gathered]


def _trace(whole: Row, recipe: RecipeSpec, n_ranks: Int, *, of: _Replayed) -> Gathered:
    """What is gathered with a single micro-batch per step, or with several."""
    options, disk = recipe.deepspeed, on_nvme(whole, recipe.deepspeed, widths(recipe.precision).compute, n_ranks)
    found = of(whole, options, recipe.recompute, sharing_of(recipe, n_ranks), disk)
    if disk:
        refuse_few_buffers(options, found.most_read)
        refuse_twice(found.read_twice)
    return found


def _several(job: _Job, micro: Int) -> Gathered:
    """What is gathered with several micro-batches per step, which takes twice as long to find; the single one's for one."""
    if isinstance(micro, int) and micro == 1:
        return job.trace
    return _trace(job.every, job.recipe, job.n_ranks, of=gathered_by_several)


def _by_micro_batches(job: _Job, batch: Batch) -> tuple[_Job, ...]:
    """Return the job with the trace of a single micro-batch per step, and that of several where it differs."""
    several = _several(job, batch.grad_accum_steps)
    if several is job.trace:
        return (job,)
    more = batch.grad_accum_steps > 1
    return job._replace(applies=batch.grad_accum_steps == 1), job._replace(trace=several, applies=more)


@lru_cache(maxsize=256)
def _numels(whole: Row) -> tuple[tuple[int, int], ...]:
    """Sizes of parameters that occur, and how often."""
    counts: dict[int, int] = {}
    for each in whole.placed:
        numel = each.end - each.start
        counts[numel] = counts.get(numel, 0) + 1
    return tuple(counts.items())


def _gathered_line(job: _Job, elements: int) -> Line:
    """Gathered parameters; a single rank gathers nothing."""
    n_bytes = _unless_alone(job, where(job.applies, job.element * elements, 0))
    formula = _gathered_formula(job.element, elements, _if_several(job)) if job.applies is not False else "0"
    return Line(Kind.GATHER, n_bytes, "gathered parameters, and flat gathers not yet used up", formula, _COORDINATOR)


@lru_cache(maxsize=4096)
def _gathered_formula(width: int, elements: int, if_several: str) -> str:
    return f"{width}·{elements}{if_several}"


def _unless_alone(job: _Job, n_bytes: Int) -> Int:
    """A single rank gathers nothing, but fetches what is in host memory."""
    return n_bytes if offloads_parameters(job.recipe) else where(job.n_ranks > 1, n_bytes, 0)


def _if_several(job: _Job) -> str:
    return "" if offloads_parameters(job.recipe) else "·min(1, N-1)"


def _states(job: _Job, impl: OptimizerImpl) -> tuple[Line, ...]:
    share, symbol = job.partition, "G_r" if job.every is job.whole else "G_w"
    held = share if job.every is job.whole else shares(_numels(job.every), job.n_ranks)
    weights = Line(
        Kind.PARAMETERS, job.element * held, "this rank's share of each parameter", times(job.element, symbol), _STAGE3
    )
    reason = "this rank's share of the weights once more, as the optimizer updates them"
    master = Line(Kind.OPTIMIZER_STATE, job.master * share, reason, times(job.master, "G_r"), _MASTER)
    gradients = Line(Kind.GRADIENTS, job.kept * share, "this rank's share of the gradients", times(job.kept, "G_r"), _GRADIENTS)
    tensors = (LocalTensor((share,), in_block=False),)
    optimizer = state_lines(job.recipe.optimizer, kept_as(job.recipe, impl), tensors, job.master, symbol="G_r")
    return (weights, master, gradients, *optimizer)


def _bucket(job: _Job) -> Line:
    options = job.recipe.deepspeed
    elements = options.reduce_bucket_size if options.contiguous_gradients else 0
    formula = times(job.element, "B") if options.contiguous_gradients else "0"
    return Line(Kind.REDUCE, job.element * elements, "reduce bucket, reduce_bucket_size, kept for good", formula, _STAGE3)


def _persistent(job: _Job) -> Line:
    n_bytes = _unless_alone(job, job.element * job.trace.persistent)
    reason = "parameters below the persistence threshold, gathered from step to step"
    return Line(Kind.GATHER, n_bytes, reason, times(job.element, f"G_keep{_if_several(job)}"), _PERSISTENT)


def _forward(job: _Job, these: Passes) -> tuple[Moment, ...]:
    """Return the moments of the forward: of each kind of block the last one, and earlier ones where more is gathered."""
    moments: list[Moment] = []
    for run in these.runs:
        for block, held in _highest_forward(job.trace.forward, run.first, run.n_blocks):
            at = forward_instant(these, run, block)
            moments.append(Moment(at.name, at.phase, (*at.lines, _gathered_line(job, held))))
        if job.trace.before_experts[run.first]:
            moments += _experts_first_gathered(job, these, run)
    before, head, loss = head_gathering_instant(these), head_forward_instant(these), loss_instant(these)
    return (
        *moments,
        Moment(before.name, before.phase, (*before.lines, _gathered_line(job, job.trace.head_gathering))),
        Moment(head.name, head.phase, (*head.lines, _gathered_line(job, job.trace.head_forward))),
        Moment(loss.name, loss.phase, (*loss.lines, _gathered_line(job, job.trace.loss))),
    )


def _experts_first_gathered(job: _Job, these: Passes, run: RunPass) -> Iterator[Moment]:
    """Return the moments at which experts are gathered for their forward, before they have made anything."""
    for block, held in _highest_forward(job.trace.before_experts, run.first, run.n_blocks):
        at = forward_instant(these, run, block)
        lines = tuple(line for line in at.lines if not line.reason.startswith(_MADE_BY_EXPERTS))
        yield Moment("experts gathered for their forward", at.phase, (*lines, _gathered_line(job, held)))


@lru_cache(maxsize=256)
def _highest_forward(most: tuple[int, ...], first: int, n_blocks: int) -> tuple[tuple[int, int], ...]:
    """Return the last block, and earlier ones where more is gathered in the forward; with the elements gathered."""
    chosen: list[tuple[int, int]] = []
    for block in range(first + n_blocks - 1, first - 1, -1):
        held = most[block]
        if not chosen or held > chosen[-1][1]:
            chosen.append((block, held))
    return tuple(chosen)


def _gradient(job: _Job, elements: int, reason: str, symbol: str = "") -> Line:
    formula = times(job.element, symbol) if symbol else product(job.element, elements)
    return Line(Kind.UNSHARDED_GRADIENTS, job.element * elements, reason, formula, _STAGE3)


def _tied_head(job: _Job) -> tuple[Line, ...]:
    if not has_tied_head(job.whole):
        return ()
    elements = embedding_elements(job.whole)
    return (_gradient(job, elements, "gradient of the tied head, waiting for the embedding's", embedding_symbol(job.whole)),)


def _backward(job: _Job, these: Passes) -> tuple[Moment, ...]:
    return (
        *_head(job, these),
        *(moment for run in these.runs for moment in (_adapted_blocks if job.trace.modules else _blocks)(job, these, run)),
        *(
            _flush(job, these, flush)
            for flush in _highest_flushes(job.buckets, job.trace, gradient_counts(these), _beside(job))
        ),
        *_end(job, these),
    )


def _head(job: _Job, these: Passes) -> Iterator[Moment]:
    for at in head_instants(these):
        first = at.point.gradients == at.point.current_gradient
        held = (
            _held_at_head(job.trace, at.point)
            if job.trace.head_notes
            else job.trace.head[
                _OF_HEAD[at.point.name] if job.trace.modules else 0 if not at.point.gradients else 1 if first else 2
            ]
        )
        tied = _tied_head(job) if at.point.gradients and not first else ()
        made = _gradient(job, at.point.current_gradient, "gradient just made")
        yield Moment(at.name, at.phase, (*at.lines, _gathered_line(job, held), made, *tied))
        if first and at.point.gradients and not job.trace.head_notes:
            yield _past_head(job, these, at.point.gradients)


def _held_at_head(trace: Gathered, point: BackwardPoint) -> int:
    return _held(trace.head_notes, point.gradients, point.current_gradient, ahead=False, apart=False)


def _past_head(job: _Job, these: Passes, made: int) -> Moment:
    """Return the moment after the head: what the final norm needs is gathered while a gradient too large for the bucket waits."""
    waits = waiting(job.buckets, job.element, these.n_blocks, made, 0)
    running = running_lines(these, these.n_blocks, made)
    around = (*these.head.shared, *these.output, kept_before(these, these.n_blocks), *running, *_tied_head(job))
    return Moment(
        "gathered for the final norm's backward", Phase.BACKWARD, (*around, _gathered_line(job, job.trace.head[2]), waits)
    )


@lru_cache(maxsize=4096)
def _highest_blocks(
    trace: Gathered, first: int, n_blocks: int, at: tuple[int, int, bool, bool]
) -> tuple[tuple[int, int], ...]:  # fmt: skip
    """Return the last block, and earlier ones where more is gathered, with the elements gathered, at a point (:func:`_held`)."""
    chosen: list[tuple[int, int]] = []
    for block in range(first + n_blocks - 1, first - 1, -1):
        held = _held(trace.backward[block], *at)
        if not chosen or held > chosen[-1][1]:
            chosen.append((block, held))
    return tuple(chosen)


def _held(notes: tuple[Note, ...], gradients: int, current: int, ahead: bool, apart: bool) -> int:  # noqa: FBT001  hashed as a tuple above
    """Return the elements gathered at a point after so many gradients, ``current`` elements of which are being made.

    ``ahead`` says that the module that runs has no gradient yet. While parameters are gathered, no gradient of their module is
    there, which is a moment ``apart``, or one with the point's lines. Of what the module's operators saved of its parameters, that
    is gone of which gradients are made.
    """
    at = next((at for at, note in enumerate(notes) if note.made >= gradients + ahead), len(notes) - 1)
    note, before = notes[at], notes[at - 1].made if at else 0
    if current == _GATHERING:
        return note.gathering
    gone = min(max(gradients - current - before, 0), note.during - note.handing)
    if current:
        return max(note.during - gone, note.gathering - current if gradients - current <= before and not apart else 0)
    return note.during - gone if note.made > gradients else note.after


def _adapted_blocks(job: _Job, these: Passes, run: RunPass) -> Iterator[Moment]:
    """Each point of the last block, and of earlier ones where more is gathered, where weights are frozen."""
    for point in run.block.points:
        current = point.current_gradient
        line = waiting(job.buckets, job.element, run.first, point.gradients, current)
        earlier = before_its_gradient(point)
        for block, held, gathering in highest_places(job.trace, run.first, run.n_blocks, point.name, current):
            around = (*around_block(these, run, block), line)
            yield Moment(
                f"backward of a block: {point.name}", Phase.BACKWARD, (*around, *point.lines, _gathered_line(job, held))
            )
            if gathering > held:
                lines = (*around, *earlier.lines, _gathered_line(job, gathering))
                yield Moment(f"gathered for the backward of a block: {point.name}", Phase.BACKWARD, lines)


def _blocks(job: _Job, these: Passes, run: RunPass) -> Iterator[Moment]:
    """Each point of the last block, and of earlier ones where more is gathered."""
    tied = _tied_head(job)
    beside: dict[int, tuple[Line, ...]] = {}
    experts = next((point.gradients for point in run.block.points if point.name == _BEFORE_GRADIENTS), None)
    for point in run.block.points:
        line = waiting(job.buckets, job.element, run.first, point.gradients, point.current_gradient)
        around = (line, *tied)
        apart = point.gradients - point.current_gradient == experts
        place = point.gradients, point.current_gradient, point.name == _BEFORE_GRADIENTS, apart
        highest = _highest_blocks(job.trace, run.first, run.n_blocks, place)
        for block, held in highest if not swaps_optimizer(job.recipe) else _and_first(job.trace, run, highest, place):
            if block not in beside:
                beside[block] = around_block(these, run, block)
            stay = _staying(job, block, point.gradients - point.current_gradient)
            lines = (*beside[block], *point.lines, _gathered_line(job, held), *around, *stay)
            yield Moment(f"backward of a block: {point.name}", Phase.BACKWARD, lines)
        if point.name == _BEFORE_GRADIENTS:
            yield from _experts_gathered(job, these, run, point)


def _and_first(
    trace: Gathered, run: RunPass, highest: tuple[tuple[int, int], ...], at: tuple[int, int, bool, bool]
) -> tuple[tuple[int, int], ...]:  # fmt: skip
    """Add the first block: gradients that stay on the GPU grow towards it, block by block, as activations grow less."""
    if highest[-1][0] == run.first:
        return highest
    return (*highest, (run.first, _held(trace.backward[run.first], *at)))


def _experts_gathered(job: _Job, these: Passes, run: RunPass, first: BackwardPoint) -> Iterator[Moment]:
    """Return the moments at which experts are gathered for their backward, before its ``first`` point has made anything."""
    kept = tuple(line for line in first.lines if not line.reason.startswith(_MADE_FIRST))
    waits = waiting(job.buckets, job.element, run.first, first.gradients, 0)
    for block, held in _highest_blocks(job.trace, run.first, run.n_blocks, (first.gradients, _GATHERING, True, True)):
        stay = _staying(job, block, first.gradients)
        lines = (*around_block(these, run, block), *kept, _gathered_line(job, held), waits, *_tied_head(job), *stay)
        yield Moment("experts gathered for their backward", Phase.BACKWARD, lines)


@lru_cache(maxsize=256)
def _highest_flushes(
    buckets: Schedule, trace: Gathered, counts: GradientCounts, beside: tuple[tuple[int, ...], ...]
) -> tuple[tuple[Flush, int], ...]:
    """Reduced buckets that take more than every earlier one at the same place of a block, with what is gathered then.

    Earlier ones find as much running there, and more kept by the blocks before.
    """
    chosen: list[tuple[Flush, int]] = []
    heaviest: dict[tuple[int, ...], int] = {}
    for index in range(len(buckets.flushes) - 1, 0, -1):
        flush = buckets.flushes[index]
        held = _gathered_at(trace, flush)
        alone = held + flush.fill * (1 + flush.alone) + flush.arriving
        place = place_in_block(counts, flush.block, flush.made)
        heavier = False
        for way, elements in enumerate(beside[index] if beside else (0,)):
            heavier = heavier or alone + elements > heaviest.get((way, *place), -1)
            heaviest[(way, *place)] = max(heaviest.get((way, *place), -1), alone + elements)
        if heavier:
            chosen.append((flush, held))
    return tuple(chosen)


def _beside(job: _Job) -> tuple[tuple[int, ...], ...]:
    if swaps_optimizer(job.recipe):
        return beside_swapped(job.buckets, job.element, job.kept, job.master)
    if offloads_optimizer(job.recipe):
        return beside_flushes(job.buckets, job.element)
    if not job.recipe.deepspeed.zero_quantized_gradients:
        return ()
    ranks = job.n_ranks if isinstance(job.n_ranks, int) else int(job.n_ranks.min())
    split = Split(ranks, job.recipe.deepspeed.gpus_per_node, job.element, job.kept)
    return beside_quantized(job.buckets, split) if split.nodes > 1 else ()


def _staying(job: _Job, *at: int) -> tuple[Line, ...]:
    """Gradients that wait on the GPU since their buckets were reduced: all, or those before a block and a place in it."""
    if not swaps_optimizer(job.recipe):
        return ()
    if at:
        return staying(job.buckets, (at[0], at[1]), job.n_ranks, job.master)
    return staying_of(job.buckets, len(job.buckets.flushes), job.n_ranks, job.master)


def _gathered_at(trace: Gathered, flush: Flush) -> int:
    if flush.block < 0:
        return trace.end
    notes = trace.head_notes if flush.block >= len(trace.backward) else trace.backward[flush.block]
    if not notes:
        return trace.past_head
    made = flush.made + (trace.tied_head if notes is trace.head_notes else 0)
    note = next((note for note in notes if note.made >= made), notes[-1])
    return note.handing if note.made == made else note.during


def _reduce_lines(job: _Job, flush: Flush) -> tuple[Line, ...]:
    """Return what reducing a bucket takes: a copy in the order of the ranks, unless it is one gradient that divides evenly."""
    options = job.recipe.deepspeed
    held = flush.fill if flush.alone or not options.contiguous_gradients else 0
    share = shares(flush.sizes, job.n_ranks)
    copied = where(flush.fill % job.n_ranks == 0, 0, share * job.n_ranks) if flush.single else share * job.n_ranks
    if not options.reduce_scatter and options.contiguous_gradients and not flush.alone:
        copied = 0
    copy_formula, cast_formula = _reduce_formulas(job.element, job.kept, flush.sizes)
    cast = job.kept * share if job.kept != job.element else 0
    quantized = job.recipe.deepspeed.zero_quantized_gradients
    if quantized:
        copied, cast = (unless_quantized(job.recipe, job.n_ranks, n_bytes) for n_bytes in (copied, cast))
    return (
        _gradient(job, held + flush.arriving, "gradient that does not fit into the bucket"),
        Line(Kind.REDUCE, job.element * copied, "copy of the bucket that is reduce-scattered",
             unless_zero(copied, copy_formula), _SCATTER),
        Line(Kind.TEMPORARY, cast, "reduced gradients cast to fp32", unless_zero(cast, cast_formula), _CAST),
        *((_quantized(job, flush),) if quantized else ()),
        *on_the_way(job.recipe, job.buckets, flush, job.n_ranks, kept=job.kept, master=job.master),
    )  # fmt: skip


def _quantized(job: _Job, flush: Flush) -> Line:
    at = job.buckets.flushes.index(flush)
    return quantized_line(job.recipe, job.buckets, at, job.n_ranks, element=job.element, kept=job.kept)


@lru_cache(maxsize=4096)
def _reduce_formulas(element: int, kept: int, sizes: Sizes) -> tuple[str, str]:
    share = " + ".join(f"{count}·ceil({numel}/N)" for numel, count in sizes)
    return f"{element}·N·({share})", f"{kept}·({share})"


def _flush(job: _Job, these: Passes, chosen: tuple[Flush, int]) -> Moment:
    flush, held = chosen
    activations = _running(job, these, flush)
    around = (*shared_at(these, flush.block), *these.output, kept_before(these, max(flush.block, 0)))
    tied = _tied_head(job) if flush.block >= 0 else ()  # taken in by the embedding's gradient when that arrives
    lines = (*around, *activations, _gathered_line(job, held), *_reduce_lines(job, flush), *tied)
    if swaps_optimizer(job.recipe):
        before = len(job.buckets.flushes) - 1 - job.buckets.flushes.index(flush)
        lines += staying_of(job.buckets, before, job.n_ranks, job.master)
    return Moment("bucket reduced during the backward", Phase.BACKWARD, lines)


def _running(job: _Job, these: Passes, flush: Flush) -> tuple[Line, Line]:
    """Return the activations of the block that runs; a leaf module hands on when all that flows out of it has been added up."""
    saved, flowing = running_lines(these, flush.block, flush.made)
    if flush.made != leaf_elements(job.whole, flush.block):
        return saved, flowing
    formula = f"{flowing.formula} - {these.head.hidden_formula}"
    return saved, flowing._replace(n_bytes=flowing.n_bytes - these.head.hidden_bytes, formula=formula)


def _end(job: _Job, these: Passes) -> tuple[Moment, ...]:
    """Return the moments of the embedding's gradient, and of the bucket that is left."""
    at: Instant = embedding_instant(these)
    last = job.buckets.flushes[0]
    elements = embedding_elements(job.whole)
    embedding = _gradient(job, elements, "gradient of the embedding", embedding_symbol(job.whole) if elements else "")
    held = _gathered_line(job, job.trace.end)
    around = (*these.head.at_embedding, *these.output, held, *_staying(job, -1, -1))
    gathering = _gathered_line(job, job.trace.embedding)
    return (
        Moment("embedding gathered for its backward", at.phase, (*at.lines, gathering, *_tied_head(job))),
        Moment(at.name, at.phase, (*at.lines, held, embedding, *_tied_head(job), *_staying(job, -1, -1))),
        Moment("end of backward: last bucket reduced", Phase.BACKWARD, (*around, *_reduce_lines(job, last))),
    )


def _largest_group(job: _Job) -> Int:
    """Elements of this rank's shares in the largest sub-group. [elements]"""
    size = job.recipe.deepspeed.sub_group_size
    return for_each_value(lambda n_ranks: max(_groups_of(job.whole, size, n_ranks)), job.n_ranks)


def _groups(job: _Job) -> Int:
    """How many sub-groups there are."""
    size = job.recipe.deepspeed.sub_group_size
    return for_each_value(lambda n_ranks: len(_groups_of(job.whole, size, n_ranks)), job.n_ranks)


@lru_cache(maxsize=4096)
def _groups_of(whole: Row, size: int, n_ranks: int) -> tuple[int, ...]:
    """Elements of this rank's shares in each sub-group.

    A group takes whole parameters, in their order, and is closed by the one whose share reaches ``size``. Source: DeepSpeed
    0.19.8, ``stage3.py``, ``_create_fp16_sub_groups``.
    """
    filled, groups = 0, list[int]()
    for each in whole.placed:
        filled += -((each.start - each.end) // n_ranks)
        if filled >= size:
            groups.append(filled)
            filled = 0
    return (*groups, filled) if filled else tuple(groups)


def _step_temporaries(job: _Job, impl: OptimizerImpl) -> tuple[Line, ...]:
    tensors = (LocalTensor((_largest_group(job),), in_block=False),)
    return step_temporary_lines(job.recipe.optimizer, impl, tensors, job.master, symbol="G_g")


def _step_away(job: _Job) -> tuple[Moment, ...]:
    """The CPU takes the step."""
    return (
        Moment("optimizer step: begun", Phase.STEP, (*_staying(job), _persistent(job))),
        Moment("optimizer step: on the CPU", Phase.STEP, _staying(job)),
        Moment("after the step: persistent parameters gathered", Phase.STEP, (_persistent(job),)),
    )


def _step(job: _Job, temporary: tuple[Line, ...]) -> tuple[Moment, ...]:
    """All parameters are released first; then norm, and one sub-group after the other."""
    part: Int = ceil_div(largest_parameter(job.whole), job.n_ranks)
    group = _largest_group(job)
    largest = "G_max" if job.every is job.whole else "G_one"
    norm = Line(Kind.OPTIMIZER_TEMPORARY, _FP64 * part, "largest share of a gradient in fp64", f"8·ceil({largest}/N)",
                f"{_STAGE3}, get_grad_norm_direct")  # fmt: skip
    flat = Line(
        Kind.OPTIMIZER_TEMPORARY, job.kept * group, "gradients of a sub-group, laid flat", times(job.kept, "G_g"), _STAGE3
    )
    taken = Line(Kind.GRADIENTS, job.master * group, "gradients of a sub-group, as the optimizer takes them",
                 times(job.master, "G_g"), f"{_STAGE3}, _prepare_fp32_grad_for_sub_group")  # fmt: skip
    return (
        Moment("gradient norm", Phase.STEP, (norm,)),
        Moment("optimizer step: gradients flattened", Phase.STEP, (flat, taken) if job.kept != job.master else (taken,)),
        Moment("optimizer step: update", Phase.STEP, (taken, *temporary)),
        Moment("after the step: persistent parameters gathered", Phase.STEP, (_persistent(job),)),
    )


def _init(job: _Job, states: tuple[Line, ...]) -> tuple[Moment, ...]:
    """Return the moments of construction: the model whole, or in pieces under ``zero.Init``; then the optimizer's tensors."""
    share = job.partition
    largest = job.element * largest_parameter(job.every)
    if job.recipe.deepspeed.zero_init:
        arrived = Line(
            Kind.PARAMETERS, largest, "largest parameter before it is split", times(job.element, "G_max"), f"{_GATHER}, Init"
        )
        model = Moment("initialisation: model built under zero.Init", Phase.INIT, (states[0], arrived))
    else:
        whole = Line(Kind.PARAMETERS, job.element * job.every.n_elements, "the whole model", f"{job.element}·Ψ", _GATHER)
        first = job.every.placed[0].end
        split = job.element * where(job.n_ranks > 1, ceil_div(first, job.n_ranks), largest_parameter(job.every))
        piece = "ceil(G_first/N)" if not isinstance(job.n_ranks, int) or job.n_ranks > 1 else "G_max"
        formula = times(job.element, piece)
        share_of_one = Line(Kind.PARAMETERS, split, "first share split off", formula, f"{_GATHER}, _partition_param")
        model = Moment("initialisation: model arrives whole", Phase.INIT, (whole, share_of_one))
    zeros = Line(Kind.GRADIENTS, job.master * share, "zero gradients of the share", times(job.master, "G_r"), _ZEROS)
    zeros = on_host(zeros) if offloads_optimizer(job.recipe) else zeros
    reason = "largest parameter, gathered to hook its gradient"
    one = Line(Kind.GATHER, largest, reason, times(job.element, "G_max"), f"{_STAGE3}, __init__")
    return (
        model,
        Moment("initialisation: optimizer", Phase.INIT, (*states[:2], zeros)),
        Moment("initialisation: gradient hooks", Phase.INIT, (*states[:3], _bucket(job), one)),
    )


def _collectives(job: _Job, batch: Batch) -> tuple[Collective, ...]:
    micro, n, element, trace = batch.grad_accum_steps, job.n_ranks, job.element, job.trace
    flushes = len(job.buckets.flushes)
    reduced = n * job.partition
    return (
        *_gathered_in_passes(job, micro),
        _all_gather(job, ("persistent parameters", "after the optimizer step"), _padded(trace.persistent_sent, n),
                    trace.n_persistent, 1, element),
        *quantized_collectives(job.recipe, job.whole, Collective(
            "reduce_scatter", "gradients, bucket by bucket", "in the backward of every micro-batch", n, flushes * micro,
            element * ceil_div(reduced, flushes), (n - 1) * element * job.partition * micro, reduced * micro,
            f"{_STAGE3}, __avg_scatter_grads", element * reduced * micro,
        ), micro, element=element),
        *numbers_sharded(job.recipe, n, _groups(job)),
    )  # fmt: skip


def _padded(sizes: Sizes, n_ranks: Int) -> Int:
    """Elements that parameters of these sizes take in a gather, where every rank's share of each is alike."""
    return n_ranks * shares(sizes, n_ranks)


def _gathered_in_passes(job: _Job, micro: Int) -> Iterator[Collective]:
    """All-gathers of every forward and backward: weights as they are or in 8 bits, and then their scales."""
    n, one, quantized = job.n_ranks, job.trace, job.recipe.deepspeed.zero_quantized_weights
    several = _several(job, micro)
    what, width = ("parameters in 8 bits", 1) if quantized else ("parameters", job.element)
    for direction, single, later in (
        ("forward", one.sent_forward, several.sent_forward),
        ("backward", one.sent_backward, several.sent_backward),
    ):
        when, forward = f"in every {direction}", direction == "forward"
        elements = where(micro > 1, _padded(later.sizes, n), _padded(single.sizes, n))
        gather = _all_gather(job, (what, when), elements, single.calls, micro, width)
        yield from within_group(job.recipe, gather, micro, forward=forward)
        if quantized:
            scales = where(micro > 1, later.scales, single.scales)
            beside = _all_gather(job, ("scales of the parameters", when), scales, single.calls, micro, _SCALE)
            yield from within_group(job.recipe, beside._replace(volume_elements=0), micro, forward=forward)


def _all_gather(
    job: _Job, names: tuple[str, str], elements: Int, calls: int, times: Int, width: int
) -> Collective:  # fmt: skip
    n, payload = job.n_ranks, width * elements * times
    each = width * ceil_div(elements, max(calls, 1))
    sent = (n - 1) * width * elements // n * times
    return Collective("all_gather", *names, n, calls * times, each, sent, elements * times, _COORDINATOR, payload)
