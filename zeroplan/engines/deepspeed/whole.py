"""What does a rank hold under DeepSpeed where gradients are whole on every rank?

That is stage 0 in any precision, and stage 1 with 16-bit weights and fp32 gradient accumulation (``BF16_Optimizer``).
"""

from functools import lru_cache

from zeroplan.engines.account import Account, Symbol
from zeroplan.engines.deepspeed.abandoned import abandoned_states, beside
from zeroplan.engines.deepspeed.numbers import numbers_unsharded
from zeroplan.engines.deepspeed.sources import SHARE
from zeroplan.engines.deepspeed.stage12_backward import trained
from zeroplan.engines.deepspeed.stage12_lines import Job, frozen_weights, job_of, symbols
from zeroplan.engines.deepspeed.wrappers import BF16, ENGINE, FUSED, UNFUSED, all_of, all_reduces, takes_flat_wrapper
from zeroplan.engines.optimizers import LocalTensor, counted, state_lines, step_temporary_lines, whole_tensors
from zeroplan.engines.passes import Passes, kept_in_a_block, passes
from zeroplan.engines.rows import largest_parameter
from zeroplan.ledger import Collective, Kind, Line, Moment, Phase
from zeroplan.numeric import Int, ceil_div, where
from zeroplan.spec.batch import Batch
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import OptimizerImpl, RecipeSpec
from zeroplan.trace import Moments, entry_of
from zeroplan.transformer.params import layout, trained_layout


def unpartitioned_account(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch, impl: OptimizerImpl) -> Account:
    """Answer for stage 0."""
    job = job_of(model, recipe, mesh, batch)
    mixed, psi, element = job.element == 2, job.whole.n_elements, job.element
    wrapped, frozen = mixed and takes_flat_wrapper(recipe, impl), frozen_weights(job)
    tensors = (LocalTensor((psi,), in_block=False),) if wrapped else _tensors(model)
    state = state_lines(recipe.optimizer, impl, tensors, 4, symbol="Ψ")
    temporary = step_temporary_lines(recipe.optimizer, impl, tensors, 4, symbol="Ψ")
    there = (
        all_of(job, Kind.PARAMETERS, element, "all weights that are trained" if frozen else "all weights", ENGINE),
        *frozen,
    )
    weights = [*there]
    if mixed:
        weights.append(all_of(job, Kind.OPTIMIZER_STATE, 4, "all weights in fp32", FUSED if wrapped else UNFUSED))
    gradients = all_of(job, Kind.GRADIENTS, element, "all gradients", ENGINE)
    these = passes(model, recipe, batch)
    left = abandoned_states(recipe, psi, element)
    persistent = (*weights, *state, *left, *layout(model).buffers)
    start = _init(job, persistent, temporary, wrapped=wrapped) if mixed else _arrived(there)
    return Account(
        (*persistent, gradients),
        Moments((*map(entry_of, start), *trained(job, impl, these, persistent, temporary))),
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
    arrived = all_of(job, Kind.PARAMETERS, 2, "the model as it arrived on the GPU", BF16)
    init = (
        Moment("initialisation: weights laid flat", Phase.INIT, (weights[0], arrived, *frozen_weights(job))),
        Moment("initialisation: optimizer", Phase.INIT, weights),
    )
    return Account(
        persistent,
        Moments((*map(entry_of, beside(init, left)), *trained(job, impl, these, persistent, temporary))),
        (*_collectives(job), _weight_gather(job)),
        symbols=(*_symbols(job, these), *counted(*persistent, *temporary)),
        kept=kept_in_a_block(these),
    )


def flat_in_fp32(job: Job) -> tuple[Line, ...]:
    """What ``BF16_Optimizer`` lays flat: weights, this rank's share of them in fp32, and gradients."""
    whole = job.n_ranks * job.partition
    return (
        Line(Kind.PARAMETERS, 2 * whole, "all weights, flat and padded", f"2·N·{SHARE}", BF16),
        Line(Kind.OPTIMIZER_STATE, 4 * job.partition, "weights of this rank's share, fp32", f"4·{SHARE}", BF16),
        Line(Kind.GRADIENTS, 4 * whole, "all gradients added up in fp32, flat and padded", f"4·N·{SHARE}", BF16),
    )


@lru_cache(maxsize=256)
def _tensors(model: ModelSpec) -> tuple[LocalTensor, ...]:
    return whole_tensors(trained_layout(model))


def _arrived(weights: tuple[Line, ...]) -> tuple[Moment, ...]:
    return (Moment("initialisation: model", Phase.INIT, weights),)


def _init(job: Job, persistent: tuple[Line, ...], temporary: tuple[Line, ...], *, wrapped: bool) -> tuple[Moment, ...]:
    """Under mixed precision the optimizer takes one step on zero gradients to make its state."""
    zeros = all_of(job, Kind.GRADIENTS, 4, "zero gradients of the first, empty step", f"{FUSED}.initialize_optimizer_states")
    both = (zeros,) if wrapped else (zeros, all_of(job, Kind.GRADIENTS, 2, "zero gradients in 16 bits", UNFUSED))
    return (Moment("initialisation: optimizer state", Phase.INIT, (*persistent, *both, *temporary)),)


def _collectives(job: Job) -> tuple[Collective, ...]:
    n, psi, element = job.n_ranks, job.whole.n_elements, job.element
    calls = len(all_reduces(job.whole)) if job.recipe.zero_stage == 0 else 1
    return (
        Collective(
            "all_reduce", "gradients", "after the backward of the last micro-batch", n, calls, element * ceil_div(psi, calls),
            2 * (n - 1) * element * psi // n, 2 * psi, f"{ENGINE}, allreduce_no_retain", element * psi,
        ),
        *numbers_unsharded(job.recipe, n),
    )  # fmt: skip


def _weight_gather(job: Job) -> Collective:
    n, share = job.n_ranks, job.partition
    calls: Int = where(n > 1, 1, 0)
    source = "DeepSpeed 0.19.8, runtime/utils.py, all_gather_dp_groups"
    return Collective("all_gather", "updated weights", "after the optimizer step", n, calls, 2 * n * share, (n - 1) * 2 * share,
                      n * share, source, phase=Phase.STEP)  # fmt: skip
