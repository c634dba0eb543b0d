"""The memory and traffic of a rank under DeepSpeed's stages 0, 1 and 2, where weights are whole on every rank.

At stages 1 and 2 (``DeepSpeedZeroOptimizer``) the weights are one flat tensor. A rank owns a contiguous shard of it and keeps
the fp32 weights and the optimizer state of that shard. The figures are rank 0's, whose shard begins with the embedding. There
is one parameter group; Muon has two.

Gradients are also whole on every rank at stage 0 in any precision, and at stage 1 with 16-bit weights and fp32 gradient
accumulation (``BF16_Optimizer``).
"""

from zeroplan.engines.account import Account, Symbol
from zeroplan.engines.deepspeed.abandoned import abandoned_states, beside
from zeroplan.engines.deepspeed.gradients import collects
from zeroplan.engines.deepspeed.muon import shares, states_beside_muon
from zeroplan.engines.deepspeed.numbers import numbers_unsharded
from zeroplan.engines.deepspeed.offload import kept_as, note, offloads_optimizer, on_host
from zeroplan.engines.deepspeed.sources import SHARE, STAGE12
from zeroplan.engines.deepspeed.stage12_backward import trained
from zeroplan.engines.deepspeed.stage12_lines import Job, frozen_weights, job_of, own_gradients, symbols
from zeroplan.engines.deepspeed.stage12_offload import host_lines, host_symbols, way_back
from zeroplan.engines.deepspeed.wrappers import BF16, ENGINE, FUSED, UNFUSED, all_of, all_reduces, takes_flat_wrapper
from zeroplan.engines.formulas import sized, times
from zeroplan.engines.optimizers import LocalTensor, counted, state_lines, step_temporary_lines, whole_tensors
from zeroplan.engines.outside import buffers_and_pixels
from zeroplan.engines.passes import Passes, kept_in_a_block, passes
from zeroplan.engines.rows import largest_parameter
from zeroplan.ledger import Collective, Kind, Line, Moment, Phase
from zeroplan.numeric import Int, ceil_div, where
from zeroplan.spec.batch import Batch
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import OptimizerImpl, RecipeSpec
from zeroplan.trace import Moments, entry_of
from zeroplan.transformer.params import trained_layout

ZEROS = f"{STAGE12}, initialize_optimizer_states"
_FLAT_IS_THE_PEAK = (
    "The peak is the construction of the optimizer, where the model and its flat copy lie beside each other; DeepSpeed makes "
    "that copy through host memory where the GPU has no room for both, so it alone does not make the job fail"
)


def partitioned_account(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch, impl: OptimizerImpl) -> Account:
    """Return the account of stages 1 and 2.

    Leaves out several parameter groups (each is padded separately) other than Muon's two, ``round_robin_gradients``, ZeRO++.
    """
    job = job_of(model, recipe, mesh, batch)
    tensors = (LocalTensor((job.partition,), in_block=False),)
    flat, master, *frozen = weights_of(job)
    temporary: tuple[Line, ...] = ()
    if job.by_muon:
        updated = (master, *states_beside_muon(job))
    else:
        updated = (master, *state_lines(recipe.optimizer, kept_as(recipe, impl), tensors, job.master, symbol=SHARE))
        temporary = step_temporary_lines(recipe.optimizer, impl, tensors, job.master, symbol=SHARE)
    these, offloads = passes(model, recipe, batch), offloads_optimizer(recipe)
    here = tuple(map(on_host, updated)) if offloads else updated
    left = abandoned_states(recipe, job.whole.n_elements, job.element)
    persistent = (flat, *frozen, *here, *left, *way_back(job), *buffers_and_pixels(model, recipe, batch))
    training = trained(job, impl, these, persistent, () if offloads else temporary)
    moments = Moments((*map(entry_of, beside(_init(job, (flat, here[0], *frozen)), left)), *training))
    return Account(
        (*persistent, own_gradients(job)),
        moments,
        (*_all_reduce(job, batch), *_weight_gathers(job), *numbers_unsharded(recipe, job.n_ranks)),
        host=host_lines(job, updated, temporary),
        symbols=(*symbols(job, these), *host_symbols(job), *counted(*updated, *temporary)),
        notes=(*_notes(job, moments), *note(recipe)),
        kept=kept_in_a_block(these),
    )


def _notes(job: Job, moments: Moments) -> tuple[str, ...]:
    """Return a note if model and flat copy are the peak: DeepSpeed makes that copy on the GPU only if it fits."""
    is_peak = moments.highest_entry is moments.entries[0]
    return (_FLAT_IS_THE_PEAK,) if is_peak and job.recipe.deepspeed.flatten_on_accelerator else ()


