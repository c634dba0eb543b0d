"""Writes a job as Megatron-LM's arguments (megatron/training/arguments.py), one per line.

They contain shape, degrees, batch, precision and recomputation. The user adds data, tokenizer, learning rate and checkpoints.
For a layout found with torch's DDP, a note gives its memory with engine ``megatron``. For FSDP2 there is no such estimate.
"""

from collections.abc import Iterator
from dataclasses import replace

from zeroplan.errors import SpecError
from zeroplan.estimator import Estimate, estimate
from zeroplan.export.fsdp2 import reshards
from zeroplan.spec.job import JobSpec
from zeroplan.spec.megatron import chunks_of, cut_flags
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.pipeline import stages_per_rank
from zeroplan.spec.recipe import ADAM, MegatronOptions, RecipeSpec, ways_of_resharding
from zeroplan.units import format_size

_DEFAULTS = MegatronOptions()
_GATED = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
_OTHER_BUFFERS = "Megatron-LM holds weights and gradients in buffers of its own, and the layout was found with what torch holds"


def megatron_notes(job: JobSpec) -> tuple[str, ...]:
    """Return a note on the layout's memory under Megatron-LM itself, with a size if zeroplan models it."""
    if job.recipe.engine == "megatron":
        return ()
    own = None if job.recipe.engine != "ddp" else _as_megatron_holds_it(job)
    if own is None:
        return (_OTHER_BUFFERS,)
    verdict = {True: ", which fits", False: ", which does not fit", None: ""}[own.fits]
    ask = f"`zeroplan estimate --engine megatron --stage {job.recipe.zero_stage}`"
    return (f"{_OTHER_BUFFERS}: its own account is {format_size(own.least_bytes)}{verdict} ({ask})",)


def _as_megatron_holds_it(job: JobSpec) -> Estimate | None:
    try:
        recipe = replace(job.recipe, engine="megatron", optimizer_impl=None, sync_every_micro_batch=True)
        return estimate(replace(job, recipe=recipe))
    except SpecError:  # for example, engine megatron cannot recompute only some blocks
        return None


def missing(recipe: RecipeSpec) -> str:
    """Return the recipe's setting that Megatron's arguments cannot express, in words; empty if they can express all."""
    sharded = recipe.engine == "fsdp2"
    for inexpressible, said in (
        (recipe.engine not in ("ddp", "fsdp2", "megatron"), f"Megatron-LM has no {recipe.engine}"),
        (
            recipe.recompute == "selective" and recipe.engine != "megatron",
            "Megatron's selective recomputation is of attention alone",
        ),
        (recipe.loss != "full", "its loss is not Megatron's own"),
        (recipe.precision == "bf16", "Megatron keeps fp32 weights beside 16-bit ones"),
        (recipe.pipeline_layers is not None and recipe.engine != "megatron", "stages cut by hand are not written"),
        (recipe.optimizer not in ADAM, "only Adam is written"),
        (recipe.offloads, "what is offloaded is not written"),
        (sharded and ways_of_resharding(recipe.fsdp2) is not None, "Megatron reshards over all ranks or none"),
        (bool(recipe.keep_logits), "Megatron lets go of its logits"),
        (recipe.megatron.cross_entropy_fusion_impl == "verl", "verl's fused head is none of Megatron-LM's"),
        (
            recipe.pipeline_schedule not in (None, "1f1b", *(("interleaved-1f1b",) if recipe.engine == "megatron" else ())),
            "of pipelines only 1F1B is written, and interleaved 1F1B of engine megatron",
        ),
    ):
        if inexpressible:
            return said
    return ""


def megatron_arguments(job: JobSpec) -> str:
    """Return the arguments, one per line with its value."""
    _refuse(job)
    lines = (
        *_shape(job.model, job.recipe.megatron),
        *_degrees(job),
        *_batch(job),
        *_recipe(job.recipe),
        *_implementation(job.recipe.megatron),
        *_experts(job),
    )
    return "".join(f"{line}\n" for line in lines)


def _refuse(job: JobSpec) -> None:
    model = job.model
    biased = model.mlp_bias or (model.attention_bias and model.family != "qwen2")
    partly = model.adapter is not None or model.frozen is not None or model.unplaced_parameters
    partly = partly or job.recipe.megatron.hybrid_layer_pattern is not None
    if model.family not in _GATED or biased or partly:
        raise SpecError(
            f"--emit megatron: the shape of {model.name or model.family} is not written; published models of {', '.join(_GATED)}, "
            "trained as a whole, are"
        )
    if job.recipe.engine == "fsdp2" and (job.mesh.dp_replicate > 1 or job.mesh.pp > 1):
        raise SpecError("--emit megatron: --use-torch-fsdp2 has neither replicas nor pipelines; leave them out")


