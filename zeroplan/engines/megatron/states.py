"""What does a rank keep from step to step: weights, gradients, optimizer states, and buffers that are allocated once?

HybridDeviceOptimizer updates a share of the parameters on the CPU, from copies in host memory. It was read in Megatron-Core 0.16,
not run on GPUs.
"""

from collections.abc import Iterator

from zeroplan.engines.account import Symbol
from zeroplan.engines.formulas import sized
from zeroplan.engines.megatron.chunks import chunks_per_rank, layers_of_a_checkpoint, runs_of
from zeroplan.engines.megatron.muon import largest_matrices, muon_states
from zeroplan.engines.megatron.parameters import (
    GRADIENTS_TOO,
    WEIGHTS_TOO,
    WIDTHS,
    adapters_of_each_shape,
    bytes_of,
    elements_of,
    ends_of,
    has_tied_head,
    head_of,
    is_expert,
    is_split,
    of_one_rank,
    of_shared_expert,
    table_of,
)
from zeroplan.engines.megatron.rank import Rank, expert_sharers, kinds_backward, sharers, updated_by
from zeroplan.ledger import Kind, Line, OffGpu, Tag
from zeroplan.numeric import Int, ceil_div, maximum, minimum
from zeroplan.spec.described import Job
from zeroplan.spec.family import UNROTATED
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.transformer.megatron import Layers, bytes_in_fp8, element_of, keeps_placeholders

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
    whole = (
        rank.elements + rank.experts + rank.padding,
        "(D_rank + X_rank)" if rank.muon is None else "(D_rank + X_rank + P_rank)",
    )
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


HYBRID = "Megatron-Core 0.16.1, core/optimizer/cpu_offloading/hybrid_optimizer.py, HybridDeviceOptimizer"
_PARTS = 10_000
"""The share in host memory is counted in whole parts of this many."""


def _tensors_on_host(rank: Rank, job: Job) -> Int:
    """Return how many of a rank's updated parameters are in host memory at least: whole tensors until the fraction is reached."""
    return updated_by(rank, job)[0] * int(job.recipe.megatron.optimizer_offload_fraction * _PARTS) // _PARTS


def states_on_gpu(rank: Rank, job: Job) -> tuple[Int, str]:
    """Return the number of parameters whose optimizer states are on this rank's GPU, and its formula."""
    share, named = updated_by(rank, job)
    if not job.recipe.megatron.optimizer_offload_fraction:
        return share, named
    return share - _tensors_on_host(rank, job), f"({named} - U_host)"


def host_lines(rank: Rank, job: Job) -> Iterator[Line]:
    """Yield what is in host memory: fp32 weights, pinned fp32 gradients, and both moments. [bytes]"""
    if job.recipe.megatron.optimizer_offload_fraction:
        on_host = _tensors_on_host(rank, job)
        yield sized(Kind.OPTIMIZER_STATE, 12, on_host, "fp32 weights, momentum and variance", HYBRID, "U_host")
        yield sized(Kind.GRADIENTS, 4, on_host, "fp32 gradients for the CPU's optimizer, pinned", HYBRID, "U_host")


def copied_back(rank: Rank, job: Job) -> Iterator[Line]:
    """Yield the fp32 copy on the GPU of the largest tensor that comes back from host memory: torch converts it there. [bytes]"""
    if job.recipe.megatron.optimizer_offload_fraction:
        most = _largest(rank, job)
        yield sized(Kind.OPTIMIZER_TEMPORARY, 4, most, "fp32 copy of the largest updated tensor", HYBRID, "U_back")


def _largest(rank: Rank, job: Job) -> Int:
    """Return the elements of a rank's largest tensor: at most the whole one, and at most all that the rank updates."""
    most = table_of(job)
    for (rows, columns), ranks in largest_matrices(job):
        most = maximum(most, ceil_div(rows * columns, ranks))
    return minimum(most, updated_by(rank, job)[0])


def symbols_on_host(rank: Rank, job: Job) -> Iterator[Symbol]:
    """Yield the symbols of these lines."""
    if job.recipe.megatron.optimizer_offload_fraction:
        yield Symbol("U_host", _tensors_on_host(rank, job), "parameters whose optimizer states are in host memory")
        yield Symbol("U_back", _largest(rank, job), "elements of the largest tensor that comes back from there")


NANOTRON = "nanotron 2411b022, optim/gradient_accumulator.py, FP32GradientAccumulator.backward, and trainer.py, _init_model"


def made_gradients(rank: Rank, job: Job) -> dict[str, Int]:
    """Return the gradients in 16 bits that a backward has made, by moment: of the head, of each kind's first layer, end. [elements]

    The gradients of a running layer are counted whole. At the end an untied embedding has none yet. With several chunks of layers
    or a hybrid pattern, all are counted at every moment, which is the most.
    """
    recipe = job.recipe
    if not recipe.megatron.gradients_beside or not recipe.megatron.main_weights:
        return {}
    order, (embedding, end) = kinds_backward(rank, job), ends_of(job)
    kinds, tied = dict.fromkeys(order), table_of(job) if has_tied_head(job) else 0
    everything = rank.elements + rank.experts
    if len(rank.each) > 1 or recipe.megatron.hybrid_layer_pattern is not None:
        return dict.fromkeys(("head", *kinds, "end"), everything)
    made = {"head": end + tied if rank.has_head else 0}
    for kind in kinds:
        done = order[: order.index(kind) + layers_of_a_checkpoint(recipe)]
        counts = tuple(done.count(run.kind) for run in runs_of(job))
        beside, experts, _ = elements_of(job, counts)
        made[kind] = made["head"] + beside + experts
    return {**made, "end": everything - (embedding if rank.at == 0 and not has_tied_head(job) else 0)}