def weights_of(job: Job) -> tuple[Line, ...]:
    """Return ``DeepSpeedZeroOptimizer``'s weights: all of them flat, this rank's shard, and frozen ones. [bytes]"""
    flat = times(job.element, f"N·{job.share}")
    master = "weights of this rank's share, fp32" if job.master == 4 else "weights of this rank's share, 16 bits"
    return (
        Line(Kind.PARAMETERS, job.element * job.n_ranks * job.partition, "all weights, flat and padded", flat, STAGE12),
        sized(Kind.OPTIMIZER_STATE, job.master, job.partition, master, STAGE12, job.share),
        *frozen_weights(job),
    )


def _init(job: Job, weights: tuple[Line, ...]) -> tuple[Moment, ...]:
    """Return the moments of construction: flattening the model, then making the shard's weights, with gradients once."""
    psi, share = job.whole.n_elements, job.partition
    arrived = sized(Kind.PARAMETERS, job.element, psi, "the model as it arrived on the GPU", STAGE12, "Ψ")
    frozen = frozen_weights(job)
    copied = (arrived, weights[0], *frozen) if job.recipe.deepspeed.flatten_on_accelerator else (weights[0], *frozen)
    zeros = sized(Kind.GRADIENTS, job.master, share, "zero gradients of the share", ZEROS, job.share)
    clone = sized(Kind.TEMPORARY, job.element, share, "copy of the share before its cast", STAGE12, job.share)
    copied_first = job.element != job.master or offloads_optimizer(job.recipe)
    if offloads_optimizer(job.recipe):
        zeros = on_host(zeros)
    if job.by_muon:
        return (*_init_by_group(job, weights[0], arrived), Moment("initialisation: optimizer", Phase.INIT, (*weights, zeros)))
    return (
        Moment("initialisation: weights laid flat", Phase.INIT, copied),
        Moment("initialisation: weights of the share", Phase.INIT, (*weights, clone) if copied_first else weights),
        Moment("initialisation: optimizer", Phase.INIT, (*weights, zeros)),
    )


def _init_by_group(job: Job, flat: Line, arrived: Line) -> tuple[Moment, ...]:
    """Return the moments while Muon's matrices, then all other weights are laid flat and the share of them is copied and cast."""
    e, m, other = job.element, job.master, job.whole.groups[1]
    (muon, adam), rest = shares(job), other.end - other.start
    on_gpu = job.recipe.deepspeed.flatten_on_accelerator
    flat_first = sized(Kind.PARAMETERS, e, job.n_ranks * muon, "Muon's matrices, flat and padded", STAGE12, "N·P_muon")
    left = sized(Kind.PARAMETERS, e, rest, "other weights as they arrived on the GPU", STAGE12)
    one = sized(Kind.OPTIMIZER_STATE, m, muon, "weights of this rank's share of Muon's matrices", STAGE12, "P_muon")
    both = sized(Kind.OPTIMIZER_STATE, m, muon + adam, "weights of this rank's share", STAGE12, job.share)
    reason, copied = "copy of the share before its cast", e != m
    copies = [Line(Kind.TEMPORARY, e * size * copied, reason, f"{e * copied}·{name}", STAGE12)
              for size, name in ((muon, "P_muon"), (adam, "P_adam"))]  # fmt: skip
    begin = "initialisation: "
    return (
        Moment(f"{begin}Muon's matrices laid flat", Phase.INIT, (arrived if on_gpu else left, flat_first)),
        Moment(f"{begin}share of Muon's matrices", Phase.INIT, (left, flat_first, one, copies[0])),
        Moment(f"{begin}other weights laid flat", Phase.INIT, (*((left,) if on_gpu else ()), flat, one)),
        Moment(f"{begin}share of other weights", Phase.INIT, (flat, both, copies[1])),
    )


def unpartitioned_account(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch, impl: OptimizerImpl) -> Account:
    """Return the account of stage 0."""
    job = job_of(model, recipe, mesh, batch)
    mixed, psi, element = job.element == 2, job.whole.n_elements, job.element
    wrapped, frozen = mixed and takes_flat_wrapper(recipe, impl), frozen_weights(job)
    tensors = (LocalTensor((psi,), in_block=False),) if wrapped else whole_tensors(trained_layout(model))
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
    persistent = (*weights, *state, *left, *buffers_and_pixels(model, recipe, batch))
    start: tuple[Moment, ...] = (Moment("initialisation: model", Phase.INIT, there),)
    if mixed:
        start = _init_of_whole(job, persistent, temporary, wrapped=wrapped)
    return Account(
        (*persistent, gradients),
        Moments((*map(entry_of, start), *trained(job, impl, these, persistent, temporary))),
        (*_all_reduce(job, batch), *numbers_unsharded(recipe, job.n_ranks)),
        symbols=(*_symbols_of_whole(job, these), *counted(*state, *temporary)),
        kept=kept_in_a_block(these),
    )


