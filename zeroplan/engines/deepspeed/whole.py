"""What does a rank hold under DeepSpeed where gradients are whole on every rank?

That is stage 0 in any precision, and stage 1 with 16-bit weights and fp32 gradient accumulation (``BF16_Optimizer``).
"""

from functools import lru_cache

from zeroplan.engines.account import Account, Symbol
from zeroplan.engines.deepspeed.abandoned import abandoned_states, beside
from zeroplan.engines.deepspeed.flat import Row, largest_parameter
from zeroplan.engines.deepspeed.numbers import numbers_unpartitioned
from zeroplan.engines.deepspeed.passes import Passes, kept_in_a_block, passes
from zeroplan.engines.deepspeed.sources import SHARE
from zeroplan.engines.deepspeed.stage12_backward import training_moments
from zeroplan.engines.deepspeed.stage12_lines import Job, frozen_weights, job_of, symbols
from zeroplan.engines.formulas import times
from zeroplan.engines.optimizers import LocalTensor, counted, state_lines, step_temporary_lines, whole_tensors
from zeroplan.ledger import Collective, Kind, Line, Moment, Phase
from zeroplan.numeric import Int, ceil_div, where
from zeroplan.spec.batch import Batch
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import ADAM, OptimizerImpl, RecipeSpec
from zeroplan.transformer.params import layout, trained_layout

_FUSED = "DeepSpeed 0.19.8, runtime/fp16/fused_optimizer.py, FP16_Optimizer"
_UNFUSED = "DeepSpeed 0.19.8, runtime/fp16/unfused_optimizer.py, FP16_UnfusedOptimizer"
_BF16 = "DeepSpeed 0.19.8, runtime/bf16_optimizer.py, BF16_Optimizer"
_ENGINE = "DeepSpeed 0.19.8, runtime/engine.py"

#: Elements of one all-reduce at stage 0, whatever ``reduce_bucket_size`` says (``MEMORY_OPT_ALLREDUCE_SIZE``).
_ALL_REDUCE_ELEMENTS = 500_000_000


def unpartitioned_account(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch, impl: OptimizerImpl) -> Account:
    """Answer for stage 0."""
    job = job_of(model, recipe, mesh, batch)
    mixed, psi, element = job.element == 2, job.whole.n_elements, job.element
    wrapped, frozen = mixed and takes_flat_wrapper(recipe, impl), frozen_weights(job)
    tensors = (LocalTensor((psi,), in_block=False),) if wrapped else _tensors(model)
    state = state_lines(recipe.optimizer, impl, tensors, 4, symbol="Ψ")
    temporary = step_temporary_lines(recipe.optimizer, impl, tensors, 4, symbol="Ψ")
    there = (_all(job, Kind.PARAMETERS, element, "all weights that are trained" if frozen else "all weights", _ENGINE), *frozen)
    weights = [*there]
    if mixed:
        weights.append(_all(job, Kind.OPTIMIZER_STATE, 4, "all weights in fp32", _FUSED if wrapped else _UNFUSED))
    gradients = _all(job, Kind.GRADIENTS, element, "all gradients", _ENGINE)
    step = _mixed_step(job, gradients, temporary, wrapped=wrapped) if mixed else _step("update", gradients, *temporary)
    these = passes(model, recipe, batch)
    end = _all_reduced(job, these, gradients)
    training = (*training_moments(job, these), *end, *step)
    left = abandoned_states(recipe, psi, element)
    persistent = (*weights, *state, *left, *layout(model).buffers)
    moments = tuple(moment.beside(persistent) for moment in training)
    return Account(
        (*persistent, gradients),
        (*(_init(job, persistent, temporary, wrapped=wrapped) if mixed else _arrived(there)), *moments),
        _collectives(job),
        symbols=(*_symbols(job, these), *counted(*state, *temporary)),
        kept=kept_in_a_block(these),
    )


def _symbols(job: Job, these: Passes) -> tuple[Symbol, ...]:
    return (
        *symbols(job, these),
        Symbol("G_one", largest_parameter(job.whole), "elements of the largest parameter"),
        Symbol("B_max", max(all_reduces(job.whole)), "elements of the largest all-reduce"),
    )


