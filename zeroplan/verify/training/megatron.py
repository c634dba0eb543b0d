"""Runs Megatron-Core's GPT with local layers, its DDP or Megatron-FSDP, optimizer and schedules, with the other engines' interface.

The model is built as Megatron-LM's ``pretrain_gpt.py`` builds it (gpt_builders.py, training/training.py). Transformer Engine's
layers need CUDA, so they are left out.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
from torch import nn

from zeroplan.engines.megatron.chunks import chunks_per_rank, stages_of
from zeroplan.engines.megatron.parameters import padded_vocabulary
from zeroplan.ledger import Kind, Phase
from zeroplan.spec.job import JobSpec
from zeroplan.transformer.megatron import GATED_SHARED, drops_hidden, drops_scores, is_gated, norms_heads, shared_width
from zeroplan.verify.fake_parts.megatron import import_megatron
from zeroplan.verify.replaced import replaced
from zeroplan.verify.training.engine import Engine, Requesting, all_labelled
from zeroplan.verify.watching.watcher import Watcher

import_megatron()

from megatron.core import parallel_state  # noqa: E402  after its kernels have stand-ins
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    FullyShardedDataParallel,
    finalize_model_grads,
)
from megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer import (  # noqa: E402
    StorageResizeBasedBucketAllocator,
    TemporaryBucketAllocator,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.utils import get_attr_wrapped_model  # noqa: E402

from zeroplan.verify.training.megatron_adapters import adapt  # noqa: E402

_DROPOUT = 0.1
#: The methods that allocate Megatron-FSDP's whole weights and whole gradients.
_BUCKETS: Requesting = (
    (StorageResizeBasedBucketAllocator, "allocate", Kind.UNSHARDED_PARAMETERS),
    (TemporaryBucketAllocator, "allocate", Kind.UNSHARDED_GRADIENTS),
)
_STRATEGIES = "no_shard", "no_shard", "optim_grads", "optim_grads_params"
_DTYPES = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16, "fp32": torch.float32}


class Megatron(Engine):
    """One rank's chunks of a GPT, each wrapped in Megatron's DDP or Megatron-FSDP, with Megatron's optimizer and schedule."""

    handed_on = Kind.TEMPORARY
    kept: Kind | None = None

    def __init__(self, job: JobSpec, watcher: Watcher) -> None:
        self._job, self._watcher = job, watcher
        self._enter: Callable[[Phase], None] = lambda _: None
        self.config = _config(job)
        self.chunks = _chunks(job, self.config)
        self.module = nn.ModuleList(self.chunks)
        inside = self.chunks[0].module
        watcher.name_modules(getattr(inside, "module", inside) if len(self.chunks) == 1 else self.module)
        self._optimizer = get_megatron_optimizer(_optimizer_config(job), self.chunks, use_gloo_process_groups=False)
        self._hand_over()
        self.optimizer = self._stepped()[0].optimizer
        self._claim()

    def _hand_over(self) -> None:
        """Set the functions that the schedule calls (training/training.py, train)."""
        config, overlapped = self.config, self._job.recipe.megatron.overlap_grad_reduce
        config.grad_scale_func, config.finalize_model_grads_func = self._optimizer.scale_loss, finalize_model_grads
        if overlapped:
            several = [chunk.no_sync for chunk in self.chunks]
            config.no_sync_func = several if len(several) > 1 else several[0]

    def micro_step(self, enter: Callable[[Phase], None], *, last: bool) -> None:
        """Run all micro-batches of a step and reduce the gradients."""
        assert last  # noqa: S101  the schedule runs all of them in one call
        batch, self._enter = self._job.batch, enter
        several = len(self.chunks) > 1
        get_forward_backward_func()(
            forward_step_func=self._forward, data_iterator=[None] * len(self.chunks) if several else None,
            model=self.chunks if several else self.chunks[0], num_microbatches=batch.grad_accum_steps,
            seq_length=batch.seq_len, micro_batch_size=batch.micro_batch_size, forward_only=False,
        )  # fmt: skip

    def _forward(self, _: object, model: nn.Module, *__: object) -> tuple[torch.Tensor, Callable[..., object]]:
        """``forward_step`` of pretrain_gpt.py."""
        self._enter(Phase.FORWARD)
        with self._watcher.labelled(Kind.ACTIVATIONS):
            tokens, labels, loss_mask, attention_mask, positions = _batch(self._job, get_attr_wrapped_model(model, "vp_stage"))
        return model(tokens, positions, attention_mask, labels=labels), partial(_loss, cast("torch.Tensor", loss_mask))

    def optimizer_step(self) -> None:
        """Update this rank's share of the weights, then gather the other shares."""
        self._optimizer.step()
        self._claim()

    def zero_grad(self) -> None:
        """Set the main gradients to zero and drop the optimizer's copies."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def _stepped(self) -> list["_Stepped"]:
        """Return Megatron's optimizers: one, and a second one for experts."""
        return list(getattr(self._optimizer, "chained_optimizers", [self._optimizer]))

    def _claim(self) -> None:
        """Label the tensors that stay from step to step with their kinds."""
        claim = self._watcher.claim
        claim(Kind.OPTIMIZER_STATE, (one for each in self._stepped() for one in _states(each)))
        for chunk in self.chunks:
            if self._job.recipe.zero_stage > 1:
                _claim_shards(chunk, claim)
                continue
            buffers = (*chunk.buffers, *chunk.expert_parallel_buffers)
            claim(Kind.PARAMETERS, (*chunk.parameters(), *(buffer.param_data for buffer in buffers)))
            claim(Kind.GRADIENTS, (buffer.grad_data for buffer in buffers))

    @contextmanager
    def labels(self, watcher: Watcher) -> Iterator[None]:
        """Report the start of every backward, and label Megatron's persistent buffers and Megatron-FSDP's buckets."""
        original = schedules.backward_step

        def backward_step(*args: object, **options: object) -> object:
            self._enter(Phase.BACKWARD)
            return original(*args, **options)

        memory = parallel_state.get_global_memory_buffer()
        get_tensor = memory.get_tensor

        def kept(*args: object, **options: object) -> object:
            with watcher.labelled(Kind.WORKSPACE):
                return get_tensor(*args, **options)

        buckets = all_labelled(watcher, _BUCKETS)
        with replaced(schedules, "backward_step", backward_step), replaced(memory, "get_tensor", kept), buckets:
            yield


