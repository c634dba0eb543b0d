"""The training recipe: engine, stage, precision, optimizer and other choices. Formulas may branch on them."""

import math
from functools import cache
from typing import Annotated, Final, Literal

from zeroplan.errors import SpecError, refuse
from zeroplan.spec.base import Count, CountOrZero, Degree, Range, Spec
from zeroplan.spec.hardware import Kernels
from zeroplan.spec.pipeline import PipelineSchedule

StepKernels = Literal["eager", "fused", "compiled"]
Engine = Literal["paper", "ddp", "fsdp1", "fsdp2", "deepspeed", "megatron"]
#: Engines with closed formulas only; `zeroplan verify` cannot run them.
ON_PAPER: tuple[Engine, ...] = ("paper", "megatron")
Stage = Literal[0, 1, 2, 3]
Precision = Literal["bf16-mixed", "fp16-mixed", "bf16", "fp32"]
Optimizer = Literal[
    "adamw", "adam", "sgd", "sgd-momentum", "adagrad", "rmsprop", "adafactor", "lion", "muon", "adamw-8bit", "paged-adamw-8bit",
    "paged-adamw-32bit", "lion-32bit", "lion-8bit", "paged-lion-32bit", "paged-lion-8bit", "ademamix-32bit", "ademamix-8bit",
    "paged-ademamix-32bit", "paged-ademamix-8bit", "rmsprop-32bit", "rmsprop-8bit", "torchao-adamw-8bit", "torchao-adamw-4bit",
    "torchao-adamw-fp8", "torchao-adamw", "schedule-free-adamw", "schedule-free-sgd", "stable-adamw", "flash-adamw",
    "flash-adamw-32bit", "adam-mini", "apollo", "galore", "soap", "shampoo", "shampoo-1024", "grokadamw", "lomo", "adalomo",
    "dion-muon", "te-adam", "te-adam-remainders", "te-adam-masters",
]  # fmt: skip
#: Both forms of Adam, whose steps need the same memory.
ADAM: tuple[Optimizer, ...] = ("adamw", "adam")
#: Optimizers whose step on a tensor is elementwise.
STEPS_ALONE: tuple[Optimizer, ...] = (
    "adamw", "adam", "sgd", "sgd-momentum", "adagrad", "rmsprop", "lion", "adamw-8bit", "paged-adamw-8bit",
)  # fmt: skip
#: Optimizers that update weights inside the backward and keep no gradients.
LOMO: tuple[Optimizer, ...] = ("lomo", "adalomo")
Float8Recipe = Literal["tensorwise", "rowwise", "mxfp8", "nvfp4"]
OptimizerImpl = Literal["foreach", "fused", "forloop"]
Recompute = Literal["none", "selective", "full"]
Attention = Literal["sdpa", "flash", "eager"]
Loss = Literal["full", "chunked", "fused", "log-probs"]
LogProbs = Literal[
    "tiles",
    "divergence",
    "in place",
    "entropy",
    "chunks",
    "columns",
    "kernels",
    "jsd",
    "kd",
    "asft",
    "jsd and sft",
    "eaft",
    "pairs",
    "pairs in 16 bits",
]
#: verl's losses of all logits that the model returns, and all of verl's.
OF_ALL_LOGITS: tuple[LogProbs, ...] = ("in place", "entropy")
OF_VERL: tuple[LogProbs, ...] = (*OF_ALL_LOGITS, "chunks", "kernels")
#: Losses that compare all logits with a teacher's.
WITH_TEACHERS_LOGITS: tuple[LogProbs, ...] = ("jsd", "kd", "asft", "jsd and sft")
#: Losses of ORPO, which read the logits that the model returns.
OF_PAIRS: tuple[LogProbs, ...] = ("pairs", "pairs in 16 bits")
#: The names that ``fused_kernels`` accepts.
FUSED = (
    "cross-entropy", "rms-norm", "rope", "lora", "axolotl-lora", "liger-rms-norm", "liger-swiglu", "loss-in-pieces",
    "norm-in-one", "deepep", "hybridep", "router-kept", "inputs-kept", "output-copied", "te-linear", "te-experts", "router-in-fp32",
    "output-scaled", "int4-qat", "axolotl-qat", "grouped-experts", "looped-experts", "te-float8", "compiled-blocks",
    "compiled-loss", "narrow-loss", "in-place-loss", "gathered-logits", "prime-rl-experts",
)  # fmt: skip
LinearAttention = Literal["kernels", "torch"]
#: The name of linear attention by kernels among the parts that fused kernels replace (:attr:`Compute.fused`).
LINEAR_KERNELS: Final = "linear-kernels"
#: Of these, what runs the loss over all logits.
OF_LOSS = ("cross-entropy", "loss-in-pieces", "compiled-loss", "narrow-loss", "in-place-loss")
#: Quantisation-aware training: torchtune's layers, and those that Axolotl makes.
ROUNDING = ("int4-qat", "axolotl-qat")
#: Experts of NeMo AutoModel of which every rank gathers all tokens, multiplied together or one by one.
GATHERING = frozenset({"grouped-experts", "looped-experts"})
#: How NeMo AutoModel's own experts get their tokens: from the kernels of DeepEP or HybridEP, or by gathering all tokens.
SENDING = frozenset({"deepep", "hybridep"}) | GATHERING
#: Router and experts of prime-rl's own models.
PRIME_RL = "prime-rl-experts"
#: The names that Liger has.
OF_LIGER = frozenset({"rope", "liger-rms-norm", "liger-swiglu"})
ActivationModel = Literal["module", "megatron"]
OffloadDevice = Literal["none", "cpu", "nvme"]
WhoseModules = Literal["transformers", "torchtitan", "torchtitan-0.3"]
TORCHTITANS = ("torchtitan", "torchtitan-0.3")


def kernels_under(engine: str | None, kernels: str | None) -> str | None:
    """Return fused kernels without those that are modelled with DDP alone; all of them for ``ddp``.

    >>> kernels_under("fsdp2", "rope,axolotl-lora"), kernels_under("ddp", "axolotl-lora"), kernels_under("fsdp2", "axolotl-lora")
    ('rope', 'axolotl-lora', None)
    """
    if kernels is None or engine == "ddp":
        return kernels
    return ",".join(one for one in kernels.split(",") if one.strip() != "axolotl-lora") or None