def bf16_optimizer_account(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch, impl: OptimizerImpl) -> Account:
    """Answer for stage 1 with bf16 weights and fp32 gradient accumulation."""
    job, these = job_of(model, recipe, mesh, batch), passes(model, recipe, batch)
    weights, tensors = (*flat_in_fp32(job), *frozen_weights(job)), (LocalTensor((job.partition,), in_block=False),)
    state = state_lines(recipe.optimizer, impl, tensors, 4, symbol=SHARE)
    temporary = step_temporary_lines(recipe.optimizer, impl, tensors, 4, symbol=SHARE)
    left = abandoned_states(recipe, job.whole.n_elements, job.element)
    persistent = (*weights, *state, *left, *layout(model).buffers)
    arrived = _all(job, Kind.PARAMETERS, 2, "the model as it arrived on the GPU", _BF16)
    init = (
        Moment("initialisation: weights laid flat", Phase.INIT, (weights[0], arrived, *frozen_weights(job))),
        Moment("initialisation: optimizer", Phase.INIT, weights),
    )
    training = _accumulating_in_fp32(job, these, temporary)
    return Account(
        persistent,
        (*beside(init, left), *(moment.beside(persistent) for moment in training)),
        (*_collectives(job), _weight_gather(job)),
        symbols=(*_symbols(job, these), *counted(*persistent, *temporary)),
        kept=kept_in_a_block(these),
    )


def flat_in_fp32(job: Job) -> tuple[Line, ...]:
    """What ``BF16_Optimizer`` lays flat: weights, this rank's share of them in fp32, and gradients."""
    whole = job.n_ranks * job.partition
    return (
        Line(Kind.PARAMETERS, 2 * whole, "all weights, flat and padded", f"2·N·{SHARE}", _BF16),
        Line(Kind.OPTIMIZER_STATE, 4 * job.partition, "weights of this rank's share, fp32", f"4·{SHARE}", _BF16),
        Line(Kind.GRADIENTS, 4 * whole, "all gradients added up in fp32, flat and padded", f"4·N·{SHARE}", _BF16),
    )


def _accumulating_in_fp32(job: Job, these: Passes, temporary: tuple[Line, ...]) -> tuple[Moment, ...]:
    """A step whose gradients are bf16 as they are made, and added up in fp32; beside what persists."""
    made = _all(job, Kind.UNSHARDED_GRADIENTS, 2, "gradients of this micro-batch, bf16", _BF16)
    cast = Line(
        Kind.TEMPORARY, 4 * largest_parameter(job.whole), "largest gradient cast to fp32", "4·G_one", f"{_BF16}._update_hp_grad"
    )
    return (
        *training_moments(job, these),
        Moment("end of backward: gradients added in fp32", Phase.BACKWARD, (*_still_there(these), made, cast)),
        Moment("end of backward: gradients all-reduced", Phase.BACKWARD, (*_still_there(these), made, cast_sums(job))),
        *_step("update", made, *temporary),
    )


def cast_sums(job: Job) -> Line:
    """The copy in which ``BF16_Optimizer`` has its sums all-reduced. [bytes]"""
    n_bytes, reason = 2 * job.n_ranks * job.partition, "fp32 gradients cast to bf16 for the all-reduce"
    return Line(Kind.REDUCE, n_bytes, reason, f"2·N·{SHARE}", f"{_ENGINE}, allreduce_bucket")


@lru_cache(maxsize=256)
def _tensors(model: ModelSpec) -> tuple[LocalTensor, ...]:
    return whole_tensors(trained_layout(model))


def takes_flat_wrapper(recipe: RecipeSpec, impl: OptimizerImpl) -> bool:
    """DeepSpeed lays weights and gradients flat only for its own ``FusedAdam``, not for torch's fused one.

    Source: DeepSpeed 0.19.8, ``runtime/engine.py``, ``_configure_fp16_optimizer``.
    """
    return impl == "fused" and recipe.optimizer in ADAM and not recipe.deepspeed.torch_adam