def _claim_shards(chunk: FullyShardedDataParallel, claim: Callable[..., None]) -> None:
    """Label Megatron-FSDP's sharded buffers with their kinds."""
    for group in chunk.param_and_grad_buffer.parameter_groups:
        for kind, buffer in (
            (Kind.PARAMETERS, group.model_weight_buffer), (Kind.OPTIMIZER_STATE, group.main_weight_buffer),
            (Kind.GRADIENTS, group.main_grad_buffer),
        ):  # fmt: skip
            if buffer is not None:
                claim(kind, (buffer.data,))


class _Stepped:
    """The attribute that this module reads from each of Megatron's optimizers."""

    optimizer: torch.optim.Optimizer


def _states(stepped: _Stepped) -> Iterator[torch.Tensor]:
    for group in stepped.optimizer.param_groups:
        yield from group["params"]
    for state in stepped.optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


# --- the model ----------------------------------------------------------------------------------------------------------------


def _chunks(job: JobSpec, config: TransformerConfig) -> list[DistributedDataParallel]:
    """Return the rank's chunks of layers, built as ``get_model`` of training/training.py does."""
    several = chunks_per_rank(job)
    return [_wrapped(job, config, at if several > 1 else None) for at in range(several)]


def _wrapped(job: JobSpec, config: TransformerConfig, at: int | None) -> DistributedDataParallel:
    options, shape = job.recipe.megatron, job.model
    with torch.device("cuda"):
        model = GPTModel(
            config, _spec(job, config, at), vocab_size=int(padded_vocabulary(job)),
            max_sequence_length=shape.positions or job.batch.seq_len,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=at),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=at),
            parallel_output=True, share_embeddings_and_output_weights=shape.tie_word_embeddings,
            position_embedding_type="learned_absolute" if shape.positions else "rope", rotary_percent=1.0, vp_stage=at,
        )  # fmt: skip
        adapt(model, job)
    wrapper = FullyShardedDataParallel if job.recipe.zero_stage > 1 else DistributedDataParallel
    return wrapper(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=job.recipe.precision == "bf16-mixed" and not options.grad_reduce_in_bf16,
            overlap_grad_reduce=options.overlap_grad_reduce, overlap_param_gather=options.overlap_param_gather,
            use_distributed_optimizer=job.recipe.zero_stage >= 1, check_for_nan_in_grad=False,
            use_megatron_fsdp=job.recipe.zero_stage > 1, data_parallel_sharding_strategy=_STRATEGIES[job.recipe.zero_stage],
            num_distributed_optimizer_instances=options.num_distributed_optimizer_instances,
            bucket_size=_bucket_size(job) if options.overlap_grad_reduce else None,
        ),
        model if job.recipe.precision == "fp32" else _narrow(config, model),
        disable_bucketing=bool(at),
    )  # fmt: skip