def _shape(model: ModelSpec, options: MegatronOptions) -> Iterator[str]:
    yield f"--num-layers {model.num_hidden_layers}"
    yield f"--hidden-size {model.hidden_size}"
    yield f"--ffn-hidden-size {model.intermediate_size}"
    yield f"--num-attention-heads {model.num_attention_heads}"
    if model.has_grouped_heads:
        yield "--group-query-attention"
        yield f"--num-query-groups {model.num_key_value_heads}"
    yield f"--kv-channels {model.head_dim}"
    if not options.apply_rope_fusion:
        yield "--no-rope-fusion"
    if options.swiglu is not False:
        yield "--swiglu"
    yield from ("--normalization RMSNorm", "--position-embedding-type rope", "--disable-bias-linear")
    if model.family == "qwen2":
        yield "--add-qkv-bias"
    if options.qk_layernorm or (options.qk_layernorm is None and model.family in ("qwen3", "qwen3_moe")):
        yield "--qk-layernorm"
    if not model.tie_word_embeddings:
        yield "--untie-embeddings-and-output-weights"
    yield f"--vocab-size {model.vocab_size}"
    if options.make_vocab_size_divisible_by != _DEFAULTS.make_vocab_size_divisible_by:
        yield f"--make-vocab-size-divisible-by {options.make_vocab_size_divisible_by}"
    if model.moe is not None:
        yield f"--num-experts {model.moe.num_experts}"
        yield f"--moe-router-topk {model.moe.num_experts_per_tok}"
        yield f"--moe-ffn-hidden-size {model.moe.moe_intermediate_size}"


_STRATEGIES = {
    stage: ("--use-megatron-fsdp --ckpt-format fsdp_dtensor", f"--data-parallel-sharding-strategy {strategy}")
    for stage, strategy in ((2, "optim_grads"), (3, "optim_grads_params"))
}


def _degrees(job: JobSpec) -> Iterator[str]:
    mesh = job.mesh
    yield f"--tensor-model-parallel-size {mesh.tp}"
    if mesh.tp > 1 and (job.recipe.engine != "megatron" or job.recipe.sequence_parallel):
        yield "--sequence-parallel"
    yield f"--pipeline-model-parallel-size {mesh.pp}"
    if job.recipe.engine == "megatron":
        yield from _chunks(job)
    yield f"--context-parallel-size {mesh.cp}"
    if mesh.cp > 1 and job.recipe.megatron.cp_comm_type != _DEFAULTS.cp_comm_type:
        yield f"--cp-comm-type {job.recipe.megatron.cp_comm_type}"
    if job.model.moe is not None:
        yield f"--expert-model-parallel-size {mesh.ep}"
        ways = job.recipe.megatron.expert_ways(mesh.tp) if job.recipe.engine == "megatron" else 1
        yield f"--expert-tensor-parallel-size {ways}"
    if job.recipe.engine == "fsdp2":
        yield "--use-torch-fsdp2"
        if not reshards(job.recipe):
            yield "--torch-fsdp2-no-reshard-after-forward"
    elif job.recipe.zero_stage:
        yield "--use-distributed-optimizer"
        yield from _STRATEGIES.get(job.recipe.zero_stage, ())
        if job.recipe.megatron.num_distributed_optimizer_instances > 1:
            yield f"--num-distributed-optimizer-instances {job.recipe.megatron.num_distributed_optimizer_instances}"
    if job.recipe.engine == "megatron":
        yield from _overlaps(job.recipe.megatron)


def _chunks(job: JobSpec) -> Iterator[str]:
    """Yield the arguments for cutting a pipeline's layers."""
    schedule, pp = job.recipe.pipeline_schedule, job.mesh.pp
    each = stages_per_rank(schedule or "1f1b", job.recipe.pipeline_stages_per_rank) if pp > 1 else 1
    if each > 1:
        yield f"--num-virtual-stages-per-pipeline-rank {each}"
    yield from cut_flags(
        chunks_of(job.model.num_hidden_layers, pp * each, job.recipe.layers_by_hand), job.recipe.megatron.mtp_num_layers
    )


def _overlaps(options: MegatronOptions) -> Iterator[str]:
    for asked, flag in (
        (options.overlap_grad_reduce, "--overlap-grad-reduce"),
        (options.overlap_param_gather, "--overlap-param-gather"),
        (not options.overlap_p2p_comm, "--no-overlap-p2p-communication"),
    ):
        if asked:
            yield flag


def _batch(job: JobSpec) -> Iterator[str]:
    batch, ranks = job.batch, job.mesh.dp_replicate * job.mesh.dp_shard
    yield f"--micro-batch-size {batch.micro_batch_size}"
    yield f"--global-batch-size {batch.micro_batch_size * batch.grad_accum_steps * ranks}"
    yield f"--seq-length {batch.seq_len}"
    yield f"--max-position-embeddings {max(batch.seq_len, min(job.model.max_position_embeddings, 10**7))}"


