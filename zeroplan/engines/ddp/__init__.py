"""The memory and traffic of one GPU under ``DistributedDataParallel`` (stage 0), or with ``ZeroRedundancyOptimizer`` (stage 1).

Parameters, gradients and the reducer's buckets are whole on every rank. Stage 1 distributes the optimizer's states by whole
tensors. Mixed precision is ``torch.autocast`` over fp32 parameters during the forward and the loss, not during the backward.
Arguments are torch 2.13's defaults except the recipe's. Gradients are set to None after each step. The training loop drops the
loss's graph and the logits after the backward at the latest.

Leaves out the transient of the constructor's broadcast (never above parameters and buckets), scalars, and tensors of the
training loop itself.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache

from zeroplan.engines.account import Account, Symbol
from zeroplan.engines.ddp import lomo, shampoo_blocks
from zeroplan.engines.ddp.copies import are_narrow, in_fp32, optimizer_lines
from zeroplan.engines.ddp.reducer import levels_of, plan_of
from zeroplan.engines.ddp.step import Casts, Training
from zeroplan.engines.ddp.zero_redundancy import every_tensor, fullest_share
from zeroplan.engines.formulas import for_ranks, sized
from zeroplan.engines.frozen import ROUTED, frozen_lines, frozen_symbols
from zeroplan.engines.micro_batch import Lines
from zeroplan.engines.optimizers import (
    counted,
    implementation_of,
    managed_lines,
    state_lines,
    step_temporary_lines,
    whole_tensors,
)
from zeroplan.engines.outside import held_beside
from zeroplan.engines.passes import Passes, kept_in_a_block, kept_symbols, passes
from zeroplan.engines.pinned import with_offloaded_activations
from zeroplan.engines.precisions import compute_of, widths
from zeroplan.engines.published_optimizers import notes_of
from zeroplan.engines.rows import Row
from zeroplan.engines.shampoo import LONGEST
from zeroplan.engines.sources import ACCUMULATE
from zeroplan.ledger import Collective, Kind, Line, Moment, Phase
from zeroplan.numeric import Int, ceil_div, where
from zeroplan.spec.batch import Batch
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import LOMO, Optimizer, OptimizerImpl, RecipeSpec
from zeroplan.spec.releases import release_of
from zeroplan.trace import Moments, Trace, entry_of
from zeroplan.transformer.buffers import buffer_bytes, held_buffers, tables_in_layers
from zeroplan.transformer.params import has_frozen, layout, parameter_count, trained_count, trained_layout
from zeroplan.transformer.recomputed import first_recomputed, in_two
from zeroplan.units import GIB, MIB

_REDUCER = "torch 2.13, torch/csrc/distributed/c10d/reducer.cpp, Reducer::initialize_buckets"
_ALL_REDUCE = "torch 2.13, torch/csrc/distributed/c10d/reducer.cpp, Reducer::all_reduce_bucket"
_REBUILD = "torch 2.13, torch/csrc/distributed/c10d/reducer.cpp, Reducer::rebuild_buckets"
_BROADCAST = "torch 2.13, torch/distributed/optim/zero_redundancy_optimizer.py, _sync_params"
_BUFFERS = "torch 2.13, torch/nn/parallel/distributed.py, DistributedDataParallel._sync_buffers"
_REDUCER_OF = "torch 2.13, torch/nn/parallel/distributed.py, DistributedDataParallel._ddp_init_helper"
_SCALER = "torch 2.13, torch/amp/grad_scaler.py, GradScaler._lazy_init_scale_growth_tracker"

_TABLES = "bitsandbytes 0.50, optim/optimizer.py, Optimizer2State.init_state"
_QUANTISED_FROM = 4096  # bitsandbytes 0.50, optim/adamw.py, AdamW8bit: min_8bit_size
_FIRST_BUCKET_BYTES = 2**20  # torch 2.13, torch/csrc/distributed/c10d/reducer.hpp, kDefaultFirstBucketBytes
_NOTABLE_BUCKETS = 50  # a fiftieth of the parameters is worth a note
BUCKET_BYTES = 25 * 2**20  # torch 2.13, torch/csrc/distributed/c10d/reducer.hpp, kDefaultBucketBytesCap


def account(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Account:
    """Return memory and traffic of the fullest GPU in the steady state, from the third step on. [bytes]

    With ``grad_accum_steps`` above 1 the moments of forward and backward are a later micro-batch's, which finds the earlier
    gradients. Source: torch 2.13, ``torch/nn/parallel/distributed.py`` and ``reducer.cpp``.
    """
    element_bytes, plan = widths(recipe.precision).stored, plan_of(model, recipe)
    these = passes(model, recipe, batch)
    these = in_fp32(these, model) if are_narrow(model, recipe) else these
    held, temporary = _optimizer_lines(model, recipe, element_bytes, mesh.dp_shard)
    held = (*held, *_tables_of_each_optimizer(model, recipe))
    managed = managed_lines(recipe.optimizer, whole_tensors(trained_layout(model)), element_bytes)
    weights = _weights(model, recipe, plan.whole)
    buckets, gradients = _gradient_states(recipe, element_bytes, plan.whole.n_elements, mesh.dp_shard)
    base = (*weights, buckets, *held, *_scaler(recipe), *_beside(model, recipe, batch))
    if recipe.steps_in_backward:
        gradients, temporary = (), ()
    states, copied = (*base, *gradients), _copied(model, recipe, these)
    trace = Trace()
    trace.hold("states", *base)
    wrapped = 1 if recipe.wraps_one_rank else where(mesh.dp_shard > 1, 1, 0)
    Training(trace, recipe, these, levels_of(plan, batch.grad_accum_steps), copied, wrapped).run()
    others = *_step(recipe, plan.whole, states, temporary), *_buckets_rebuilt(recipe, plan.whole, batch, weights)
    symbols = (
        *_frozen_symbols(model, plan.whole),
        *_symbols(these, copied, batch.grad_accum_steps),
        *counted(*held, *temporary, *managed),
    )
    answer = Account(
        states,
        Moments((*trace.finished(), *map(entry_of, others))),
        _collectives(recipe, model, batch.grad_accum_steps, mesh.dp_shard),
        symbols=symbols,
        notes=(*_notes(model, recipe, mesh.dp_shard), *notes_of(recipe.optimizer)),
        host=managed,
        kept=kept_in_a_block(these),
    )
    if not recipe.offload_activations:
        return answer
    return with_offloaded_activations(answer, recipe.recompute, ((one.kind, one.block, len(one.blocks)) for one in these.kinds))


def _step(recipe: RecipeSpec, whole: Row, states: Lines, temporary: Lines) -> Iterator[Moment]:
    """Yield the optimizer's step; before it LOMO's update of the last weight, at the end of the backward."""
    if recipe.optimizer in LOMO:
        width, made = widths(recipe.precision).stored, whole.n_elements
        last = lomo.waiting(whole, made, width), lomo.updating(whole, made, recipe.optimizer, width)
        yield Moment("update of the last weight", Phase.BACKWARD, (*states, *last))
    yield Moment("optimizer step", Phase.STEP, (*states, *temporary))


def _width_of_frozen(model: ModelSpec, recipe: RecipeSpec) -> int:
    """Return the size of an element of a frozen weight; without adapters frozen weights stay uncast. [bytes]"""
    return widths(recipe.precision).stored if model.frozen_as_trained else compute_of(recipe).element_bytes


def _weights(model: ModelSpec, recipe: RecipeSpec, whole: Row) -> Lines:
    """Return trained and frozen weights. [bytes]"""
    stored = widths(recipe.precision).stored
    reason = f"{'trained parameters' if has_frozen(model) else 'parameters'}, whole on every rank"
    trained = _whole(Kind.PARAMETERS, stored, whole.n_elements, reason, _REDUCER_OF)
    return trained, *frozen_lines(model, _width_of_frozen(model, recipe), stored, "parameters", _REDUCER_OF)


def _beside(model: ModelSpec, recipe: RecipeSpec, batch: Batch) -> Lines:
    """Return buffers, tables in layers, and what the training loop holds beside the model. [bytes]"""
    width = _width_of_frozen(model, recipe)
    buffers = *held_buffers(model, layout(model), width), *tables_in_layers(model, recipe, width)
    return *buffers, *held_beside(model, recipe, batch)


@lru_cache(maxsize=256)
def _cast_elements(model: ModelSpec, first: int | None, *, fused: bool) -> tuple[dict[str, int], int]:
    """Return the elements that autocast copies for a block of each kind, and for the head.

    ``fused``: kernels cast the adapters that they run, so autocast keeps no copies.
    """
    whole = trained_layout(model) if first is None else in_two(trained_layout(model), model, first)
    head = whole.tail if whole.tied_head is None else (*whole.tail, whole.tied_head)
    casts = model.adapter is None or (model.adapter.compute == "autocast" and not fused)
    of_kinds = {run.name: sum(one.numel for one in run.parameters if one.autocast and casts) for run in whole.runs}
    return of_kinds, sum(one.numel for one in head if one.autocast)


def _frozen_symbols(model: ModelSpec, whole: Row) -> Iterator[Symbol]:
    """Yield the numbers of trained and frozen weights; two elements of a copy in 16 bits are one trained number."""
    for one in frozen_symbols(model):
        halves = one.name == "Ψ" and one.value != whole.n_elements
        yield Symbol("Ψ", whole.n_elements, "parameters that are trained, two in 16 bits as one") if halves else one


def _copied(model: ModelSpec, recipe: RecipeSpec, these: Passes) -> Casts:
    if not compute_of(recipe).autocast:
        return Casts()
    of_kinds, of_head = _cast_elements(model, first_recomputed(model, recipe), fused="lora" in recipe.fused_parts)
    kept = tuple([one.block.cast_elements if one.recompute == "none" else 0 for one in these.kinds])
    of_head = 0 if are_narrow(model, recipe) else of_head
    return Casts(tuple([of_kinds[name] for name in these.names]), kept, of_head)


def _buckets_rebuilt(recipe: RecipeSpec, whole: Row, batch: Batch, parameters: Lines) -> tuple[Moment, ...]:
    """Return the second forward of the training, in which the reducer builds its final buckets beside the first ones.

    It matters only if gradients are views of buckets and stay from one micro-batch to the next. Optimizer states do not exist
    yet.
    """
    if not recipe.ddp.gradient_as_bucket_view or not recipe.sync_every_micro_batch:
        return ()
    width, total = widths(recipe.precision).stored, whole.n_elements
    first = _whole(Kind.GRADIENTS, width, total, "gradients, views of the first bucket", _REBUILD)
    final = _whole(Kind.REDUCE, width, where(batch.grad_accum_steps > 1, total, 0), "the reducer's final buckets", _REBUILD)
    final = final._replace(formula=f"{final.formula}·M")
    return (Moment("second forward: buckets rebuilt", Phase.INIT, (*parameters, first, final)),)


def _notes(model: ModelSpec, recipe: RecipeSpec, ranks: Int) -> Iterator[str]:
    """Yield notes: what a single rank runs, and which rank the figures describe if ranks differ."""
    if model.adapter is not None and model.moe is not None:
        yield ROUTED
    if recipe.ddp.compiled:
        yield "the compiled model is counted as without the compiler, but its backward returns all gradients at its end"
    stored, trained = widths(recipe.precision).stored, trained_count(model)
    notable = trained * _NOTABLE_BUCKETS >= parameter_count(model)
    if recipe.optimizer in LOMO:
        yield "each weight is updated as soon as the gradient of the next one is there"
    elif recipe.ddp.step_in_backward:
        yield "each weight's optimizer steps as soon as its gradient is there, which is then freed"
    elif isinstance(ranks, int) and ranks == 1 and not recipe.wraps_one_rank and notable:
        more = stored * trained / GIB
        yield f"one GPU runs a plain loop; DDP adds {more:,.2f} GiB (ddp.wrap_one_rank)"
    if recipe.zero_stage == 0 or not isinstance(ranks, int) or ranks == 1:
        return
    if recipe.optimizer in LONGEST:
        yield "each rank updates some of the blocks, as with Shampoo's DDPDistributedConfig; the fullest rank is counted"
        return
    found = fullest_share(model, recipe.optimizer, implementation_of(recipe), stored, ranks)
    in_step = (
        "" if found.rank_in_step == found.rank else f", and rank {found.rank_in_step} needs the most in the optimizer step"
    )
    yield f"ZeroRedundancyOptimizer gives each rank whole tensors: rank {found.rank} holds the most optimizer state{in_step}"


def _symbols(these: Passes, copied: Casts, accum: Int) -> tuple[Symbol, ...]:
    return (
        Symbol("M", where(accum > 1, 1, 0), "1 where an earlier micro-batch of the step left gradients, else 0"),
        *_of_each("C", these.names, copied.in_forward, "elements that autocast copies in the forward of one {} block"),
        *_of_each("K", these.names, copied.kept, "of them, kept by one {} block until its backward"),
        *kept_symbols(these),
    )


def _of_each(letter: str, kinds: tuple[str, ...], numbers: tuple[int, ...], meaning: str) -> Iterator[Symbol]:
    for kind, number in zip(kinds, numbers, strict=False):
        yield Symbol(f"{letter}_{kind}", number, meaning.format(kind))


def _whole(kind: Kind, element_bytes: int, elements: Int, reason: str, source: str) -> Line:
    return sized(kind, element_bytes, elements, reason, source, "Ψ")


def _gradient_states(recipe: RecipeSpec, element_bytes: int, total: int, ranks: Int) -> tuple[Line, Lines]:
    """Return the buckets, which are always alive, and the separate gradients at the end of a backward.

    A single rank without a wrapper has gradients but no buckets.
    """
    if recipe.ddp.gradient_as_bucket_view:
        return _whole(Kind.GRADIENTS, element_bytes, total, "gradients, views of the reducer's buckets", _REDUCER), ()
    buckets = _whole(Kind.REDUCE, element_bytes, total, "the reducer's buckets, room for all gradients", _REDUCER)
    if not recipe.wraps_one_rank:
        n_bytes, formula = where(ranks > 1, element_bytes * total, 0), f"{buckets.formula}·min(1, N-1)"
        buckets = buckets._replace(n_bytes=n_bytes, formula=formula)
    return buckets, (_whole(Kind.GRADIENTS, element_bytes, total, "gradients", ACCUMULATE),)


def _scaler(recipe: RecipeSpec) -> Lines:
    if recipe.precision != "fp16-mixed":
        return ()
    return (Line(Kind.OPTIMIZER_STATE, 8, "GradScaler: scale and growth counter", "8", _SCALER),)


def _optimizer_lines(model: ModelSpec, recipe: RecipeSpec, element_bytes: int, ranks: Int) -> tuple[Lines, Lines]:
    """Return states and step temporaries of this rank's tensors: all tensors, or the fullest rank's share."""
    impl = implementation_of(recipe)
    if recipe.zero_stage == 0:
        if are_narrow(model, recipe):
            return optimizer_lines(model, recipe)
        return _all_updated(model, recipe.optimizer, impl, element_bytes)

    def share(n: int) -> tuple[Lines, Lines]:
        if recipe.optimizer in LONGEST:
            *states, temporary = shampoo_blocks.lines(_shapes(model), element_bytes, LONGEST[recipe.optimizer], n)
            return tuple(states), (temporary,)
        found = fullest_share(model, recipe.optimizer, impl, element_bytes, n)
        return found.state, found.temporary

    return for_ranks(lambda n: share(n)[0], ranks), for_ranks(lambda n: share(n)[1], ranks)


def _shapes(model: ModelSpec) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, tensor.shape)) for tensor in every_tensor(model))


def _tables_of_each_optimizer(model: ModelSpec, recipe: RecipeSpec) -> Lines:
    """Return the tables of codes of 8-bit optimizers that step in the backward: every weight has an optimizer. [bytes]"""
    if not recipe.ddp.step_in_backward or not recipe.optimizer.endswith("adamw-8bit"):
        return ()
    quantised = sum(one.repeat for one in whole_tensors(trained_layout(model)) if int(one.numel) >= _QUANTISED_FROM)
    more = max(0, quantised - 1)
    return (
        Line(Kind.OPTIMIZER_STATE, 2048 * more, "tables of codes of the other weights' optimizers", f"2048·{more}", _TABLES),
    )


@lru_cache(maxsize=1024)
def _all_updated(model: ModelSpec, optimizer: Optimizer, impl: OptimizerImpl, element_bytes: int) -> tuple[Lines, Lines]:
    tensors = whole_tensors(trained_layout(model))
    return (
        state_lines(optimizer, impl, tensors, element_bytes, symbol="Ψ"),
        step_temporary_lines(optimizer, impl, tensors, element_bytes, symbol="Ψ"),
    )


def _collectives(recipe: RecipeSpec, model: ModelSpec, accum: Int, ranks: Int) -> tuple[Collective, ...]:
    """Return the all-reduce of all gradients; at stage 1 also each parameter's broadcast from the rank that updated it.

    The all-reduce is a ring's reduce-scatter and all-gather, 2·Ψ elements. Torch's stage 1 does not replace it by a
    reduce-scatter, so it moves 3·Ψ, more than the 2·Ψ of the ZeRO paper (arXiv:1910.02054, section 7).
    """
    total, width = plan_of(model, recipe).whole.n_elements, widths(recipe.precision).stored
    payload, calls = width * total, accum if recipe.sync_every_micro_batch else 1
    share = ceil_div(payload, ranks) * (ranks - 1)
    moved = where(ranks > 1, total, 0)
    count = bucket_count(model, width, recipe.ddp.bucket_cap_mb)
    what = f"gradients, in {count} bucket{'s' if count > 1 else ''}"
    reduce = Collective(
        "all_reduce", what, "backward", ranks, calls, payload, 2 * share * calls, 2 * moved * calls, _ALL_REDUCE
    )
    kept = buffers_sent(model, recipe, calls, ranks)
    if recipe.zero_stage == 0:
        return (reduce, *kept)
    if recipe.optimizer in LONGEST:
        return (reduce, shampoo_blocks.all_gather(_shapes(model), LONGEST[recipe.optimizer], ranks), *kept)
    updated = "parameters, each tensor by the rank that updated it"
    return (
        reduce,
        Collective("broadcast", updated, "optimizer step", ranks, 1, payload, share, moved, _BROADCAST, phase=Phase.STEP),
        *kept,
    )


def buffers_sent(model: ModelSpec, recipe: RecipeSpec, calls: Int, ranks: Int) -> tuple[Collective, ...]:
    """Return the broadcast of rank 0's buffers before a forward that follows a synchronised backward. It is no part of the 2·Ψ.

    Beside adapters they have the dtype of the frozen weights.
    """
    width, wide = widths(recipe.precision), release_of(recipe.transformers).wide_routers
    n_bytes = buffer_bytes(model, width.stored if model.adapter is None else width.compute, wide_routers=wide)
    if not n_bytes:
        return ()
    share = ceil_div(n_bytes, ranks) * (ranks - 1)
    what, sent = "buffers of the model", share * calls
    return (Collective("broadcast", what, "forward", ranks, calls, n_bytes, sent, 0, _BUFFERS, phase=Phase.FORWARD),)


def bucket_count(model: ModelSpec, element_bytes: int, cap_mb: int | None = None) -> int:
    """Return the number of buckets of the gradients, with one all-reduce each. [buckets]"""
    return len(bucket_sizes(model, element_bytes, cap_mb))


@lru_cache(maxsize=256)
def bucket_sizes(model: ModelSpec, element_bytes: int, cap_mb: int | None = None) -> tuple[int, ...]:
    """Return the size of each bucket of gradients. [bytes]

    A bucket closes with the gradient that reaches its limit: 1 MiB for the first and 25 MiB for the others, or ``cap_mb`` for
    all. Gradients enter in the reverse order of ``model.parameters()``; within a block they become ready in another order.
    Source: torch 2.13, reducer.cpp, ``compute_bucket_assignment_by_size``.
    """
    return filled_buckets([element_bytes * int(tensor.numel) for tensor in reversed(every_tensor(model))], cap_mb)


def filled_buckets(sizes: Iterable[int], cap_mb: int | None) -> tuple[int, ...]:
    """Return the size of each bucket that gradients of these sizes fill, in their order. [bytes]"""
    first, others = (_FIRST_BUCKET_BYTES, BUCKET_BYTES) if cap_mb is None else (cap_mb * MIB, cap_mb * MIB)
    closed, filled, limit = list[int](), 0, first
    for size in sizes:
        filled += size
        if filled >= limit:
            closed.append(filled)
            filled, limit = 0, others
    return (*closed, *((filled,) if filled else ()))