def _narrow(config: TransformerConfig, model: nn.Module) -> Float16Module:
    """Return the model in 16 bits.

    Megatron stores attributes on parameters. A cast of real parameters keeps them; a cast of fake ones makes new parameters, so the
    attributes are copied.
    """
    noted = {name: dict(vars(parameter)) for name, parameter in model.named_parameters()}
    made = Float16Module(config, model)
    for name, parameter in made.module.named_parameters():
        for key, value in noted[name].items():
            vars(parameter).setdefault(key, value)
    return made


def _bucket_size(job: JobSpec) -> int:
    """Return the size of a bucket: 40 million, or a million per data- and context-parallel rank if that is more. [elements]

    Source: training/training.py, get_model.
    """
    return max(40_000_000, 1_000_000 * job.mesh.dp_shard * job.mesh.cp)


def _spec(job: JobSpec, config: TransformerConfig, at: int | None) -> object:
    normalization = config.normalization
    if job.model.moe is not None:
        return get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=normalization, vp_stage=at)
    return get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=normalization)


def _config(job: JobSpec) -> TransformerConfig:
    shape, recipe, mesh, options = job.model, job.recipe, job.mesh, job.recipe.megatron
    gated, learned = is_gated(job), shape.traits.layer_norms
    dtype = _DTYPES[recipe.precision]
    several = chunks_per_rank(job)
    return TransformerConfig(
        num_layers=shape.num_hidden_layers, hidden_size=shape.hidden_size, num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_key_value_heads, ffn_hidden_size=shape.intermediate_size, kv_channels=shape.head_dim,
        hidden_dropout=_DROPOUT * drops_hidden(job), attention_dropout=_DROPOUT * drops_scores(job),
        normalization="LayerNorm" if learned else "RMSNorm", gated_linear_unit=gated,
        activation_func=nn.functional.silu if gated else nn.functional.gelu, add_bias_linear=learned,
        add_qkv_bias=shape.attention_bias, qk_layernorm=norms_heads(job),
        bf16=dtype is torch.bfloat16, fp16=dtype is torch.float16, params_dtype=dtype, pipeline_dtype=dtype,
        gradient_accumulation_fusion=options.gradient_accumulation_fusion, bias_activation_fusion=True, bias_dropout_fusion=True,
        masked_softmax_fusion=options.masked_softmax_fusion, attention_softmax_in_fp32=options.attention_softmax_in_fp32,
        cross_entropy_loss_fusion=options.cross_entropy_fusion_impl is not None, perform_initialization=False,
        tensor_model_parallel_size=mesh.tp, pipeline_model_parallel_size=mesh.pp, sequence_parallel=recipe.sequence_parallel,
        virtual_pipeline_model_parallel_size=several if several > 1 else None,
        microbatch_group_size_per_vp_stage=options.microbatch_group_size_per_virtual_pipeline_stage or mesh.pp,
        overlap_p2p_comm=several > 1 and options.overlap_p2p_comm, batch_p2p_comm=several == 1 or not options.overlap_p2p_comm,
        deallocate_pipeline_outputs=True, **_cut(job), **_recomputed(job), **_experts(job),
        defer_embedding_wgrad_compute=options.defer_embedding_wgrad_compute, wgrad_deferral_limit=options.wgrad_deferral_limit,
    )  # fmt: skip


def _cut(job: JobSpec) -> dict[str, object]:
    """Return the pipeline layout if chunks differ in their number of layers; empty otherwise."""
    if job.mesh.pp == 1:
        return {}
    every = [stages_of(at, job) for at in range(job.mesh.pp)]
    chunks = [every[at][chunk] for chunk in range(len(every[0])) for at in range(job.mesh.pp)]
    if len({chunk.layers for chunk in chunks}) == 1:
        return {}
    layout = "|".join("E" * one.is_first + "t" * one.layers + "L" * one.is_last for one in chunks)
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout  # noqa: PLC0415

    return {"pipeline_model_parallel_layout": PipelineParallelLayerLayout.from_str(layout, job.mesh.pp)}