class DdpOptions(Spec):
    """Arguments of ``torch.nn.parallel.DistributedDataParallel``; torch's defaults."""

    gradient_as_bucket_view: bool = False
    """Gradients are views of DDP's reduction buckets and need no memory of their own."""
    bucket_cap_mb: Count | None = None
    """The size of a bucket of gradients, in MiB. ``None``: 25, and 1 for the first bucket."""
    find_unused_parameters: bool = False
    """DDP copies the model's output after every forward (``_DDPSink``), and all-reduces a map of the used parameters."""
    static_graph: bool = False
    """DDP learns from the first step which parameters are used, and copies nothing from the second step on."""
    wrap_one_rank: bool = False
    """A single rank is wrapped in DDP too, as with ``gradient_as_bucket_view``. By default a single rank runs a plain loop, as with
    accelerate and transformers' Trainer."""
    step_in_backward: bool = False
    """In a plain loop on one GPU: each weight has its own optimizer, which steps and frees the gradient as soon as it is computed
    (``register_post_accumulate_grad_hook``; torchtune's ``optimizer_in_bwd``)."""
    compiled: bool = False
    """``torch.compile`` compiles the whole model. Its backward returns all gradients at its end, where a micro-batch finds those of
    earlier ones. Nothing else of the compiler is counted: activations as without it, which is a bound."""


class Fsdp2Options(Spec):
    """Arguments of ``fully_shard``; torch's defaults."""

    reshard_after_forward: bool | Annotated[int, Range(2, 10**6)] | None = None
    """``None``: True at stage 3, False at stage 2; an int keeps the parameters in that many shards between forward and
    backward."""
    reduce_dtype: Literal["fp32", "param"] = "fp32"
    """Under mixed precision: gradients are reduced in fp32, or in the parameters' compute dtype."""
    cpu_offload: bool = False
    """``CPUOffloadPolicy``: sharded parameters, gradients and optimizer states are in host memory, and the CPU runs the
    optimizer."""
    torch: Literal["2.13", "2.15"] | None = None
    """The torch release of ``fully_shard``: 2.13 covers 2.11 to 2.14, whose code is the same where it matters (2.11.0, 2.12.0,
    2.13.0, 2.14.0 and 2.14.1 were checked); 2.15 covers 2.15.0. ``None``: 2.13; a run uses the installed release."""

    modules: WhoseModules = "transformers"
    """Whose modules train: transformers' (everything outside the blocks is one FSDP2 unit), or torchtitan's own Llama 3 of release
    0.2.2 or 0.3.0 (the embedding is one unit, the last norm with the head another)."""

    ends_apart: bool = False
    """The embedding is one ``fully_shard`` unit, and the last norm with the head another, which stays gathered until its backward,
    as in accelerate 1.15 and torchtitan. With a tied head all of it is one unit."""

    keeps_last: bool = False
    """The last block stays gathered from its forward to its backward, as in NeMo AutoModel."""

    forward_prefetch: Annotated[int, Range(0, 8)] = 0
    """So many blocks ahead are gathered while a block runs its forward (``set_modules_to_forward_prefetch``)."""

    backward_prefetch: Annotated[int, Range(1, 8)] = 1
    """So many blocks ahead are gathered while a block runs its backward (``set_modules_to_backward_prefetch``)."""

    step_in_backward: bool = False
    """Each parameter has its own optimizer, which steps right after the reduction of its unit and frees the gradient
    (``register_post_accumulate_grad_hook``; torchtune's ``optimizer_in_bwd``)."""

    sequence_parallel: bool = True
    """Tensor-parallel ranks split hidden states along the sequence, as in torchtitan. False: every rank has whole hidden states
    (AutoModel's default); the answer is then at most a few hidden states too high."""

    float8_all_gather: bool = False
    """Ranks cast their shards of float8 layers' weights and gather them in float8 (torchao's ``enable_fsdp_float8_all_gather``)."""

    float8_layers: Count | None = None
    """The number of blocks, from the first on, that run in float8, as in torchtitan's NVFP4 recipes. The other blocks stay in 16
    bits. Modelled with ``modules="torchtitan-0.3"``."""

    @property
    def gathers_ahead(self) -> bool:
        """Whether blocks gather others explicitly, or the last one stays gathered."""
        return self.keeps_last or self.forward_prefetch > 0 or self.backward_prefetch > 1

    @property
    def shards_ends(self) -> bool:
        """Whether embedding and head are separate FSDP2 units."""
        return self.ends_apart or self.are_torchtitans

    @property
    def are_torchtitans(self) -> bool:
        """Whether torchtitan's own modules train."""
        return self.modules in TORCHTITANS

    @property
    def of_torch_2_15(self) -> bool:
        """Whether the code is that of torch 2.15."""
        return self.torch == "2.15"


class Fsdp1Options(Spec):
    """Arguments of ``FullyShardedDataParallel``, and how it wraps a model; torch's defaults."""

    use_orig_params: bool = False
    """The optimizer updates the model's own parameters, as views of this rank's flat shard. Otherwise it updates flat shards."""
    backward_prefetch: Literal["backward_pre", "backward_post", "no_prefetch"] = "backward_pre"
    """When FSDP1 all-gathers the next block in the backward: before the current block's gradients, after them, or when it runs."""
    forward_prefetch: bool = False
    """FSDP1 all-gathers the next block while the current block runs its forward."""
    limit_all_gathers: bool = True
    """The CPU waits while two all-gathers are in flight. It changes reserved memory, not allocated memory."""
    reduce_dtype: Literal["fp32", "param"] = "param"
    """Under mixed precision: gradients are reduced in fp32, or in the parameters' compute dtype, as accelerate does."""
    wraps_adapters: bool = True
    """Every matrix of an adapter is its own FSDP1 unit (peft's ``fsdp_auto_wrap_policy``); the block's unit is then frozen."""
    ignores_adapters: bool = False
    """FSDP1 ignores adapters (``ignored_modules``): every rank holds them whole and all-reduces their gradients one by one, as in
    fms-acceleration with fused kernels."""
    checkpoints_units: bool = False
    """The checkpoint is around a block's FSDP1 unit, as in transformers before 4.53; since then the unit is around the checkpoint.
    Checkpoints around frozen units stay alive until the end of the backward, with their gradients."""
    cpu_offload: bool = False
    """``CPUOffload(offload_params=True)``: sharded parameters, gradients and optimizer states are in host memory, and the CPU runs
    the optimizer. The gradients' shards stay on the GPU until the backward ends."""