def _symbols_of_whole(job: Job, these: Passes) -> tuple[Symbol, ...]:
    return (
        *symbols(job, these),
        Symbol("G_one", largest_parameter(job.whole), "elements of the largest parameter"),
        Symbol("B_max", max(all_reduces(job.whole)), "elements of the largest all-reduce"),
    )


def bf16_optimizer_account(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch, impl: OptimizerImpl) -> Account:
    """Return the account of stage 1 with bf16 weights and fp32 gradient accumulation."""
    job, these = job_of(model, recipe, mesh, batch), passes(model, recipe, batch)
    weights, tensors = (*flat_in_fp32(job), *frozen_weights(job)), (LocalTensor((job.partition,), in_block=False),)
    state = state_lines(recipe.optimizer, impl, tensors, 4, symbol=SHARE)
    temporary = step_temporary_lines(recipe.optimizer, impl, tensors, 4, symbol=SHARE)
    left = abandoned_states(recipe, job.whole.n_elements, job.element)
    persistent = (*weights, *state, *left, *buffers_and_pixels(model, recipe, batch))
    arrived = all_of(job, Kind.PARAMETERS, 2, "the model as it arrived on the GPU", BF16)
    init = (
        Moment("initialisation: weights laid flat", Phase.INIT, (weights[0], arrived, *frozen_weights(job))),
        Moment("initialisation: optimizer", Phase.INIT, weights),
    )
    return Account(
        persistent,
        Moments((*map(entry_of, beside(init, left)), *trained(job, impl, these, persistent, temporary))),
        (*_all_reduce(job, batch), *numbers_unsharded(recipe, job.n_ranks), *_weight_gathers(job)),
        symbols=(*_symbols_of_whole(job, these), *counted(*persistent, *temporary)),
        kept=kept_in_a_block(these),
    )


def flat_in_fp32(job: Job) -> tuple[Line, ...]:
    """Return the flat tensors of ``BF16_Optimizer``: weights, this rank's shard of them in fp32, and gradients."""
    whole = job.n_ranks * job.partition
    return (
        Line(Kind.PARAMETERS, 2 * whole, "all weights, flat and padded", f"2·N·{SHARE}", BF16),
        Line(Kind.OPTIMIZER_STATE, 4 * job.partition, "weights of this rank's share, fp32", f"4·{SHARE}", BF16),
        Line(Kind.GRADIENTS, 4 * whole, "all gradients added up in fp32, flat and padded", f"4·N·{SHARE}", BF16),
    )


def _init_of_whole(job: Job, persistent: tuple[Line, ...], temporary: tuple[Line, ...], *, wrapped: bool) -> tuple[Moment, ...]:
    """Return the moment of the optimizer's empty first step on zero gradients, which makes its state in mixed precision."""
    zeros = all_of(job, Kind.GRADIENTS, 4, "zero gradients of the first, empty step", f"{FUSED}.initialize_optimizer_states")
    both = (zeros,) if wrapped else (zeros, all_of(job, Kind.GRADIENTS, 2, "zero gradients in 16 bits", UNFUSED))
    return (Moment("initialisation: optimizer state", Phase.INIT, (*persistent, *both, *temporary)),)


def _all_reduce(job: Job, batch: Batch) -> tuple[Collective, ...]:
    """Return the gradients' all-reduces; DeepSpeed uses no reduce-scatter here by default."""
    n, psi, element, stage = job.n_ranks, job.whole.n_elements, job.element, job.recipe.zero_stage
    rounds: Int = batch.grad_accum_steps if stage == 2 else 1
    when = "in the backward of every micro-batch" if stage == 2 else "for the last micro-batch"
    calls, what, source = len(job.buckets.flushes), "gradients, bucket by bucket", f"{STAGE12}, allreduce_and_scatter"
    if collects(job.recipe):
        calls, what = len(all_reduces(job.whole)) if stage == 0 else 1, "gradients"
        when = "after the backward of the last micro-batch"
        source = f"{ENGINE}, allreduce_no_retain"
    return (
        Collective(
            "all_reduce", what, when, n, calls * rounds, element * ceil_div(psi, calls),
            2 * (n - 1) * element * psi // n * rounds, 2 * psi * rounds, source, element * psi * rounds,
        ),
    )  # fmt: skip


def _weight_gathers(job: Job) -> tuple[Collective, ...]:
    """Return the all-gather of each parameter group's weights."""
    n, width = job.n_ranks, job.element
    names = ("updated weights of Muon's matrices", "other updated weights") if job.by_muon else ("updated weights",)
    return tuple(
        Collective(
            "all_gather", name, "after the optimizer step", n, where(n > 1, 1, 0), width * n * share,
            (n - 1) * width * share, n * share, "DeepSpeed 0.19.8, runtime/utils.py, all_gather_dp_groups", phase=Phase.STEP,
        )
        for name, share in zip(names, shares(job) if job.by_muon else (job.partition,), strict=True)
    )  # fmt: skip