def _recomputed(job: JobSpec) -> dict[str, object]:
    options = job.recipe.megatron
    if job.recipe.recompute == "none":
        return {}
    if job.recipe.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": options.recompute_modules.split(",")}
    return {
        "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": options.recompute_num_layers
    }  # fmt: skip


def _experts(job: JobSpec) -> dict[str, object]:
    moe, options = job.model.moe, job.recipe.megatron
    if moe is None:
        return {}
    dense = [0] * moe.num_dense_layers
    sigmoid = job.model.family == "deepseek_v3"
    return {
        "num_moe_experts": moe.num_experts, "moe_router_topk": moe.num_experts_per_tok,
        "moe_ffn_hidden_size": moe.moe_intermediate_size, "expert_model_parallel_size": job.mesh.ep,
        "expert_tensor_parallel_size": options.expert_ways(job.mesh.tp), "moe_grouped_gemm": False,
        "moe_layer_freq": [*dense, *[1] * (job.model.num_hidden_layers - len(dense))],
        "moe_router_load_balancing_type": "aux_loss" if options.moe_aux_loss else "none",
        "moe_aux_loss_coeff": 0.01 * options.moe_aux_loss, "moe_token_dispatcher_type": options.moe_token_dispatcher_type,
        "moe_router_score_function": "sigmoid" if sigmoid else "softmax", "moe_router_enable_expert_bias": sigmoid,
        "moe_router_dtype": options.moe_router_dtype,
        "moe_shared_expert_intermediate_size": shared_width(job) or None,
        "moe_shared_expert_gate": job.model.family in GATED_SHARED,
        "moe_shared_expert_overlap": options.moe_shared_expert_overlap and shared_width(job) > 0,
    }  # fmt: skip


def _optimizer_config(job: JobSpec) -> OptimizerConfig:
    recipe, options = job.recipe, job.recipe.megatron
    dtype = _DTYPES[recipe.precision]
    return OptimizerConfig(
        optimizer="adam", lr=1e-4, bf16=dtype is torch.bfloat16, fp16=dtype is torch.float16, params_dtype=dtype, clip_grad=0.0,
        use_distributed_optimizer=recipe.zero_stage >= 1, overlap_param_gather=options.overlap_param_gather,
    )  # fmt: skip


# --- a micro-batch ------------------------------------------------------------------------------------------------------------

_Batch = tuple[torch.Tensor | None, ...]


def _batch(job: JobSpec, at: int | None) -> _Batch:
    """Return what ``get_batch`` of pretrain_gpt.py returns on the first tensor-parallel rank.

    Only the first and the last chunk of the pipeline get a batch.
    """
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=at)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=at)
    if not (first or last):
        return (None,) * 5
    size, device = (job.batch.micro_batch_size, job.batch.seq_len), "cuda"
    tokens, labels, positions = (torch.empty(size, dtype=torch.long, device=device) for _ in range(3))
    loss_mask, mask = torch.empty(size, device=device), None
    if job.recipe.megatron.create_attention_mask_in_dataloader:
        mask = torch.empty(size[0], 1, size[1], size[1], dtype=torch.bool, device=device)
    return tokens, labels, loss_mask, mask, positions


def _loss(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """``loss_func`` of pretrain_gpt.py."""
    losses, counted = output.view(-1).float(), loss_mask.view(-1).float()
    loss = torch.sum(losses * counted)
    tokens = counted.sum().clone().detach().to(torch.int)
    reported = torch.cat([loss.clone().detach().view(1), tokens.view(1)])
    return loss, tokens, {"lm loss": reported}


@contextmanager
def megatron_ranks(job: JobSpec) -> Iterator[None]:
    """Create Megatron's process groups inside the existing group, and destroy them at the end."""
    mesh, several = job.mesh, chunks_per_rank(job)
    parallel_state.initialize_model_parallel(
        mesh.tp, mesh.pp, several if several > 1 else None, context_parallel_size=mesh.cp, expert_model_parallel_size=mesh.ep,
        expert_tensor_parallel_size=job.recipe.megatron.expert_ways(mesh.tp) if job.model.moe is not None else None,
        num_distributed_optimizer_instances=job.recipe.megatron.num_distributed_optimizer_instances,
        create_gloo_process_groups=False,
    )  # fmt: skip
    model_parallel_cuda_manual_seed(1)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