def made_lines(at: str, rank: Rank, job: Job) -> tuple[Line, ...]:
    """Return the line of these gradients at a moment of the backward, if there are any. [bytes]"""
    made = made_gradients(rank, job)
    reason = "gradients in 16 bits, until the backward of the micro-batch ends"
    return (Line(Kind.UNSHARDED_GRADIENTS, 2 * made[at], reason, f"2·A_{at}", NANOTRON),) if made else ()


ANGLES = "Megatron-LM 2026-08, megatron/core/models/common/embeddings/rotary_pos_embedding.py, RotaryEmbedding.forward"
BUFFER = "Megatron-LM 2026-08, megatron/core/utils.py, GlobalMemoryBuffer.get_tensor (name mpu)"
STAND_INS = "Transformer Engine 2026-08, pytorch/module/base.py, get_dummy_wgrad"
_KEPT = Tag(off_gpu=OffGpu.KEPT)


def buffer_lines(rank: Rank, layers: Layers, job: Job) -> Iterator[Line]:
    """Yield the tensors that Megatron-Core allocates once and keeps. [bytes]

    They are one buffer for attention scores and gathered tokens, and Transformer Engine's placeholders for weight gradients.
    """
    recipe = job.recipe
    needs = {**_scores(recipe), **_gathered(rank, job)}
    sizes = tuple(layers.value(name) * (1 if width == "" else job.model.hidden_size) for name, width in needs.items())
    elements = maximum(*sizes) if len(sizes) > 1 else sum(sizes)
    if needs and not (isinstance(elements, int) and not elements):
        several = ", ".join(f"{width}{name}" for name, width in needs.items())
        formula = f"e·max({several})" if len(needs) > 1 else f"e·{several}"
        reason = "buffer of attention scores, one for all layers" if _scores(recipe) else "buffer of gathered tokens"
        yield Line(Kind.WORKSPACE, element_of(recipe) * elements, reason, formula, BUFFER, _KEPT)
    if keeps_placeholders(recipe):
        yield _stand_ins(rank, job)


def rotary_tables(layers: Layers, job: Job) -> Iterator[Line]:
    """Yield the rotary angles of all positions in fp32. Every chunk of layers makes them once. [bytes]"""
    model = job.model
    if (
        model.positions
        or model.mla is not None
        or model.family in UNROTATED
        or job.recipe.megatron.hybrid_layer_pattern is not None
    ):
        return
    chunks = chunks_per_rank(job)
    yield Line(Kind.ACTIVATIONS, 4 * chunks * layers.value("R_r"), "angles of rotary positions", f"{4 * chunks}·R_r", ANGLES)


def _scores(recipe: RecipeSpec) -> dict[str, str]:
    """Return the symbols of the attention scores that local layers write into Megatron's buffer."""
    if recipe.megatron.transformer_impl != "local":
        return {}
    return dict.fromkeys(("S_r", "S_e", "S_c") if recipe.megatron.pretrains == "t5" else ("S_r",), "")


def _gathered(rank: Rank, job: Job) -> dict[str, str]:
    """Return the symbols of the tokens gathered into the buffer, with the width of each.

    Megatron's own matrices gather their input there, and so does the all-gather dispatcher of experts.
    """
    own_matrices = rank.has_head or job.recipe.megatron.transformer_impl == "local"
    gathers_for_experts = job.model.moe is not None and job.recipe.megatron.moe_token_dispatcher_type == "allgather"  # noqa: S105
    return {**({"T_w": "h·"} if own_matrices else {}), **({"T_a": "h·"} if gathers_for_experts else {})}


def _stand_ins(rank: Rank, job: Job) -> Line:
    """Return the placeholders that Transformer Engine gives to autograd instead of weight gradients. [bytes]

    The real gradients are in the main gradients already. Transformer Engine keeps one placeholder for each shape of a matrix.
    """
    reason = "placeholders for gradients that matrices accumulate themselves, one per shape"
    return Line(Kind.WORKSPACE, element_of(job.recipe) * of_each_shape(rank, job), reason, "e·M", STAND_INS)


def of_each_shape(rank: Rank, job: Job) -> Int:
    """Return the elements of one matrix of each shape: in attention, dense MLP, one expert and the head."""
    if job.model.adapter is not None:
        return adapters_of_each_shape(job, rank.counts, has_head=rank.has_head)
    found: dict[str, Int] = {}
    for run in (run for run, here in zip(runs_of(job), rank.counts, strict=True) if here):
        for parameter in run.parameters:
            if is_expert(parameter) and job.model.moe is not None:
                found[parameter.name] = ceil_div(of_one_rank(parameter, job) * job.mesh.ep, job.model.moe.num_experts)
            elif is_split(parameter.name) and not parameter.name.endswith(".bias"):
                found[parameter.name] = of_one_rank(parameter, job)
        found["shared expert"] = maximum(found.get("shared expert", 0), of_shared_expert(run.kind, job))
    own = job.recipe.megatron  # verl's kernels and a product with two rows return the gradient of the head's weight
    of_head = rank.has_head and own.cross_entropy_fusion_impl != "verl" and own.last_tokens is None
    elements: Int = head_of(job)[0] if of_head else 0
    for each in found.values():
        elements = elements + each
    return elements