@cache
def _fused_parts(kernels: str) -> tuple[str, ...]:
    named = tuple(name.strip() for name in kernels.split(","))
    for name in named:
        if name not in FUSED:
            raise SpecError(f"fused_kernels has no {name!r}; there are {', '.join(FUSED)}")
    return tuple(one for one in FUSED if one in named)


def ways_of_resharding(options: Fsdp2Options) -> int | None:
    """Return the shards between forward and backward, if ``reshard_after_forward`` is a number.

    >>> ways_of_resharding(Fsdp2Options(reshard_after_forward=8)), ways_of_resharding(Fsdp2Options(reshard_after_forward=True))
    (8, None)
    """
    ways = options.reshard_after_forward
    return None if isinstance(ways, bool) else ways


#: The names that ``--recompute-modules`` accepts (megatron/core/transformer/transformer_config.py).
RECOMPUTED_MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")


class MegatronOptions(Spec):
    """Megatron-LM's arguments (2026-08), with its names and, except for dropout, its defaults.

    The overlap options change only time; the others change memory.
    """

    pretrains: Literal["gpt", "bert", "t5"] = "gpt"
    """Megatron-LM's script: ``bert`` is ``pretrain_bert.py``; ``t5`` is ``pretrain_t5.py``, for which the job describes the decoder
    and its sequences. Both need a model of GPT-2's family."""
    bert_binary_head: bool = True
    """False is ``--bert-no-binary-head``: BERT only predicts masked tokens."""
    encoder_num_layers: Count | None = None
    """T5's ``--encoder-num-layers``. ``None``: as many as the decoder has."""
    encoder_seq_length: Count | None = None
    """T5's ``--encoder-seq-length``. ``None``: as long as the decoder's. [tokens]"""
    overlap_grad_reduce: bool = False
    """``--overlap-grad-reduce``: gradient reduction overlaps the last micro-batch's backward."""
    overlap_param_gather: bool = False
    """``--overlap-param-gather``: the all-gather of updated weights overlaps the first micro-batch's forward."""
    overlap_p2p_comm: bool = True
    """False is ``--no-overlap-p2p-communication``: an interleaved pipeline waits for every send, as 1F1B does."""
    microbatch_group_size_per_virtual_pipeline_stage: Count | None = None
    """Micro-batches that an interleaved pipeline runs through a chunk before the next chunk. ``None``: as many as ranks."""
    transformer_impl: Literal["transformer_engine", "local"] = "transformer_engine"
    """``--transformer-impl``: the layers' implementation. ``local`` has only eager attention, with a buffer for the scores."""
    cross_entropy_fusion_impl: Literal["native", "te", "verl"] | None = None
    """``--cross-entropy-loss-fusion`` with this ``--cross-entropy-fusion-impl``: ``native`` makes another fp32 copy of the
    logits; ``verl`` is verl's fused head and loss, which never has whole logits. ``None``: not fused."""
    transformer_engine_release: Literal["2.2", "2.17", "2.18"] = "2.18"
    """``2.17``: Transformer Engine 2.3 to 2.17, whose fused loss (``cross_entropy_fusion_impl`` ``te``) writes the gradient over
    the 16-bit logits; since 2.18 the gradient is a separate fp32 tensor. ``2.2``: 2.2 or older, which allocates a placeholder per
    weight gradient for a moment; later ones keep one placeholder for all weights of a shape."""
    cp_comm_type: Literal["p2p", "a2a"] = "p2p"
    """``--cp-comm-type``: how context-parallel ranks exchange tokens. ``a2a`` exchanges heads by all-to-all, and keeps attention's
    output before and after it."""
    hidden_dropout: bool | None = None
    """Whether ``--hidden-dropout`` is above 0, which keeps masks. ``None``: only for GPT-2's family (Megatron-LM: 0.1, always)."""
    attention_dropout: bool | None = None
    """Whether ``--attention-dropout`` is above 0, with which eager attention keeps masks. ``None``: only for GPT-2's family."""
    recompute_modules: str = "core_attn"
    """``--recompute-modules``, separated by commas, for recompute ``selective``: ``core_attn``, ``layernorm``, ``mla_up_proj``,
    ``mlp``, ``moe``, ``moe_act`` and ``shared_experts``."""
    recompute_num_layers: Count = 1
    """``--recompute-num-layers`` with ``--recompute-method uniform``, for recompute ``full``: layers per checkpoint."""
    masked_softmax_fusion: bool = True
    """False is ``--no-masked-softmax-fusion``: with ``local`` layers the softmax is torch's."""
    attention_softmax_in_fp32: bool = False
    """``--attention-softmax-in-fp32``: an unfused softmax keeps its result in fp32 (Megatron-LM sets it with
    ``--apply-query-key-layer-scaling``)."""
    create_attention_mask_in_dataloader: bool = True
    """False is ``--no-create-attention-mask-in-dataloader``: the batch has no mask (one byte per pair of tokens)."""
    gradients_beside: CountOrZero = 0
    """Copies of gradients in 16 bits beside the main gradients, as nanotron has: the first until a micro-batch's backward ends, and
    those in DDP's buckets, which stay. Without main weights all of them are in buckets."""
    main_weights: bool = True
    """False is nanotron's ``accumulate_grad_in_fp32: false``: main gradients and Adam's moments have the 16 bits of the weights,
    and there are no main weights in fp32."""
    tp_comm_overlap: bool = False
    """``--tp-comm-overlap``: tensor-parallel ranks exchange in Transformer Engine's buffers, a line beside the allocator. Step
    times are those without it."""
    tp_comm_overlap_cfg: bool = False
    """``--tp-comm-overlap-cfg``: with settings of the user's own; the largest buffers that they may ask for count."""
    deterministic_mode: bool = False
    """``--deterministic-mode``: the experts' outputs are kept and added in a fixed order."""
    gradient_accumulation_fusion: bool = True
    """False is ``--no-gradient-accumulation-fusion``: a weight's gradient is a separate tensor, added to the main gradient."""
    defer_embedding_wgrad_compute: bool = False
    """``--defer-embedding-wgrad-compute``: the last pipeline rank keeps the head's inputs and output gradients, and computes the
    gradient of its weight after all backwards."""
    wgrad_deferral_limit: CountOrZero = 0
    """``--wgrad-deferral-limit``: the number of deferred micro-batches; 0: all."""
    grad_reduce_in_bf16: bool = False
    """``--grad-reduce-in-bf16``: main gradients have 16 bits; the optimizer's step copies them to fp32."""
    use_precision_aware_optimizer: bool = False
    """``--use-precision-aware-optimizer``: stores only the lower 16 bits of a bf16 weight's fp32 copy, and copies no gradients."""
    main_grads_dtype: Literal["fp32", "bf16"] = "fp32"
    """``--main-grads-dtype`` of that optimizer."""
    main_params_dtype: Literal["fp32", "fp16"] = "fp32"
    """``--main-params-dtype`` of that optimizer."""
    exp_avg_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = "fp32"
    """``--exp-avg-dtype`` of that optimizer."""
    exp_avg_sq_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = "fp32"
    """``--exp-avg-sq-dtype`` of that optimizer."""
    optimizer_offload_fraction: Annotated[float, Range(0, 1)] = 0.0
    """``--optimizer-offload-fraction`` with ``--optimizer-cpu-offload``, of that optimizer: the share of main weights and moments
    in host memory, which the CPU updates. Those on the GPU are in fp32."""
    fp8_format: Literal["e4m3", "hybrid"] | None = None
    """``--fp8-format``: the layers' matrices multiply in FP8, from copies of weights that stay and of inputs that are kept."""
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = "delayed"
    """``--fp8-recipe``: one scale for a tensor, of its history or its own, or one for each block of it."""
    fp8_param_gather: bool = False
    """``--fp8-param-gather``: those weights exist in FP8 alone, beside the optimizer's in fp32."""
    fp8_transposes: bool = True
    """False: Blackwell, whose products take FP8 in either layout, so tensors with one scale have no transposed copy. Not an
    argument; without a GPU's name Hopper is assumed."""
    use_layer_wise_param_layout: bool = True
    """False is ``--no-use-layer-wise-param-layout``, for Muon at stage 1: gradients are all-reduced in buffers without padding."""
    num_distributed_optimizer_instances: Degree = 1
    """``--num-distributed-optimizer-instances``: groups of data-parallel ranks, each of which shards the optimizer."""
    make_vocab_size_divisible_by: Count = 128
    """The vocabulary is padded to a multiple of this times the tensor-parallel ranks."""
    swiglu: bool | None = None
    """``--swiglu``: MLPs and experts have a gate. ``None``: as the model's family has it."""
    apply_rope_fusion: bool = True
    """False is ``--no-rope-fusion``: rotary positions are torch's operators, with tables and intermediate results of their own."""
    qk_layernorm: bool | None = None
    """``--qk-layernorm``: queries and keys are normalised over each head. ``None``: as the model's family has it."""
    expert_tensor_parallel_size: Degree | None = None
    """``--expert-tensor-parallel-size``: ranks that split every expert. ``None``: as many as tensor-parallel ranks."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex", "deepep"] = "alltoall"  # noqa: S105  tokens of text
    """How tokens get to their experts (Megatron-LM's default ``allgather`` is rarely used). ``flex``: HybridEP, whose buffers are
    outside torch's allocator. ``deepep``: Megatron-LM's ``flex`` with DeepEP, whose buffers are a line beside the allocator."""
    moe_router_num_groups: Degree = 1
    """``--moe-router-num-groups``: groups that the experts are in. With ``flex`` it changes what a rank sends."""
    moe_router_group_topk: Degree = 1
    """``--moe-router-group-topk``: groups whose experts one token visits."""
    moe_grouped_gemm: bool = True
    """``--moe-grouped-gemm``: one grouped product for all experts of a rank (Megatron-LM's default: one expert after the other)."""
    moe_router_dtype: Literal["fp32"] | None = None
    """Routing weights in fp32; ``None``: in the activations' dtype."""
    moe_shared_expert_intermediate_size: Count | None = None
    """Width of an expert that every token visits; ``None``: there is none."""
    moe_shared_expert_overlap: bool = False
    """That expert runs beside the dispatch and the combination of tokens, and keeps its gathered input."""
    overlap_moe_expert_parallel_comm: bool = False
    """``--overlap-moe-expert-parallel-comm``: the next micro-batch's forward runs layer by layer beside the current backward."""
    moe_aux_loss: bool = False
    """Whether ``--moe-aux-loss-coeff`` is above 0, which keeps the scores of all experts."""
    core_release: Literal["0.12", "0.13"] = "0.13"
    """``0.12``: Megatron-Core 0.12 or older, which multiplies the experts' outputs with the routing weights and keeps the outputs;
    since 0.13 it multiplies the activations between the experts' two matrices."""
    mtp_num_layers: CountOrZero = 0
    """``--mtp-num-layers``: modules for multi-token prediction on the last pipeline rank, each with a layer like the model's last
    one and its own loss."""
    last_tokens: Literal["embedding", "reranker"] | None = None
    """ms-swift's tasks whose loss reads the last token of each sequence: ``embedding`` has no head and normalises hidden states;
    ``reranker`` (``generative_reranker``) multiplies them with two rows of the head."""
    hybrid_layer_pattern: str | None = None
    """``--hybrid-layer-pattern`` without ``|`` (use ``pipeline_layers``): one letter per layer, ``M`` for Mamba-2, ``*`` for
    attention, ``-`` for an MLP and ``E`` for experts. ``None``: each layer has attention and an MLP."""
    mamba_state_dim: Count = 128
    """``--mamba-state-dim``, of Mamba-2 layers."""
    mamba_head_dim: Count = 64
    """``--mamba-head-dim``."""
    mamba_num_groups: Count = 8
    """``--mamba-num-groups``: groups of heads that share B and C."""
    mamba_num_heads: Count | None = None
    """``--mamba-num-heads``. ``None``: twice the hidden width divided by ``mamba_head_dim``."""

    def expert_ways(self, tp: int) -> int:
        """Return the number of ranks that split every expert (Megatron-LM, arguments.py, validate_args)."""
        return self.expert_tensor_parallel_size or tp

    def check_rules(self) -> None:
        """Raise SpecError where Megatron-LM raises (megatron/training/arguments.py, validate_args)."""
        if self.moe_router_group_topk > self.moe_router_num_groups:
            raise SpecError(
                f"megatron.moe_router_group_topk={self.moe_router_group_topk} exceeds megatron.moe_router_num_groups="
                f"{self.moe_router_num_groups}; a token cannot visit more groups than there are"
            )
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            raise SpecError("megatron.overlap_param_gather needs megatron.overlap_grad_reduce=true; set both, or neither")
        narrow = (self.main_grads_dtype, self.main_params_dtype, self.exp_avg_dtype, self.exp_avg_sq_dtype)
        if not self.use_precision_aware_optimizer and set(narrow) != {"fp32"}:
            raise SpecError(
                f"megatron: dtypes of main gradients, main weights and moments ({', '.join(narrow)}) other than fp32 need "
                "megatron.use_precision_aware_optimizer=true; set it, or leave them out"
            )
        if self.optimizer_offload_fraction and not self.use_precision_aware_optimizer:
            raise SpecError(
                "megatron.optimizer_offload_fraction needs megatron.use_precision_aware_optimizer=true; set both, or neither"
            )
        if not self.main_weights and (self.use_precision_aware_optimizer or self.fp8_format is not None):
            raise SpecError(
                "megatron.main_weights=false is nanotron's, which has neither megatron.use_precision_aware_optimizer nor "
                "megatron.fp8_format; leave them out"
            )
        if self.tp_comm_overlap_cfg and not self.tp_comm_overlap:
            raise SpecError("megatron.tp_comm_overlap_cfg needs megatron.tp_comm_overlap=true; set both, or neither")
        if self.fp8_param_gather and self.fp8_format is None:
            raise SpecError("megatron.fp8_param_gather needs megatron.fp8_format; set e4m3 or hybrid, or leave it out")
        unknown = [name for name in self.recompute_modules.split(",") if name not in RECOMPUTED_MODULES]
        if unknown:
            raise SpecError(
                f"megatron.recompute_modules={self.recompute_modules!r}: {unknown[0]!r} is none of {', '.join(RECOMPUTED_MODULES)}"
            )
        if self.defer_embedding_wgrad_compute and not self.gradient_accumulation_fusion:
            raise SpecError(
                "megatron.defer_embedding_wgrad_compute needs megatron.gradient_accumulation_fusion=true; set both, or neither"
            )


#: A common smaller ``reduce_bucket_size``: a tenth of the default. [elements]
SMALL_BUCKET = 50_000_000


class DeepSpeedOptions(Spec):
    """The keys of DeepSpeed's ``zero_optimization`` that change memory; DeepSpeed's defaults, sizes in elements.

    Four fields are not keys of that section: ``grad_accum_dtype`` is in ``data_types``, ``torch_adam`` in ``optimizer.params``;
    ``zero_init`` and ``flatten_on_accelerator`` set how the model gets to the GPU. DeepSpeed's sections ``offload_optimizer`` and
    ``offload_param`` are flat fields here, with the section's name as prefix.
    """

    reduce_bucket_size: Count = 500_000_000
    """The bucket's size: DeepSpeed reduces gradients when this many elements are ready."""
    overlap_comm: bool | None = None
    """``None``: True at stage 3, False below."""
    contiguous_gradients: bool = True
    """Gradients are copied into one flat bucket as they arrive; at stages 1 and 2 always if the optimizer is in host memory."""
    reduce_scatter: bool = True
    """DeepSpeed reduces each part of a bucket to the rank that owns it, through a copy if several do; False: one all-reduce."""
    compute_grad_norm: bool = True
    """Stages 1 and 2 only: False skips the gradient norm, which is computed in fp64."""
    sub_group_size: Count = 1_000_000_000
    """Stage 3: the rank's optimizer step updates this many elements at a time."""
    stage3_prefetch_bucket_size: CountOrZero = 50_000_000
    """Stage 3 prefetches parameters of up to this many elements."""
    stage3_param_persistence_threshold: CountOrZero = 100_000
    """Stage 3 never releases parameters with fewer elements."""
    stage3_model_persistence_threshold: Annotated[int, Range(0, 2**63 - 1)] = 2**63 - 1
    """The most elements of such persistent parameters."""
    stage3_max_live_parameters: CountOrZero = 1_000_000_000
    """The most elements that are gathered at the same time."""
    stage3_max_reuse_distance: CountOrZero = 1_000_000_000
    """A parameter that is used again within this many elements stays gathered."""
    stage3_allgather_sequential: bool = False
    """Parameters are gathered one by one instead of in flat groups."""
    memory_efficient_linear: bool = True
    """Stage 3: with False, torch's own ``linear`` runs and saves the gathered weight from the forward to the backward. DeepSpeed
    before July 2026 also did that in models that were not built under ``zero.Init``."""
    zero_hpz_partition_size: Degree = 1
    """ZeRO++: the ranks (usually of one node) that shard a second copy of the weights from the forward to the optimizer's step."""
    zero_quantized_weights: bool = False
    """ZeRO++: all-gathers send weights in 8 bits."""
    zero_quantized_gradients: bool = False
    """ZeRO++: gradients are reduced in 4 bits, within nodes and then across."""
    gpus_per_node: Degree = 8
    """GPUs that one process sees. It is not a key of DeepSpeed; only ``zero_quantized_gradients`` uses it."""
    grad_accum_dtype: Literal["fp32", "param"] = "param"
    """``data_types.grad_accum_dtype``: the dtype of the sum of several micro-batches' gradients."""
    torch_adam: bool = False
    """``optimizer.params.torch_adam``: Adam is torch's, not DeepSpeed's own kernel; True also if a script passes torch's Adam."""
    zero_init: bool = True
    """Stage 3: the model is built under ``deepspeed.zero.Init``, sharded from the start."""
    flatten_on_accelerator: bool = True
    """Stages 1 and 2: the flat copy of the weights is made on the GPU, as DeepSpeed does while it has room for both;
    otherwise it goes through host memory, so this copy alone never makes a job fail."""
    offload_optimizer: OffloadDevice = "none"
    """``offload_optimizer.device``: where the fp32 weights and the optimizer's state are; the CPU runs the step."""
    offload_optimizer_pin_memory: bool = True
    """The optimizer's tensors are in page-locked memory."""
    offload_optimizer_buffer_count: Count = 4
    """With ``nvme``: page-locked buffers, each for one tensor of the largest sub-group."""
    offload_optimizer_pipeline_read: bool = False
    """With ``nvme``: the next sub-group is read while this one steps."""
    offload_optimizer_pipeline_write: bool = False
    """With ``nvme``: the last sub-group is written while this one steps."""
    offload_param: OffloadDevice = "none"
    """``offload_param.device``: where this rank's share of the weights is (stage 3)."""
    offload_param_pin_memory: bool = True
    """The share of the weights is in page-locked memory."""
    offload_param_buffer_count: Count = 5
    """With ``nvme``: how many of those buffers."""
    offload_param_buffer_size: Count = 100_000_000
    """With ``nvme``: page-locked buffers, each for one share of a parameter."""
    offload_param_max_in_cpu: CountOrZero = 1_000_000_000
    """With ``nvme``: elements of weights that stay in host memory."""

    @property
    def offloads(self) -> bool:
        """Whether anything is off the GPU."""
        return self.offload_optimizer != "none" or self.offload_param != "none"

    @property
    def offloads_to_nvme(self) -> bool:
        """Whether anything is on a disk."""
        return "nvme" in (self.offload_optimizer, self.offload_param)


#: Experts of all ranks are visited equally often. [thousandths]
EVEN: Final = 1000


class RecipeSpec(Spec):
    """Everything about the run that is structure, not a number.

    ``optimizer_impl=None``: the engine's own default: foreach under torch (CUDA), fused under DeepSpeed, whose Adam has a
    kernel of its own unless ``deepspeed.torch_adam`` is set.
    """

    engine: Engine = "fsdp2"
    """The engine that holds the model."""
    imbalance: Annotated[float, Range(1, 1e6)] = 1.0
    """Pairs of a token and an expert that come to this rank, beside an even share; of expert-parallel ranks."""
    zero_stage: Stage = 3
    """ZeRO stage: shards nothing, optimizer state, gradients too, parameters too."""
    precision: Precision = "bf16-mixed"
    """Dtypes of weights and of computing; ``mixed`` keeps fp32 weights for the optimizer."""
    optimizer: Optimizer = "adamw"
    """The optimizer, with torch's default arguments."""
    optimizer_impl: OptimizerImpl | None = None
    """Its implementation: all tensors at once, one kernel, or one tensor after the other."""
    recompute: Recompute = "none"
    """The part of a block's forward that the backward recomputes."""
    recompute_layers: Count | None = None
    """How many blocks, from the first; None: all (Megatron-LM's ``--recompute-method block``)."""
    offload_activations: bool = False
    """Blocks' saved tensors are in host memory until the backward: ``offload_wrapper`` is around every block, outside its
    checkpoint."""
    inputs_in_flight: CountOrZero = 0
    """With ``offload_activations``: the latest saved tensors that stay on the GPU because their copies may still run, 5 with the
    streams of torchtune and TRL."""
    attention: Attention = "sdpa"
    """The implementation: torch's ``scaled_dot_product_attention``, FlashAttention, or eager operators."""
    linear_attention: LinearAttention = "torch"
    """What runs linear attention and Mamba-2: the kernels of flash-linear-attention, mamba_ssm and causal-conv1d, or transformers'
    own operators."""
    padded: bool = False
    """Some sequences of a batch end in padding, so that attention gets a mask. The padding counts as tokens."""
    activation_model: ActivationModel = "module"
    """``module``: what autograd saves for the transformers module; ``megatron``: Korthikanti et al. 2022."""
    sequence_parallel: bool = False
    """Megatron's formulas only: norms and dropouts are split over the tensor-parallel ranks too. Engine fsdp2 has
    ``fsdp2.sequence_parallel``."""
    loss: Loss = "full"
    """``full``: all logits at once (transformers); ``chunked``: an eighth at a time (torchtitan); ``fused``: Liger's;
    ``log-probs``: the labels' log-probabilities in tiles (TRL's trainers)."""
    prompt_len: Count = 1
    """Tokens of each sequence that loss ``log-probs`` does not score: its prompt, at least its first token."""
    log_probs: LogProbs = "tiles"
    """How loss ``log-probs`` is computed: in TRL's tiles; as a divergence from a teacher's distribution, in tiles (TRL); or from
    all logits at once, with flash-attn's cross-entropy, which writes the gradient over the logits (verl), or beside the policy's
    compiled entropy does not (``entropy``); or 512 tokens at a time (``chunks``: verl's fused head in torch); or 1,024 columns of
    the head at a time (``kernels``: the same in Triton), or 2,048 (``columns``: prime-rl)."""
    forward_only: bool = False
    """No backward follows, so stage 3 keeps nothing gathered for it. Set for a reference model in a workflow."""
    keep_logits: bool | Literal["fp32"] = False
    """The training loop holds the model's output (the logits) while it calls backward; ``fp32``: upcast to fp32."""
    sync_every_micro_batch: bool = True
    """True: gradients are reduced after every micro-batch (plain loop). False: only after the last one (``no_sync``)."""
    pipeline_schedule: PipelineSchedule | None = None
    """The order in which pipeline ranks run their micro-batches (torch.distributed.pipelining); ``None``: 1f1b."""
    pipeline_stages_per_rank: Annotated[int, Range(1, 1000)] | None = None
    """``None``: 1 with gpipe and 1f1b, else 2."""
    pipeline_layers: str | None = None
    """Layers of each pipeline stage, first to last, separated by commas; ``None``: cut like torchtitan."""
    ddp: DdpOptions = DdpOptions()
    """DDP's own options."""
    fsdp1: Fsdp1Options = Fsdp1Options()
    """FSDP1's own options."""
    fsdp2: Fsdp2Options = Fsdp2Options()
    """FSDP2's own options."""
    deepspeed: DeepSpeedOptions = DeepSpeedOptions()
    """DeepSpeed's own options."""
    megatron: MegatronOptions = MegatronOptions()
    """Megatron-LM's own options."""
    reentrant: bool | None = None
    """Checkpoints are reentrant: each holds its block's output during the block's backward (engine ddp). ``None``: transformers'
    default, reentrant before 5.0."""
    fused_kernels: str | None = None
    """Operators that Unsloth's Triton kernels replace, as fms-acceleration installs them, separated by commas: ``cross-entropy``
    (writes the gradient over the logits), ``rms-norm``, ``rope``, and ``lora`` (attention projections of QLoRA). Axolotl's are
    ``axolotl-lora``: attention's projections and gated MLPs with adapters. Liger's are
    ``rope`` (with the same memory), ``liger-rms-norm`` and ``liger-swiglu``; families without these operators keep their own.
    ``loss-in-pieces`` is torchtune's loss: eight pieces of logits, one after the other, whose graphs wait for one backward.
    ``int4-qat`` is quantisation-aware training: torchao's linear layers round inputs to 8 bits and weights to 4, and back;
    ``axolotl-qat`` is the same with scales and zero points in fp32, to which gradients flow. ``prime-rl-experts`` are router and
    experts of prime-rl's own Qwen3-MoE and GLM-4.5, with all experts on each rank.

    NeMo AutoModel's: ``norm-in-one`` (one kernel per norm: Transformer Engine's, torch's or QuACK's), ``deepep`` or ``hybridep``
    (which send tokens to experts on other ranks), ``grouped-experts`` or ``looped-experts`` (every rank gathers all tokens for its
    experts, which run together or one by one), ``output-copied`` (attention copies its output), ``output-scaled`` (attention
    multiplies its output by what sinks leave, in fp32), ``router-in-fp32`` (the router multiplies fp32 copies), ``te-linear`` and
    ``te-experts`` (Transformer Engine's products, with workspaces of their own), ``te-float8`` (which run in float8),
    ``narrow-loss`` (cross-entropy in the logits' own dtype), ``in-place-loss`` (whose forward writes the gradient over the
    logits), and ``gathered-logits`` (tensor-parallel ranks gather the logits of the whole vocabulary for the loss). With recompute
    ``selective``, ``router-kept`` and ``inputs-kept`` say what checkpoints keep beside a block's input: the router's outputs, or
    the inputs of norms, attention and MLP."""
    float8_recipe: Float8Recipe | None = None
    """torchao's float8 for all linear layers of the blocks, with one scale per tensor or per row, or its prototypes for Blackwell:
    MXFP8 with a scale for 32 elements, NVFP4 with four bits and a scale for 16."""
    transformers: str | None = None
    """The release of transformers, such as ``4.48`` (:mod:`zeroplan.spec.releases`); ``None``: 5.23."""
    kernels: Kernels = "cuda"
    """The kernels: a GPU's, or a CPU's to compare the estimate with a run without a GPU."""
    step_kernels: StepKernels | None = None
    """How memory-bound operators run; it changes only the step's time. One by one (eager), one kernel each for norms, rotary
    positions, gated products and the loss (fused), or compiled. ``None``: the engine's usual way."""

    @property
    def wraps_one_rank(self) -> bool:
        """Whether engine ddp wraps the model of a single rank."""
        return self.ddp.wrap_one_rank or self.ddp.gradient_as_bucket_view

    @property
    def steps_in_backward(self) -> bool:
        """Whether the optimizer steps inside the backward."""
        return self.ddp.step_in_backward or self.fsdp2.step_in_backward or self.optimizer in LOMO

    @property
    def keeps_gathered_linears(self) -> bool:
        """Whether torch's ``linear`` saves the weights that DeepSpeed's stage 3 gathers, until the backward."""
        return self.engine == "deepspeed" and self.zero_stage == 3 and not self.deepspeed.memory_efficient_linear

    @property
    def offloads(self) -> bool:
        """Whether anything is kept in host memory."""
        return self.offload_activations or self.offloads_states

    @property
    def offloads_states(self) -> bool:
        """Whether the engine keeps parameters, gradients or optimizer states in host memory."""
        if self.engine == "deepspeed":
            return self.deepspeed.offloads
        return self.engine in ("fsdp1", "fsdp2") and (self.fsdp1 if self.engine == "fsdp1" else self.fsdp2).cpu_offload

    @property
    def fused_parts(self) -> tuple[str, ...]:
        """Return the operators that fused kernels replace, each once; raises SpecError for an unknown name.

        >>> RecipeSpec(fused_kernels="rope, rms-norm").fused_parts
        ('rms-norm', 'rope')
        """
        return () if self.fused_kernels is None else _fused_parts(self.fused_kernels)

    @property
    def layers_by_hand(self) -> tuple[int, ...] | None:
        """Return the layers of each pipeline stage, if given.

        >>> RecipeSpec(pipeline_layers="7,9,9,7").layers_by_hand
        (7, 9, 9, 7)
        """
        if self.pipeline_layers is None:
            return None
        words = [word.strip() for word in self.pipeline_layers.split(",")]
        if not all(word.isdecimal() for word in words):
            raise SpecError(f"pipeline_layers={self.pipeline_layers!r} is not a list of layers; write, for example, 7,9,9,7")
        return tuple(map(int, words))

    @property
    def cuts_pipelines(self) -> bool:
        """Whether a pipeline's schedule or stages are given."""
        return any(one is not None for one in (self.pipeline_schedule, self.pipeline_stages_per_rank, self.pipeline_layers))

    def check_rules(self) -> None:
        """Raise SpecError for options that would be ignored."""
        in_log_probs = self.loss == "log-probs" and self.log_probs in OF_ALL_LOGITS and self.keep_logits != "fp32"
        if self.keep_logits and self.loss != "full" and not in_log_probs:
            raise SpecError(f"keep_logits with loss={self.loss!r} has no logits to keep; use loss 'full', or leave it out")
        if self.activation_model == "megatron" and self.engine != "paper":
            raise SpecError(f"activation_model='megatron' with engine {self.engine!r} is not modelled; use engine 'paper'")
        if self.inputs_in_flight and not (self.offload_activations and self.engine in ("ddp", "fsdp2")):
            raise SpecError("inputs_in_flight needs offload_activations and engine 'ddp' or 'fsdp2'; use them, or leave it out")
        if self.offload_activations and self.engine == "paper":
            raise SpecError("offload_activations with engine 'paper' is not modelled; use engine 'fsdp2' or 'ddp'")
        if self.recompute_layers is not None:
            self._check_recompute_layers(self.recompute_layers)
        self._check_fused_kernels()
        if self.reentrant and (self.engine != "ddp" or self.recompute != "full"):
            raise SpecError("reentrant=True is modelled with engine 'ddp' and recompute 'full' alone; leave it out")
        if self.sequence_parallel and self.activation_model != "megatron" and self.engine != "megatron":
            raise SpecError(
                "sequence_parallel=True needs engine 'megatron', or activation_model='megatron' (engine 'paper'); leave it out "
                "otherwise: engine 'fsdp2' splits the sequence with tp unless fsdp2.sequence_parallel is false"
            )

    @property
    def imbalance_in_thousandths(self) -> int:
        """The imbalance of experts in thousandths, rounded up; float noise around a whole thousandth is ignored."""
        return math.ceil(round(self.imbalance * EVEN, 6))

    def _check_fused_kernels(self) -> None:
        """Raise SpecError for unknown kernels, and for recipes with which they are not modelled."""
        parts = self.fused_parts
        if not parts:
            return
        if self.engine not in ("ddp", "fsdp1", "fsdp2") and not (self.engine == "deepspeed" and set(parts) <= OF_LIGER):
            raise SpecError(f"fused_kernels with engine {self.engine!r} is not modelled; use engine 'ddp', 'fsdp1' or 'fsdp2'")
        of_loss = next((one for one in OF_LOSS if one in parts), None)
        in_chunks = of_loss == "compiled-loss" and self.fsdp2.modules == "torchtitan-0.3"
        if of_loss is not None and self.loss != "full" and not in_chunks:
            raise SpecError(f"fused_kernels {of_loss!r} with loss {self.loss!r} has nothing to replace; use loss 'full'")
        if "loss-in-pieces" in parts and self.precision != "bf16":
            raise SpecError(f"fused_kernels 'loss-in-pieces' with precision {self.precision!r} is not modelled; use 'bf16'")
        for one in ROUNDING:
            if one in parts:
                self._check_quantisation_aware(one)
        if "te-float8" in parts and self.precision != "bf16":
            raise SpecError(f"fused_kernels 'te-float8' with precision {self.precision!r} is not modelled; use 'bf16'")
        if (SENDING - GATHERING) & set(parts) and self.engine != "fsdp2":
            raise SpecError("kernels that send tokens to experts need engine 'fsdp2'; use it, or leave them out")
        if self.kernels == "cpu":
            raise SpecError("fused_kernels are a GPU's; use kernels 'cuda'")

    def _check_quantisation_aware(self, name: str) -> None:
        """Raise SpecError for recipes with which quantisation-aware training is not modelled."""
        autocast = self.precision.endswith("mixed") and self.engine != "fsdp2"
        cases: tuple[tuple[str | bool, str], ...] = (
            (self.engine not in ("ddp", "fsdp2") and f"engine {self.engine!r}", "engine 'ddp' or 'fsdp2'"),
            (autocast and f"precision {self.precision!r} under autocast", "precision 'bf16', or engine 'fsdp2'"),
            (self.recompute == "selective" and "recompute 'selective'", "recompute 'full' or 'none'"),
            (self.offload_activations and "offload_activations", "recompute 'full' alone"),
            (self.loss not in ("full", "fused") and f"loss {self.loss!r}", "loss 'full' or 'fused'"),
            (self.float8_recipe is not None and "float8_recipe", "one of them"),
        )
        if name == "axolotl-qat":
            cases = (*cases, (self.precision == "fp32" and "precision 'fp32'", "precision 'bf16'"))
        refuse(f"fused_kernels {name!r} with", cases)

    def writes_out_attention(self, *, grouped: bool) -> bool:
        """Whether attention runs as single operators, which keep the scores.

        ``grouped``: several query heads share a key/value head. Source: torch 2.13,
        aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: flash needs compute capability 8.0. Below it the memory-efficient
        kernel takes fp16 and fp32 alone, with as many heads of keys as of queries.
        """
        if self.kernels != "cuda-7" or self.attention != "sdpa":
            return self.attention == "eager"
        return grouped or self.precision.startswith("bf16")

    def _check_recompute_layers(self, layers: int) -> None:
        """Raise SpecError for recipes without recomputation, and for options that are not modelled."""
        if self.recompute == "none":
            raise SpecError(f"recompute_layers={layers} with recompute 'none' has nothing to do; use 'full', or leave it out")
        cases = (
            (self.engine in ON_PAPER and f"engine {self.engine!r}", "engine 'fsdp2', 'ddp' or 'deepspeed'"),
            (self.offload_activations and "offload_activations", "no offload of activations"),
        )
        refuse(f"recompute_layers={layers} with", cases, ", or leave it out")