def _recipe(recipe: RecipeSpec) -> Iterator[str]:
    yield f"--optimizer {'muon' if recipe.optimizer == 'muon' else 'adam'}"
    yield from {"bf16-mixed": ("--bf16",), "fp16-mixed": ("--fp16",)}.get(recipe.precision, ())
    if recipe.recompute_layers is not None:
        yield from ("--recompute-granularity full", "--recompute-method block")
        yield f"--recompute-num-layers {recipe.recompute_layers}"
    elif recipe.recompute == "full":
        yield from ("--recompute-granularity full", "--recompute-method uniform")
        yield f"--recompute-num-layers {recipe.megatron.recompute_num_layers}"
    elif recipe.recompute == "selective":
        modules = recipe.megatron.recompute_modules.replace(",", " ")
        yield from ("--recompute-granularity selective", f"--recompute-modules {modules}")
    if recipe.attention != "sdpa":
        yield f"--attention-backend {'unfused' if recipe.attention == 'eager' else 'flash'}"


def _in_fp8(options: MegatronOptions) -> Iterator[str]:
    if options.fp8_format is not None:
        yield f"--fp8-format {options.fp8_format} --fp8-recipe {options.fp8_recipe}"
    if options.fp8_param_gather:
        yield "--fp8-param-gather"
        if options.fp8_recipe == "mxfp8":
            yield "--reuse-grad-buf-for-mxfp8-param-ag"


def _aware_optimizer(options: MegatronOptions) -> Iterator[str]:
    if options.use_precision_aware_optimizer:
        yield from ("--use-precision-aware-optimizer", f"--main-grads-dtype {options.main_grads_dtype}")
        yield from (f"--main-params-dtype {options.main_params_dtype}", f"--exp-avg-dtype {options.exp_avg_dtype}")
        yield f"--exp-avg-sq-dtype {options.exp_avg_sq_dtype}"
    if options.optimizer_offload_fraction:
        yield f"--optimizer-cpu-offload --optimizer-offload-fraction {options.optimizer_offload_fraction:g}"


def _implementation(options: MegatronOptions) -> Iterator[str]:
    """Yield the arguments for layers and loss; dropout is on only if requested."""
    yield f"--hidden-dropout {0.1 if options.hidden_dropout else 0.0}"
    yield f"--attention-dropout {0.1 if options.attention_dropout else 0.0}"
    if options.transformer_impl != "transformer_engine":
        yield f"--transformer-impl {options.transformer_impl}"
    if options.cross_entropy_fusion_impl is not None:
        yield from ("--cross-entropy-loss-fusion", f"--cross-entropy-fusion-impl {options.cross_entropy_fusion_impl}")
    if not options.create_attention_mask_in_dataloader:
        yield "--no-create-attention-mask-in-dataloader"
    yield from _in_fp8(options)
    for asked, flag in (
        (not options.gradient_accumulation_fusion, "--no-gradient-accumulation-fusion"),
        (not options.use_layer_wise_param_layout, "--no-use-layer-wise-param-layout"),
        (options.grad_reduce_in_bf16, "--grad-reduce-in-bf16"), (options.deterministic_mode, "--deterministic-mode"),
        (options.tp_comm_overlap, "--tp-comm-overlap"),
        (not options.masked_softmax_fusion, "--no-masked-softmax-fusion"),
        (options.attention_softmax_in_fp32, "--attention-softmax-in-fp32"),
    ):  # fmt: skip
        if asked:
            yield flag
    yield from _aware_optimizer(options)
    if options.defer_embedding_wgrad_compute:
        yield from ("--defer-embedding-wgrad-compute", f"--wgrad-deferral-limit {options.wgrad_deferral_limit}")
    if options.mtp_num_layers:
        yield f"--mtp-num-layers {options.mtp_num_layers}"
    group = options.microbatch_group_size_per_virtual_pipeline_stage
    if group is not None:
        yield f"--microbatch-group-size-per-virtual-pipeline-stage {group}"


def _experts(job: JobSpec) -> Iterator[str]:
    """Yield the arguments for experts and their token dispatcher."""
    options = job.recipe.megatron
    if job.model.moe is None:
        return
    kernels = {"flex": "hybridep", "deepep": "deepep"}.get(options.moe_token_dispatcher_type)
    yield f"--moe-token-dispatcher-type {'flex' if kernels else options.moe_token_dispatcher_type}"
    if kernels:
        yield f"--moe-flex-dispatcher-backend {kernels}"
    if options.moe_router_num_groups > 1:
        yield f"--moe-router-num-groups {options.moe_router_num_groups}"
        yield f"--moe-router-group-topk {options.moe_router_group_topk}"
    if options.moe_grouped_gemm:
        yield "--moe-grouped-gemm"
    if options.moe_router_dtype is not None:
        yield f"--moe-router-dtype {options.moe_router_dtype}"
    if options.moe_shared_expert_intermediate_size is not None:
        yield f"--moe-shared-expert-intermediate-size {options.moe_shared_expert_intermediate_size}"
    if options.moe_aux_loss:
        yield from ("--moe-router-load-balancing-type aux_loss", "--moe-aux-loss-coeff 1e-2")
