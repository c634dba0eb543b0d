"""What does a rank keep from step to step: weights, gradients, optimizer states?"""

from collections.abc import Iterator

from zeroplan.engines.account import Symbol
from zeroplan.engines.formulas import sized
from zeroplan.engines.megatron.made_gradients import NANOTRON
from zeroplan.engines.megatron.muon import muon_states
from zeroplan.engines.megatron.on_host import states_on_gpu
from zeroplan.engines.megatron.rank import Rank, expert_sharers, sharers, updated_by
from zeroplan.engines.megatron.widths import GRADIENTS_TOO, WEIGHTS_TOO, WIDTHS, bytes_of
from zeroplan.ledger import Kind, Line
from zeroplan.numeric import Int, ceil_div
from zeroplan.spec.described import Job
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.transformer.megatron import bytes_in_fp8

STATES = "Megatron-LM 2026-08, docs/user-guide/features/dist_optimizer.md, table of bytes per parameter"
OPTIMIZER = "Megatron-LM 2026-08, megatron/core/optimizer/distrib_optimizer.py, DistributedOptimizer"
COPIES = "Megatron-LM 2026-08, megatron/core/optimizer/optimizer.py, _copy_model_grads_to_main_grads"
FROZEN = "Megatron-Core 0.16.1, core/distributed/distributed_data_parallel.py, DistributedDataParallel (requires_grad)"
UNSCALED = "Transformer Engine 2026-08, pytorch/optimizers/fused_adam.py, FusedAdam.get_unscaled_state"
CACHED = "Transformer Engine 2026-08, pytorch/module/base.py, quantize_weight (read, not run)"


def states_of(rank: Rank, job: Job) -> Iterator[Line]:
    """Yield the lines of weights, gradients and optimizer states. [bytes]"""
    recipe = job.recipe
    width, (share, shared) = bytes_of(recipe), updated_by(rank, job)
    whole = _in_buffers(rank)
    weights, named = (share, shared) if recipe.zero_stage == WEIGHTS_TOO else whole
    if recipe.megatron.fp8_format is not None:
        narrow, line = _weights_in_fp8(rank, job)
        in_fp8 = "Q_own" if recipe.zero_stage == WEIGHTS_TOO else "Q_8"
        weights, named = weights - narrow, f"({named} - {in_fp8})" if recipe.megatron.fp8_param_gather else named
        yield line
    yield sized(Kind.PARAMETERS, width.weight, weights, f"{width.name} weights", STATES, named)
    if job.model.adapter is not None:
        yield sized(Kind.PARAMETERS, width.weight, rank.frozen, "frozen weights", FROZEN, "F_rank")
    gradients, named = (share, shared) if recipe.zero_stage >= GRADIENTS_TOO else whole
    reason = "main gradients, which micro-batches add up in"
    yield sized(Kind.GRADIENTS, width.gradient, gradients, reason, STATES, named)
    if (buckets := recipe.megatron.gradients_beside - recipe.megatron.main_weights) > 0:
        reason = "buckets of gradients in 16 bits, which stay"
        yield Line(Kind.GRADIENTS, 2 * buckets * whole[0], reason, f"{2 * buckets}·{whole[1]}", NANOTRON)
    share, shared = states_on_gpu(rank, job)
    if width.master:
        reason = "fp32 copy of the weights" if width.master == 4 else "main weights in 16 bits, or what they have beyond bf16"
        yield sized(Kind.OPTIMIZER_STATE, width.master, share, reason, OPTIMIZER, shared)
    if rank.muon is not None:
        yield from muon_states(rank.muon)
        return
    both = 8 if recipe.megatron.optimizer_offload_fraction else _moments(recipe)
    yield sized(Kind.OPTIMIZER_STATE, both, share, "momentum and variance", OPTIMIZER, shared)


def _in_buffers(rank: Rank) -> tuple[Int, str]:
    """Return the elements of the buffers of weights, and of gradients, on a rank that has all of them, and the formula."""
    if rank.muon is None:
        return rank.elements + rank.experts, "(D_rank + X_rank)"
    return rank.elements + rank.experts + rank.padding, "(D_rank + X_rank + P_rank)"


def _moments(recipe: RecipeSpec) -> int:
    """Return the bytes of both moments per parameter. Without main weights they have the dtype of the weights."""
    if not recipe.megatron.main_weights:
        return 4
    return WIDTHS[recipe.megatron.exp_avg_dtype] + WIDTHS[recipe.megatron.exp_avg_sq_dtype]


def _weights_in_fp8(rank: Rank, job: Job) -> tuple[Int, Line]:
    """Return the elements that have FP8 weights alone, and the line of all FP8 weights, in every layout that is kept."""
    recipe = job.recipe
    own, (_, both) = recipe.megatron, bytes_in_fp8(recipe)
    both = 64 if own.fp8_recipe == "blockwise" else both  # blocks of weights are 128 x 128, so their scales are negligible
    if not own.fp8_param_gather:
        reason = "copies of weights in FP8, for all micro-batches"
        n_bytes = both * ceil_div(rank.in_fp8, 32)
        return 0, Line(Kind.WEIGHT_CASTS, n_bytes, reason, f"{both}·ceil(Q_8/32)", CACHED)
    if recipe.zero_stage == WEIGHTS_TOO:
        share = _share_in_fp8(rank, job)
        return share, Line(Kind.PARAMETERS, share, "weights in FP8", "Q_own", CACHED)
    n_bytes = both * ceil_div(rank.in_fp8, 32)
    return rank.in_fp8, Line(Kind.PARAMETERS, n_bytes, "weights in FP8, in all layouts", f"{both}·ceil(Q_8/32)", CACHED)


def _share_in_fp8(rank: Rank, job: Job) -> Int:
    """Return this rank's share of the FP8 matrices. Different ranks share the experts and the other matrices."""
    dense = ceil_div(rank.in_fp8 - rank.experts, sharers(job))
    return dense + ceil_div(rank.experts, expert_sharers(job))


def symbols_in_fp8(rank: Rank, job: Job) -> Iterator[Symbol]:
    """Yield the symbols of the parameters that multiply in FP8."""
    if job.recipe.megatron.fp8_format is not None:
        yield Symbol("Q_8", rank.in_fp8, "parameters of this rank in matrices that multiply in FP8")
        if job.recipe.zero_stage == WEIGHTS_TOO:
            yield Symbol("Q_own", _share_in_fp8(rank, job), "its part of them")


def step_lines(rank: Rank, job: Job) -> tuple[Line, ...]:
    """Return the step's temporary fp32 copies: of fp16 gradients, or of the precision-aware optimizer's states. [bytes]"""
    n_bytes, (share, shared) = bytes_of(job.recipe).at_step, states_on_gpu(rank, job)
    if not n_bytes:
        return ()
    if job.recipe.megatron.use_precision_aware_optimizer:
        reason, source = "moments and main weights in fp32, for the step", UNSCALED
    else:
        reason, source = "fp32 copies of the gradients, until they are set to zero", COPIES
    return (sized(Kind.OPTIMIZER_TEMPORARY, n_bytes, share, reason, source, shared),)