def _all(job: Job, kind: Kind, width: int, reason: str, source: str) -> Line:
    formula = "4·Ψ" if width == 4 else "2·Ψ"
    return Line(kind, width * job.whole.n_elements, reason, formula, source)


def _step(name: str, *lines: Line) -> tuple[Moment, ...]:
    return (Moment(f"optimizer step: {name}", Phase.STEP, lines),)


def _mixed_step(job: Job, gradients: Line, temporary: tuple[Line, ...], *, wrapped: bool) -> tuple[Moment, ...]:
    """Gradients are cast to fp32, one by one and then flat under ``FP16_Optimizer``, before the update."""
    source = _FUSED if wrapped else _UNFUSED
    if not wrapped:
        taken = _all(job, Kind.GRADIENTS, 4, "gradients cast to fp32", source)
        return _step("update", gradients, taken, *temporary)
    cast = _all(job, Kind.OPTIMIZER_TEMPORARY, 4, "gradients cast to fp32", source)
    flat = _all(job, Kind.GRADIENTS, 4, "gradients in fp32, laid flat", source)
    return (*_step("gradients laid flat", gradients, cast, flat), *_step("update", flat, *temporary))


@lru_cache(maxsize=256)
def all_reduces(whole: Row) -> tuple[int, ...]:
    """Elements of each all-reduce: one closes when it has outgrown the limit."""
    closed, fill = list[int](), 0
    for each in whole.placed:
        fill += each.end - each.start
        if fill > _ALL_REDUCE_ELEMENTS:
            closed.append(fill)
            fill = 0
    return (*closed, *((fill,) if fill else ()))


def _still_there(these: Passes) -> tuple[Line, ...]:
    """What of activations is alive when the backward is over."""
    return (*these.head.at_embedding, *these.output)


def _all_reduced(job: Job, these: Passes, gradients: Line) -> tuple[Moment, ...]:
    reason = "copy of the largest bucket that is all-reduced"
    n_bytes = job.element * max(all_reduces(job.whole))
    copy = Line(Kind.REDUCE, n_bytes, reason, times(job.element, "B_max"), f"{_ENGINE}, allreduce_no_retain")
    return (Moment("end of backward: gradients all-reduced", Phase.BACKWARD, (*_still_there(these), gradients, copy)),)


def _arrived(weights: tuple[Line, ...]) -> tuple[Moment, ...]:
    return (Moment("initialisation: model", Phase.INIT, weights),)


def _init(job: Job, persistent: tuple[Line, ...], temporary: tuple[Line, ...], *, wrapped: bool) -> tuple[Moment, ...]:
    """Under mixed precision the optimizer takes one step on zero gradients to make its state."""
    zeros = _all(job, Kind.GRADIENTS, 4, "zero gradients of the first, empty step", f"{_FUSED}.initialize_optimizer_states")
    both = (zeros,) if wrapped else (zeros, _all(job, Kind.GRADIENTS, 2, "zero gradients in 16 bits", _UNFUSED))
    return (Moment("initialisation: optimizer state", Phase.INIT, (*persistent, *both, *temporary)),)


def _collectives(job: Job) -> tuple[Collective, ...]:
    n, psi, element = job.n_ranks, job.whole.n_elements, job.element
    calls = len(all_reduces(job.whole)) if job.recipe.zero_stage == 0 else 1
    return (
        Collective(
            "all_reduce", "gradients", "after the backward of the last micro-batch", n, calls, element * ceil_div(psi, calls),
            2 * (n - 1) * element * psi // n, 2 * psi, f"{_ENGINE}, allreduce_no_retain", element * psi,
        ),
        *(numbers_unpartitioned(job.recipe, n) if job.recipe.zero_stage == 0 else ()),
    )  # fmt: skip


def _weight_gather(job: Job) -> Collective:
    n, share = job.n_ranks, job.partition
    calls: Int = where(n > 1, 1, 0)
    source = "DeepSpeed 0.19.8, runtime/utils.py, all_gather_dp_groups"
    return Collective("all_gather", "updated weights", "after the optimizer step", n, calls, 2 * n * share, (n - 1) * 2 * share,
                      n * share, source, phase=Phase.STEP)  # fmt: skip
