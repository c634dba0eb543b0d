"""A complete training job: model, cluster, recipe, mesh and batch, and the checks across them."""

from collections.abc import Iterator

from zeroplan.errors import SpecError, refuse
from zeroplan.spec.adapter import HEAD, WIDENED, AdapterSpec
from zeroplan.spec.base import Spec
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.compiled import check_compiled
from zeroplan.spec.family import (
    DISPATCHED_FAMILIES,
    DIVIDED_LOGITS,
    INDEXED_FAMILIES,
    LEARNED_POSITIONS,
    TRAITS,
    modelled,
)
from zeroplan.spec.float8 import check_float8
from zeroplan.spec.fsdp1 import check_fsdp1
from zeroplan.spec.hardware import ClusterSpec, node_size
from zeroplan.spec.linear_kernels import check_linear_attention
from zeroplan.spec.megatron import check_megatron
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.offloaded import check_offloaded
from zeroplan.spec.padding import check_padded
from zeroplan.spec.per_layer import check_per_layer
from zeroplan.spec.pipeline import SPLIT, check_schedule, cut, stages_per_rank
from zeroplan.spec.recipe import (
    LOMO,
    ON_PAPER,
    PRIME_RL,
    ROUNDING,
    SENDING,
    STEPS_ALONE,
    Engine,
    RecipeSpec,
    Stage,
    ways_of_resharding,
)
from zeroplan.spec.releases import check_release, is_reentrant, release_of
from zeroplan.spec.split import check_context_parallel, check_tensor_parallel, shards_of_experts_are_even, widths_of_experts
from zeroplan.spec.torchtitan import check_torchtitan
from zeroplan.spec.traits import ATTENTION
from zeroplan.spec.vision import VisionSpec

#: The ZeRO stages of each engine, with their names.
ENGINE_STAGES: dict[Engine, dict[Stage, str]] = {
    "paper": {0: "plain data parallelism", 1: "P_os", 2: "P_os+g", 3: "P_os+g+p"},
    "ddp": {0: "DDP", 1: "DDP + ZeroRedundancyOptimizer"},
    "fsdp1": {2: "FSDP1, SHARD_GRAD_OP", 3: "FSDP1, FULL_SHARD"},
    "fsdp2": {2: "FSDP2, reshard_after_forward=False", 3: "FSDP2"},
    "megatron": {
        0: "Megatron-Core",
        1: "Megatron-Core's distributed optimizer",
        2: "Megatron-FSDP, optim_grads",
        3: "Megatron-FSDP, optim_grads_params",
    },
    "deepspeed": {0: "DeepSpeed stage 0", 1: "DeepSpeed stage 1", 2: "DeepSpeed stage 2", 3: "DeepSpeed stage 3"},
}

#: The default engine for each stage: PyTorch's own.
DEFAULT_ENGINE: dict[Stage, Engine] = {0: "ddp", 1: "ddp", 2: "fsdp2", 3: "fsdp2"}


def _beside_frozen(recipe: RecipeSpec) -> tuple[tuple[str | bool, str], ...]:
    """Return DeepSpeed's options that are not modelled beside frozen parameters, and what to use instead."""
    options = recipe.deepspeed
    return (
        (options.offloads_to_nvme and "offload to NVMe", "offload to 'cpu'"),
        (options.zero_hpz_partition_size > 1 and "zero_hpz_partition_size", "1 for it"),
        (options.zero_quantized_weights and "zero_quantized_weights", "false for it"),
        (options.zero_quantized_gradients and "zero_quantized_gradients", "false for it"),
        (recipe.keeps_gathered_linears and "memory_efficient_linear false", "true for it"),
    )


def _of_the_adapter(adapter: AdapterSpec, recipe: RecipeSpec) -> Iterator[tuple[str | bool, str]]:
    """Yield the adapter's options that are not modelled with this recipe, and what to use instead."""
    if adapter.compute == "fp32":
        what, here = "adapters that compute in fp32", recipe.engine
        yield here not in ("ddp", "fsdp1") and f"{what}, and engine {here!r}", "engine 'ddp' or 'fsdp1'"
        narrow = not recipe.precision.endswith("mixed")
        yield narrow and f"{what}, and precision {recipe.precision!r}", "'bf16-mixed', whose adapters are fp32"
        yield adapter.quantize != "none" and f"{what}, beside quantised weights", "compute 'autocast'"
    if adapter.base == "fp32":
        what = "frozen weights in fp32"
        known, instead = recipe.engine in ("fsdp2", "ddp"), "engine 'fsdp2' or 'ddp', or base 'compute'"
        yield not known and f"{what}, and engine {recipe.engine!r}", instead
        under, joined = (
            recipe.engine == "ddp" and f"{what} with engine 'ddp'",
            {"lora", "axolotl-lora"}.intersection(recipe.fused_parts),
        )
        yield under and adapter.dora != "none" and f"{under}, and DoRA", "base 'compute'"
        yield under and adapter.compute == "fp32" and f"{under}, and adapters that compute in fp32", "compute 'autocast'"
        yield under and bool(joined) and f"{under}, and fused kernels of adapters", "others, or base 'compute'"
        yield recipe.precision == "bf16" and f"{what}, and precision 'bf16'", "'bf16-mixed', or base 'compute'"
        yield adapter.quantize != "none" and f"{what}, and quantised weights", "quantize 'none', or base 'compute'"
    yield from _of_weights(adapter, recipe)
    yield from _of_fused_adapters(adapter, recipe)
    if HEAD in adapter.layers:
        yield from _of_an_adapted_head(adapter, recipe)
    yield from _of_whole_modules(adapter, recipe)
    yield adapter.dropout and recipe.kernels == "cpu" and "dropout and a CPU's kernels", "no dropout"


def _of_weights(adapter: AdapterSpec, recipe: RecipeSpec) -> Iterator[tuple[str | bool, str]]:
    """Yield what is not modelled of the adapter's quantised weights, and what to use instead."""
    engines, gptq = ("ddp", "fsdp1"), adapter.quantize == "gptq"
    yield gptq and recipe.engine not in engines and f"GPTQ's weights and engine {recipe.engine!r}", "engine 'ddp' or 'fsdp1'"
    yield (
        gptq and recipe.precision != "fp16-mixed" and "GPTQ's weights, whose kernels compute in fp16",
        "precision 'fp16-mixed'",
    )
    int8, held = adapter.quantize == "int8", recipe.recompute != "none" and not is_reentrant(recipe)
    yield int8 and recipe.engine != "ddp" and f"weights in 8 bits and engine {recipe.engine!r}", "engine 'ddp'"
    yield int8 and not recipe.precision.startswith("bf16") and "weights in 8 bits beside fp16 or fp32", "'bf16-mixed' or 'bf16'"
    yield (
        int8 and held and "weights in 8 bits, whose layers keep inputs through such checkpoints,",
        "reentrant true, or recompute 'none'",
    )
    experts = adapter.quantize_experts
    sharded = experts and recipe.engine not in ("ddp", "fsdp2")
    yield sharded and f"experts in four bits and engine {recipe.engine!r}", "engine 'ddp' or 'fsdp2'"
    older = adapter.four_bits_keep_inputs and recipe.recompute != "full"
    yield older and "bitsandbytes before 0.43.2 and no full recomputation", "recompute 'full', or a later release"


def _of_fused_adapters(adapter: AdapterSpec, recipe: RecipeSpec) -> Iterator[tuple[str | bool, str]]:
    """Yield what is not modelled of kernels that fuse adapters, and what to use instead."""
    if "lora" in recipe.fused_parts:
        elsewhere = recipe.engine not in ("ddp", "fsdp1")
        yield elsewhere and f"fused kernels of adapters and engine {recipe.engine!r}", "'ddp' or 'fsdp1'"
        whole = adapter.quantize not in ("nf4-double", "gptq")
        yield whole and "fused kernels of adapters and such weights", "quantize 'nf4-double' or 'gptq'"
        beyond = not set(adapter.layers) <= set(ATTENTION)
        yield beyond and "fused kernels of adapters in the MLP", "targets 'attention'"
    if "axolotl-lora" in recipe.fused_parts:
        yield recipe.engine != "ddp" and f"Axolotl's kernels and engine {recipe.engine!r}", "engine 'ddp'"
        ours = adapter.quantize in ("none", "nf4", "nf4-double") and not adapter.four_bits_follow_inputs
        yield not ours and "Axolotl's kernels and such weights", "quantize 'none' or 'nf4-double'"
        wide = adapter.compute == "fp32" or (adapter.quantize != "none" and adapter.upcast != "none")
        yield wide and "Axolotl's kernels on inputs in fp32", "upcast 'none', and compute 'autocast'"


def _of_an_adapted_head(adapter: AdapterSpec, recipe: RecipeSpec) -> Iterator[tuple[str | bool, str]]:
    """Yield what is not modelled of an adapter of the head, and what to use instead."""
    elsewhere = recipe.engine not in ("ddp", "fsdp2")
    yield elsewhere and f"an adapter of the head and engine {recipe.engine!r}", "'ddp' or 'fsdp2'"
    cast = recipe.precision != "bf16" and (recipe.engine == "ddp" or adapter.quantize != "none")
    yield cast and "an adapter of the head under autocast, with copies of weights,", "precision 'bf16'"
    yield recipe.loss != "full" and "an adapter of the head and a loss that has the head", "loss 'full'"


def _of_whole_modules(adapter: AdapterSpec, recipe: RecipeSpec) -> Iterator[tuple[str | bool, str]]:
    """Yield what is not modelled for modules that are trained whole beside adapters, and what to use instead.

    torch's ZeroRedundancyOptimizer takes parameters of one dtype, and its GradScaler no gradients in 16 bits.
    """
    if not adapter.saved:
        return
    what, engines = "modules that are trained whole", ("ddp", "fsdp2", "deepspeed")
    yield recipe.engine not in engines and f"{what}, and engine {recipe.engine!r}", "'ddp', 'fsdp2' or 'deepspeed'"
    copied = recipe.engine == "ddp" and recipe.precision.endswith("mixed")
    narrow = copied and (adapter.quantize == "none" or adapter.upcast != "all")
    yield narrow and recipe.zero_stage > 0 and f"{what} in 16 bits, and ZeroRedundancyOptimizer", "stage 0, or engine 'fsdp2'"
    yield narrow and recipe.precision == "fp16-mixed" and f"{what} in fp16 under GradScaler", "precision 'bf16-mixed'"
    yield narrow and recipe.ddp.step_in_backward and f"{what} in 16 bits, and a step in the backward", "false for it"
    yield recipe.loss == "chunked" and f"{what}, and a chunked loss", "loss 'full' or 'fused'"


def _of_runs(model: ModelSpec, adapter: AdapterSpec, recipe: RecipeSpec, mesh: MeshSpec) -> Iterator[tuple[str | bool, str]]:
    """Yield what is not modelled of prime-rl's adapters of several runs, and what to use instead."""
    adapters = "adapters of several runs (prime-rl's)"
    widths = {model.hidden_size, model.intermediate_size, model.num_key_value_heads * model.head_dim}
    widths |= set() if model.moe is None else {model.moe.moe_intermediate_size}
    theirs = model.has("prime-rl") and PRIME_RL in recipe.fused_parts
    for is_so, what, instead in (
        (recipe.engine != "fsdp2", f"engine {recipe.engine!r}", "engine 'fsdp2'"),
        (recipe.precision not in ("bf16", "bf16-mixed"), f"precision {recipe.precision!r}", "'bf16-mixed' or 'bf16'"),
        (
            recipe.precision == "bf16-mixed" and adapter.base == "compute",
            "frozen weights in 16 bits beside fp32",
            "base 'fp32'",
        ),
        (adapter.quantize != "none", "quantised weights", "quantize 'none'"),
        (HEAD in adapter.layers, "an adapter of the head", "targets 'all-linear'"),
        (bool(adapter.saved), "modules that are trained whole", "adapters alone"),
        (
            (not model.has("adapters everywhere") or model.vision is not None) and not theirs,
            f"a {model.family} model",
            f"fused_kernels {PRIME_RL!r}" if model.has("prime-rl") else "a dense model",
        ),
        (theirs and adapter.looped, "experts one after the other", "looped false"),
        (theirs and adapter.dropout, "dropout of experts' inputs", "dropout false"),
        (theirs and adapter.targets not in ("all-linear", "attention"), "single layers beside experts", "targets 'all-linear'"),
        (bool(model.stacked.runs) and adapter.stepped > 1, "experts of which several adapters learn", "learning 1"),
        (not adapter.looped and any(one % 8 for one in widths), "widths that 8 does not divide", "looped true"),
        (recipe.recompute == "selective", "selective recomputation", "recompute 'full'"),
        (recipe.offloads_states, "states in host memory", "no offload"),
        (recipe.fsdp2.step_in_backward, "a step in the backward", "false for it"),
        (not recipe.sync_every_micro_batch, "gradients that stay whole", "sync_every_micro_batch true"),
        (mesh.model_ranks * mesh.ep > 1, "ranks that split the model", "data-parallel ranks"),
    ):
        yield is_so and f"{adapters} and {what}", instead


def _of_dora(model: ModelSpec, adapter: AdapterSpec, recipe: RecipeSpec, mesh: MeshSpec) -> Iterator[tuple[str | bool, str]]:
    """Yield what is not modelled of DoRA, and what to use instead. peft refuses it for the weights of all experts of a layer."""
    narrow = recipe.engine == "ddp" and recipe.precision.endswith("mixed") and adapter.upcast == "none"
    few_bits = adapter.quantize != "none"
    kernels = {"lora", "axolotl-lora", *ROUNDING} & set(recipe.fused_parts)
    for is_so, what, instead in (
        (recipe.engine not in ("ddp", "fsdp2"), f"engine {recipe.engine!r}", "engine 'ddp' or 'fsdp2'"),
        (adapter.quantize in ("gptq", "int8"), f"quantize {adapter.quantize!r}", "quantize 'nf4-double'"),
        (few_bits and narrow, "weights in four bits under autocast", "upcast 'norms', which takes as much"),
        (any(model.stacked), "adapters of all experts of a layer", "targets 'attention'"),
        (HEAD in adapter.layers, "an adapter of the head", "targets 'all-linear'"),
        (adapter.runs > 0 or adapter.automodel, "adapters that are not peft's", "peft's"),
        (adapter.compute == "fp32", "adapters that compute in fp32", "compute 'autocast'"),
        (
            model.vision is not None or model.family == "gpt2",
            f"such a {model.family} model",
            "a model of text, other than GPT-2",
        ),
        (bool(kernels), "kernels that replace linear layers", "none of them"),
        (recipe.recompute == "selective", "selective recomputation", "recompute 'full'"),
        (recipe.offload_activations, "offloaded activations", "no offload"),
        (mesh.model_ranks * mesh.ep > 1, "ranks that split the model", "data-parallel ranks"),
    ):
        yield is_so and f"DoRA and {what}", instead


def _in_the_family(model: ModelSpec, adapter: AdapterSpec, recipe: RecipeSpec) -> Iterator[tuple[str | bool, str]]:
    """Yield what is not modelled for adapters in some families, and what to use instead."""
    autocast = recipe.engine == "ddp" and recipe.precision.endswith("mixed")
    # with weights in few bits a layer returns its input's dtype: fp32 after an activation that autocast computes in fp32
    bent = autocast and model.is_quantised and adapter.upcast == "none" and model.activation in WIDENED
    yield (
        bent and f"quantised weights under autocast, whose {model.activation} is fp32 then,",
        "precision 'bf16', or upcast 'norms', which takes as much",
    )
    if not model.has("adapters everywhere") and not model.has_separate_experts:
        this, at_3 = f"a {model.family} model", recipe.engine == "deepspeed" and recipe.zero_stage == 3
        yield at_3 and f"{this} at stage 3 of DeepSpeed", "a lower stage, or engine 'fsdp2'"
        packed = model.has("quantised adapters under fsdp1") and model.is_quantised and not any(model.stacked)
        yield recipe.engine == "fsdp1" and not packed and f"{this} and engine 'fsdp1'", "engine 'fsdp2'"
        ours = {"lora", "axolotl-lora"} & set(recipe.fused_parts)
        yield bool(ours) and f"fused kernels of adapters in {this}", "none"
        yield bool(adapter.saved) and f"modules that are trained whole in {this}", "adapters alone"
        older = model.is_quantised and adapter.four_bits_follow_inputs
        yield older and f"bitsandbytes before 0.47 in {this}", "a later release"
        if autocast:
            yield from _under_autocast(model, this)
        learned = (
            model.family in LEARNED_POSITIONS and recipe.recompute != "none"
        )  # a small model was 8 KB too low; why is not known
        yield learned and f"{this} and recomputation", "recompute 'none'"
        bare = model.first_is_bare and recipe.recompute == "none"
        yield bare and "a first layer without an adapter, and no recomputation,", "recompute 'full', or targets 'all-linear'"
    if not model.has_separate_experts:
        return
    yield recipe.engine not in ("ddp", "fsdp1") and f"experts and engine {recipe.engine!r}", "engine 'ddp' or 'fsdp1'"
    yield not set(model.adapted_layers) <= set(ATTENTION) and "adapters in experts", "targets 'attention'"


_LOADED_NARROW = "base 'compute', as if the model were loaded in 16 bits (a script's or file's dtype: bfloat16)"


def _under_autocast(model: ModelSpec, this: str) -> Iterator[tuple[str | bool, str]]:
    """Yield what is not modelled for adapters of families unlike Llama under autocast, and what to use instead.

    With weights in few bits a linear layer returns the dtype of its input. So norms in fp32 widen what comes after them.
    """
    yield not model.has("adapters under autocast") and f"{this} under autocast", "precision 'bf16', or engine 'fsdp2'"
    in_experts = any(model.stacked) and not model.has("experts' adapters under autocast")
    yield in_experts and f"experts of {this} under autocast", "targets 'attention', or precision 'bf16'"
    few_bits = f"quantised weights of {this} under autocast"
    beside = model.linear is not None or model.has_experts or "C" in model.letters
    wide = model.upcasts_norms and beside
    yield wide and model.is_quantised and f"{few_bits}, and all else in fp32,", "upcast 'none', or precision 'bf16'"
    yield wide and not model.is_quantised and f"frozen weights in fp32 of {this} under autocast", _LOADED_NARROW


def engine_at(stage: Stage, engine: Engine) -> Engine:
    """Return the engine if it supports the stage, else the stage's default engine.

    >>> engine_at(1, "fsdp2"), engine_at(1, "deepspeed")
    ('ddp', 'deepspeed')
    """
    return engine if stage in ENGINE_STAGES[engine] else DEFAULT_ENGINE[stage]


#: Elements of a head. Source: flash-attn 2.8, csrc/flash_attn/flash_api.cpp, mha_fwd.
_WIDEST_OF_FLASH = 256


class JobSpec(Spec):
    """One training job, complete.

    >>> from zeroplan.spec.model import ModelSpec
    >>> tiny = ModelSpec(family="llama", hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    ...                  num_key_value_heads=4, head_dim=16, vocab_size=256)
    >>> JobSpec(model=tiny, mesh=MeshSpec(dp_shard=8)).mesh.world_size
    8
    """

    model: ModelSpec
    """The model."""
    cluster: ClusterSpec = ClusterSpec()
    """The hardware."""
    recipe: RecipeSpec = RecipeSpec()
    """The training recipe."""
    mesh: MeshSpec = MeshSpec()
    """The ranks and their arrangement."""
    batch: BatchSpec = BatchSpec()
    """The batch."""

    def check_rules(self) -> None:
        """Raise SpecError for contradictions."""
        self._check_engine()
        self._check_positions()
        self._check_attention()
        self._check_indexer()
        self._check_router()
        self._check_fused_loss()
        self._check_resharding()
        if self.model.profile is not None:
            self._check_what_a_profile_tells()
        check_per_layer(self.model, self.recipe)
        check_torchtitan(self.model, self.recipe, self.mesh, self.batch)
        check_release(self.model, self.recipe, self.mesh)
        check_fsdp1(self.model, self.recipe, self.mesh)
        self._check_quantisation_aware()
        self._check_te_float8()
        self._check_prime_rl()
        self._check_predictions()
        self._check_latent_experts()
        check_float8(self.model, self.recipe, self.mesh, self.cluster.gpu)
        check_compiled(self.model, self.recipe, self.mesh)
        check_linear_attention(self.model, self.recipe)
        self._check_ends_apart()
        self._check_gathers_ahead()
        self._check_step_in_backward()
        self._check_dion()
        if self.model.adapter is not None:
            self._check_adapter(self.model.adapter)
        if self.model.frozen is not None:
            self._check_frozen()
        if self.model.vision is not None:
            self._check_tower(self.model.vision)
        check_offloaded(self.model, self.recipe, self.mesh)
        if self.recipe.recompute_layers is not None:
            self._check_recompute_layers(self.recipe.recompute_layers)
        self._check_model_ranks()

    def _check_engine(self) -> None:
        """Raise SpecError for a stage, or replicas, that the engine has not."""
        engine, stage = self.recipe.engine, self.recipe.zero_stage
        offered = ENGINE_STAGES[engine]
        if stage not in offered:
            others = ", ".join(name for name, stages in ENGINE_STAGES.items() if stage in stages)
            raise SpecError(
                f"engine {engine!r} has no ZeRO stage {stage} (it has {', '.join(map(str, offered))}); "
                f"for stage {stage} use {others}"
            )
        if self.mesh.dp_replicate > 1 and engine not in ("fsdp1", "fsdp2", "paper"):
            raise SpecError(
                f"dp_replicate={self.mesh.dp_replicate} (replicas of a sharded group) needs engine 'fsdp2' or 'fsdp1', "
                f"not {engine!r}"
            )
        if engine == "deepspeed" and self.recipe.deepspeed.zero_quantized_gradients:
            self._check_nodes()

    def _check_positions(self) -> None:
        longest = self.model.max_position_embeddings
        if self.model.positions and self.batch.seq_len > longest:
            raise SpecError(
                f"seq_len={self.batch.seq_len:,} is beyond the {longest:,} positions this {self.model.family} model has learned; "
                "shorten it"
            )

    @property
    def _has_more_before_blocks(self) -> bool:
        """Whether the model has other parameters than the token embedding before its blocks."""
        return bool(self.model.positions) or self.model.traits.alibi

    def _check_gathers_ahead(self) -> None:
        """Raise SpecError for options that are not modelled with blocks gathered ahead explicitly, or the last one kept."""
        recipe, mesh, options = self.recipe, self.mesh, self.recipe.fsdp2
        if recipe.engine != "fsdp2" or not options.gathers_ahead:
            return
        ahead, again = options.forward_prefetch > 0 or options.backward_prefetch > 1, options.reshard_after_forward
        stays = again is False or (again is None and recipe.zero_stage != 3)
        cases = (
            (ahead and stays and "blocks that stay gathered", "stage 3"),
            (ways_of_resharding(options) is not None and "reshard_after_forward as a number", "true or false for it"),
            (mesh.pp > 1 and f"pp={mesh.pp}", "pp=1"), (mesh.ep > 1 and f"ep={mesh.ep}", "ep=1"),
            (options.of_torch_2_15 and "FSDP2 of torch 2.15", "torch 2.13"),
            (self.model.vision is not None and "a vision tower", "the text alone"),
            (bool(self.model.predictions) and "multi-token prediction", "predictions=0"),
        )  # fmt: skip
        refuse("fsdp2.keeps_last, forward_prefetch or backward_prefetch with", cases, ", or leave them out")

    def _check_ends_apart(self) -> None:
        """Raise SpecError for options that are not modelled with embedding and head as separate FSDP2 units."""
        recipe = self.recipe
        if not recipe.fsdp2.ends_apart:
            return
        cases = (
            (recipe.loss == "fused" and "loss 'fused'", "loss 'full' or 'chunked'"),
            (self.model.profile is not None and "a profile", "a model of a known family"),
            (self._has_more_before_blocks and f"a {self.model.family} model (its root unit keeps parameters)", "false"),
        )
        refuse("fsdp2.ends_apart with", cases, ", or leave ends_apart out")

    def _check_step_in_backward(self) -> None:
        """Raise SpecError if the optimizer's step inside the backward is not modelled for this job."""
        recipe = self.recipe
        if not recipe.steps_in_backward:
            return
        option, mesh, by_itself = "fsdp2" if recipe.fsdp2.step_in_backward else "ddp", self.mesh, recipe.optimizer in LOMO
        beside = max(mesh.tp, mesh.cp, mesh.pp, mesh.ep) > 1
        alone = option == "fsdp2" or (mesh.world_size == 1 and not recipe.wraps_one_rank)
        instead = (
            "one GPU in a plain loop" if by_itself else "one GPU in a plain loop, or engine 'fsdp2' with fsdp2.step_in_backward"
        )
        cases = (
            (recipe.engine != option and f"engine {recipe.engine!r}", f"engine {option!r}"),
            (not alone and "ranks in DDP", instead),
            (option == "fsdp2" and beside and "ranks that split the model or a sequence", "dp_shard and dp_replicate alone"),
            (option == "fsdp2" and recipe.offloads_states and "offload to host memory", "no offload"),
            ((by_itself or option == "fsdp2") and self.model.adapter is not None and "adapters", "full training"),
            (option == "ddp" and recipe.zero_stage != 0 and "ZeroRedundancyOptimizer", "stage 0"),
            (not by_itself and self.batch.grad_accum_steps > 1 and "gradient accumulation", "one micro-batch"),
            (recipe.precision == "fp16-mixed" and "a gradient scaler", "precision 'bf16-mixed'"),
            (option == "ddp" and recipe.loss != "full" and f"loss {recipe.loss!r}", "loss 'full'"),
            (option == "fsdp2" and recipe.fsdp2.of_torch_2_15 and "torch 2.15", "fsdp2.torch '2.13'"),
            (self.model.profile is not None and "a profile", "a model of a known family"),
            *self._of_the_optimizer(by_itself=by_itself),
        )
        if by_itself:
            refuse(f"optimizer {recipe.optimizer!r} with", cases, ", or another optimizer")
        refuse(f"{option}.step_in_backward with", cases, ", or leave it out")

    def _check_dion(self) -> None:
        """Raise SpecError where dion's Muon is not modelled; it fails itself on matrices that two groups of ranks share."""
        beside = max(self.mesh.tp, self.mesh.cp, self.mesh.pp, self.mesh.ep) > 1
        cases = (
            (beside and "ranks that split the model or a sequence", "dp_shard and dp_replicate alone"),
            (self.model.moe is not None and "experts", "optimizer 'muon'"),
            (self.model.adapter is not None and "adapters", "full training"),
            (self.model.profile is not None and "a profile", "a model of a known family"),
        )
        if self.recipe.optimizer == "dion-muon":
            refuse("optimizer 'dion-muon' with", cases, ", or optimizer 'adamw'")

    def _of_the_optimizer(self, *, by_itself: bool) -> Iterator[tuple[str | bool, str]]:
        """Yield optimizers that are not modelled inside the backward, and what to use instead."""
        recipe, options = self.recipe, self.recipe.ddp.step_in_backward or self.recipe.fsdp2.step_in_backward
        yield by_itself and options and "step_in_backward, which it does not need", "false"
        yield by_itself and recipe.ddp.compiled and "a compiled model", "no compiler"
        stacked = recipe.optimizer == "adalomo" and self.model.moe is not None
        yield stacked and "stacked experts, for which it fails,", "optimizer 'lomo'"
        other = not by_itself and recipe.optimizer not in STEPS_ALONE
        yield other and f"optimizer {recipe.optimizer!r}", f"one of {', '.join(STEPS_ALONE)}"

    def _check_attention(self) -> None:
        """Raise SpecError for heads and GPUs that a kernel does not take, and for padding that is not modelled."""
        if self.recipe.padded:
            check_padded(self.model, self.recipe, self.mesh)
        widest = max(self.model.head_dim, self.model.global_head_dim)
        gpu, runs_it = self.cluster.gpu, self.recipe.engine not in (*ON_PAPER, "megatron")
        if self.recipe.attention == "flash" and runs_it and gpu is not None and self.cluster.kernels != "cuda":
            # github.com/Dao-AILab/flash-attention, README
            raise SpecError(
                f"FlashAttention needs compute capability 8.0, {gpu.full_name} has {gpu.compute_capability}; use --attention sdpa"
            )
        if self.recipe.attention == "flash" and widest > _WIDEST_OF_FLASH:
            raise SpecError(
                f"attention 'flash' takes heads of {_WIDEST_OF_FLASH} elements, not of {widest}; use attention 'sdpa'"
            )

    def _check_indexer(self) -> None:
        """Raise SpecError for jobs of sparse attention that are not modelled, and where its weights without gradients matter.

        DDP stops at a parameter without a gradient, and DeepSpeed keeps states of it, as Adagrad does; with adapters they are
        frozen.
        """
        recipe, family, adapted = self.recipe, self.model.family, self.model.adapter is not None
        for refused, instead in (
            (recipe.attention == "flash" and "attention 'flash', which transformers has not for it,", "attention 'sdpa'"),
            (recipe.engine != "fsdp2" and not adapted and f"engine {recipe.engine!r}", "engine 'fsdp2'"),
            (recipe.optimizer == "adagrad" and not adapted and "optimizer 'adagrad', which makes its states at once,", "adamw"),
        ):
            if refused and family in INDEXED_FAMILIES:
                raise SpecError(
                    f"{refused} in a {family} model, whose indexer gets no gradient, is not modelled; use {instead}"
                )

    def _check_router(self) -> None:
        """Raise SpecError for weights of two dtypes: 16 bits, and a router in fp32, which DeepSpeed casts and FSDP2 refuses."""
        recipe, when = self.recipe, "no" if self.model.moe is None else self.model.traits.wide_router
        wide = when == "yes" or (when == "since 5.24" and release_of(recipe.transformers).wide_routers)
        if wide and recipe.precision == "bf16" and recipe.engine in ("ddp", "fsdp1", "fsdp2"):
            older = "" if when == "yes" else ", or a release before 5.24"
            raise SpecError(
                f"precision 'bf16' of a {self.model.family} model under {recipe.engine!r} is not modelled: its routers stay in "
                f"fp32; use 'bf16-mixed', or engine 'deepspeed'{older}"
            )

    def _check_fused_loss(self) -> None:
        """Raise SpecError without a fused loss of Liger (transformers/monkey_patch.py, ``apply_liger_kernel_to_granite``)."""
        if self.recipe.loss == "fused" and self.model.family in DIVIDED_LOGITS:
            raise SpecError(f"loss 'fused': Liger has none for family {self.model.family!r}; use loss 'full' or 'chunked'")
        if self.recipe.loss != "full" and self.model.profile is None and TRAITS[self.model.family].head_bias:
            raise SpecError(
                f"loss {self.recipe.loss!r} of a {self.model.family} model, whose head has a bias, is not modelled; use 'full'"
            )

    def _check_nodes(self) -> None:
        """Raise SpecError if DeepSpeed's quantized gradients and the cluster have different numbers of GPUs per node."""
        known, given = node_size(self.cluster), self.recipe.deepspeed.gpus_per_node
        if known is not None and known != given:
            raise SpecError(
                f"deepspeed.gpus_per_node={given} contradicts the {known} GPUs of a node; leave it out or "
                f"add --gpus-per-node {given}"
            )

    def _check_model_ranks(self) -> None:
        """Raise SpecError for degrees that the engine does not support or that are not modelled."""
        engine, mesh = self.recipe.engine, self.mesh
        if engine == "megatron":
            check_megatron(self.model, self.recipe, mesh, self.batch)
            return
        if mesh.ep > 1:
            self._check_expert_ranks()
        if mesh.tp > 1 and engine not in ("paper", "fsdp2"):
            raise SpecError(f"tp={mesh.tp} with engine {engine!r} is not modelled; use engine 'fsdp2', 'megatron' or 'paper'")
        if mesh.tp > 1 and engine == "fsdp2":
            check_tensor_parallel(self.model, self.recipe, self.batch, mesh)
        if mesh.cp > 1:
            check_context_parallel(self.model, self.recipe, self.batch, mesh)
        if mesh.pp > 1:
            self._check_pipeline()
        elif self.recipe.cuts_pipelines:
            raise SpecError(
                "a pipeline schedule, or layers of its stages, with pp=1 has nothing to do; give the number of pipeline ranks, "
                "or leave it out"
            )

    def _check_expert_ranks(self) -> None:
        """Raise SpecError if the ranks do not divide the experts, and for options not modelled with expert parallelism."""
        ep, moe, recipe, adapter = self.mesh.ep, self.model.moe, self.recipe, self.model.adapter
        if moe is None:
            raise SpecError(f"ep={ep} needs a model with experts, and this one ({self.model.family}) has none; leave ep out")
        if moe.num_experts % ep:
            raise SpecError(f"ep={ep} does not divide the {moe.num_experts} experts; use a factor of them")
        cases = (
            (recipe.engine != "fsdp2" and f"engine {recipe.engine!r}", "engine 'fsdp2'"),
            (self.model.family not in DISPATCHED_FAMILIES and f"a {self.model.family} model", "ep=1"),
            (recipe.offloads and "offload to host memory", "a higher number of GPUs"),
            (adapter is not None and adapter.quantize_experts and "experts in four bits", "ep=1"),
            (self.mesh.tp > 1 and bool(SENDING & set(recipe.fused_parts)) and "kernels that send tokens and tp", "tp=1"),
            (ways_of_resharding(recipe.fsdp2) is not None and "a number for reshard_after_forward", "true or false"),
        )
        refuse(f"ep={ep} (experts on several ranks) with", cases)
        self._check_chunks_of_experts(moe.num_experts)

    def _check_chunks_of_experts(self, experts: int) -> None:
        """Raise SpecError where ``fully_shard`` fails: with fewer experts than ranks it shards dim 1, which must divide evenly."""
        sharing, ep, widths = self.mesh.dp_shard * self.mesh.cp * self.mesh.tp, self.mesh.ep, widths_of_experts(self.model)
        if not shards_of_experts_are_even(experts, widths, sharing, ep):
            first, second = widths
            raise SpecError(
                f"{sharing // ep:,} ranks that have the same experts ({sharing:,} that shard / ep={ep}) do not divide "
                f"the widths {first:,} and {second:,} of their weights, which FSDP2 needs; use another ep"
            )

    def _check_pipeline(self) -> None:
        """Raise SpecError for options that are not modelled with pipelines, and for those that torch's schedules refuse."""
        recipe, model = self.recipe, self.model
        cases = (
            (recipe.engine != "fsdp2" and f"engine {recipe.engine!r}", "engine 'fsdp2'"),
            (not model.has("pipeline") and f"family {model.family!r}", f"one of {', '.join(modelled('pipeline'))}"),
            (model.profile is not None and "a profile", "a model of a known family"),
            (model.mla is not None and model.mla.index_every > 1 and "layers that share picked keys", "pp=1"),
            (model.max_window_layers > 0 and "a window in some layers", "pp=1"),
            (model.is_quantised and "quantised weights (QLoRA)", "LoRA"),
            (recipe.loss in ("fused", "log-probs") and f"loss {recipe.loss!r}", "loss 'full' or 'chunked'"),
            (
                recipe.loss == "chunked" and recipe.fsdp2.of_torch_2_15 and "loss 'chunked' and the FSDP2 of torch 2.15",
                "loss 'full'",
            ),
            (recipe.keep_logits == "fp32" and "keep_logits 'fp32'", "no keep_logits"),
            (ways_of_resharding(recipe.fsdp2) is not None and "reshard_after_forward as a number", "a stage"),
            *self._not_with_a_split_backward(),
            *self._frozen_in_stages(),
        )
        refuse("pipeline parallelism with", cases)
        check_schedule(
            recipe.pipeline_schedule or "1f1b", recipe.pipeline_stages_per_rank, pp=self.mesh.pp,
            layers=model.num_hidden_layers, micro_batches=self.batch.grad_accum_steps, by_hand=recipe.layers_by_hand,
        )  # fmt: skip
        if model.frozen is not None:
            self._check_frozen_stages(model.frozen.layers)

    def _check_tower(self, vision: VisionSpec) -> None:
        """Raise SpecError for a parallelism that is not modelled with a vision tower."""
        ranks = self.mesh.tp * self.mesh.cp * self.mesh.ep * self.mesh.pp
        beside = vision.has_blocks or vision.frozen_names or self.mesh.pp > 1
        if ranks > 1 and beside and self.recipe.engine != "megatron":  # which has rules of its own
            raise SpecError(
                "a vision tower on ranks that split the model or a sequence is not modelled; use data-parallel ranks"
            )
        if vision.cross_layers:
            self._check_cross_layers(vision)
        recipe = self.recipe
        reruns = recipe.engine == "deepspeed" and recipe.zero_stage == 3 and recipe.recompute != "none"
        if reruns and vision.tower == "internvl":  # its blocks own parameters
            raise SpecError(
                "the order in which DeepSpeed's stage 3 gathers a recomputed internvl tower is not modelled; use stage 2, "
                "recompute 'none' or engine 'fsdp2'"
            )

    def _check_cross_layers(self, vision: VisionSpec) -> None:
        """Raise SpecError for what is not modelled with layers that attend to images (Llama 3.2 Vision)."""
        recipe = self.recipe
        others = [name for name in recipe.fused_parts if name not in ("cross-entropy", "loss-in-pieces", "rope")]
        stage_3 = recipe.engine == "deepspeed" and recipe.zero_stage == 3
        cases = (
            (recipe.engine not in ("fsdp2", "ddp", "deepspeed") and f"engine {recipe.engine!r}", "engine 'fsdp2'"),
            (stage_3 and "DeepSpeed's stage 3", "stage 2, or engine 'fsdp2'"),
            (recipe.attention != "sdpa" and f"attention {recipe.attention!r}", "attention 'sdpa'"),
            (recipe.offload_activations and "offload of activations", "recompute 'full'"),
            (recipe.recompute_layers is not None and "recomputation of some layers", "recompute 'full'"),
            (bool(others) and f"fused kernels {', '.join(others)}", "none"),
            (
                self.model.adapter is not None
                and recipe.engine == "ddp"
                and recipe.precision.endswith("mixed")
                and "LoRA under autocast, whose LayerNorms in the tower are fp32",
                "precision 'bf16', or engine 'fsdp2'",
            ),
            (not vision.images and "sequences without images", "--images 1"),
        )
        refuse("layers that attend to images (Llama 3.2 Vision) and", cases)

    def _not_with_a_split_backward(self) -> Iterator[tuple[str | bool, str]]:
        """Yield the options that are not modelled with schedules that split the backward in two."""
        mesh, model, options = self.mesh, self.model, self.recipe.fsdp2
        if self.recipe.pipeline_schedule not in SPLIT:
            return
        for refused, what in (
            (mesh.tp * mesh.cp * mesh.ep > 1, "stages that are split (tp, cp, ep)"),
            (model.adapter is not None, "LoRA"),
            (model.frozen is not None, "frozen parameters"),
            (options.ends_apart, "fsdp2.ends_apart"),
            (options.of_torch_2_15, "the FSDP2 of torch 2.15"),
            (self.recipe.loss == "chunked", "loss 'chunked'"),
        ):
            yield refused and f"schedule {self.recipe.pipeline_schedule!r} and {what}", "1f1b or interleaved-1f1b"

    def _frozen_in_stages(self) -> Iterator[tuple[str | bool, str]]:
        """Yield frozen parts that FSDP2 prefetches for a backward that never runs, and what to use instead."""
        recipe, frozen, embeds = self.recipe, self.model.frozen, self.model.adapter is not None
        embeds = embeds or (frozen is not None and "embedding" in frozen.names)
        resharding = recipe.fsdp2.reshard_after_forward
        if not embeds or recipe.recompute != "none" or not (recipe.zero_stage == 3 if resharding is None else resharding):
            return
        blocks = frozen is not None and frozen.layers > 0
        yield blocks and "a frozen embedding and frozen blocks at stage 3", "stage 2, or recompute"
        yield recipe.fsdp2.ends_apart and "fsdp2.ends_apart and a frozen embedding at stage 3", "stage 2"

    def _check_frozen_stages(self, layers: int) -> None:
        """Raise SpecError if the first pipeline stage has no trained parameters: its optimizer would be empty."""
        recipe, pp = self.recipe, self.mesh.pp
        each = stages_per_rank(recipe.pipeline_schedule or "1f1b", recipe.pipeline_stages_per_rank)
        first, *_ = cut(self.model.num_hidden_layers, pp * each, recipe.layers_by_hand)
        if layers >= first.stop:
            raise SpecError(
                f"freezing {layers} layers leaves none to train in a pipeline's first stage, which has {first.layers}; freeze "
                "fewer, or use fewer stages"
            )

    def _check_what_a_profile_tells(self) -> None:
        """Raise SpecError for options that a profile, the trace of a module with its own loss, cannot answer."""
        recipe, profile = self.recipe, self.model.profile
        if recipe.engine in ON_PAPER:
            raise SpecError(f"engine {recipe.engine!r} does not take a profile; use fsdp2, ddp or deepspeed")
        if recipe.engine == "deepspeed" and recipe.offloads:
            raise SpecError("offload with engine 'deepspeed' and a profile is not modelled; leave one of them out")
        if recipe.loss != "full":
            raise SpecError(
                f"loss={recipe.loss!r} with a profile is not modelled: the module was traced with its own loss; leave it out"
            )
        if recipe.fused_parts:
            raise SpecError("fused_kernels with a profile are not modelled: the module was traced with its own; leave them out")
        adapted = profile is not None and profile.trains_adapters
        in_ddp = adapted and recipe.engine == "ddp" and recipe.precision.endswith("mixed")
        at_3 = adapted and recipe.engine == "deepspeed" and recipe.zero_stage == 3
        cases = (
            (recipe.keeps_gathered_linears and "memory_efficient_linear false with a profile", "true, or a lower stage"),
            (recipe.keep_logits == "fp32" and "keep_logits='fp32' with a profile", "yes or no"),
            (in_ddp and f"precision {recipe.precision!r} with adapters in a profile", "bf16, or engine fsdp2"),
            (at_3 and "stage 3 with adapters in a profile", "a lower stage, or engine fsdp2"),
        )
        refuse("", cases)

    def _check_quantisation_aware(self) -> None:
        """Raise SpecError for models and ranks with which quantisation-aware training is not modelled."""
        model = self.model
        if not (fused := [one for one in ROUNDING if one in self.recipe.fused_parts]):
            return
        cases: tuple[tuple[str | bool, str], ...] = (
            (
                not model.has("rounded weights") and f"a {model.family} model",
                f"one of {', '.join(modelled('rounded weights'))}",
            ),
            (model.frozen is not None and "frozen parts", "full training or adapters"),
            (model.vision is not None and "images", "a text model"),
            (model.is_quantised and "quantised weights", "quantize 'none'"),
            (self.mesh.model_ranks * self.mesh.ep > 1 and "ranks that split the model", "data-parallel ranks"),
        )
        if fused[0] == "axolotl-qat":
            tied = model.tie_word_embeddings and self.recipe.loss == "full"
            cases = (
                *cases,
                (model.adapter is not None and "adapters", "full training"),
                (tied and "a rounded embedding", "loss 'fused'"),
            )
        refuse(f"fused_kernels {fused[0]!r} with", cases)

    def _check_latent_experts(self) -> None:
        """Raise SpecError under autocast, which runs experts in the dtype of their latent and copies their weights."""
        autocast = self.recipe.engine == "ddp" and self.recipe.precision.endswith("mixed")
        if autocast and self.model.width_of_experts != self.model.hidden_size:
            raise SpecError("experts with a latent under autocast are not modelled; use precision 'bf16', or engine 'fsdp2'")

    def _check_predictions(self) -> None:
        """Raise SpecError for engines, losses and ranks with which NeMo AutoModel's multi-token prediction is not modelled."""
        if not self.model.predictions:
            return
        recipe, mesh = self.recipe, self.mesh
        own = {"cross-entropy", "loss-in-pieces", "compiled-loss"} & set(recipe.fused_parts)
        refuse("multi-token prediction with", (
            (recipe.engine != "fsdp2" and f"engine {recipe.engine!r}", "engine 'fsdp2'"),
            (recipe.loss not in ("full", "fused") and f"loss {recipe.loss!r}", "loss 'full' or 'fused'"),
            (bool(own) and f"fused_kernels {', '.join(sorted(own))!r}", "loss 'full' or 'fused' without them"),
            (recipe.recompute_layers is not None and "recompute_layers", "all blocks"),
            (recipe.offloads and "offload to host memory", "no offload"),
            (recipe.fsdp2.of_torch_2_15 and "FSDP2 of torch 2.15", "torch 2.13"),
            (recipe.fsdp2.shards_ends and "embedding and head as units of their own", "false for fsdp2.shards_ends"),
            (self.model.frozen is not None and "frozen parts", "full training or adapters"),
            *((getattr(mesh, name) > 1 and f"{name}={getattr(mesh, name)}", f"{name}=1, or predictions=0")
              for name in ("tp", "cp", "pp")),
        ))  # fmt: skip

    def _check_te_float8(self) -> None:
        """Raise SpecError for models and ranks with which Transformer Engine's float8 is not modelled outside Megatron-Core."""
        if "te-float8" not in self.recipe.fused_parts:
            return
        for refused, instead in (
            (self.model.adapter is not None or self.model.frozen is not None, "adapters or frozen parts; use full training"),
            (self.mesh.tp > 1, "tensor parallelism; use tp=1"),
            (self.recipe.float8_recipe is not None, "float8_recipe; use one of them"),
        ):
            if refused:
                raise SpecError(f"fused_kernels 'te-float8' is not modelled with {instead}")

    def _check_prime_rl(self) -> None:
        """Raise SpecError for jobs with which prime-rl's own experts are not modelled."""
        recipe, adapter = self.recipe, self.model.adapter
        if PRIME_RL not in recipe.fused_parts:
            return
        others = [one for one in recipe.fused_parts if one not in (PRIME_RL, "cross-entropy")]
        refuse(f"fused_kernels {PRIME_RL!r} with", (
            (not self.model.has("prime-rl") and f"a {self.model.family} model", f"one of {', '.join(modelled('prime-rl'))}"),
            (recipe.engine != "fsdp2" and f"engine {recipe.engine!r}", "engine 'fsdp2'"),
            (recipe.precision not in ("bf16", "bf16-mixed") and f"precision {recipe.precision!r}", "'bf16-mixed' or 'bf16'"),
            (bool(others) and f"{', '.join(others)}", "it alone"),
            (self.mesh.model_ranks * self.mesh.ep > 1 and "ranks that split the model", "data-parallel ranks"),
            (recipe.recompute == "selective" and "selective recomputation", "recompute 'full'"),
            (recipe.float8_recipe is not None and "float8_recipe", "bf16"),
            (adapter is not None and not adapter.runs and "peft's adapters", "runs, prime-rl's"),
            (self.model.frozen is not None and "frozen parts", "full training or adapters"),
        ))  # fmt: skip

    def _check_adapter(self, adapter: AdapterSpec) -> None:
        """Raise SpecError for options that are not modelled with adapters."""
        recipe, quantised = self.recipe, self.model.is_quantised
        if self.model.stacked.grouped:
            self._check_grouped_adapters()
        if recipe.engine == "megatron":  # which has rules of its own
            return
        if SENDING & set(recipe.fused_parts) and any(self.model.stacked) and not self.model.stacked.grouped:
            raise SpecError("adapters of experts with NeMo AutoModel's experts are not modelled; use --lora-targets attention")
        cases = (
            (recipe.engine == "paper" and "engine 'paper'", "engine 'ddp', 'fsdp2' or 'deepspeed'"),
            *(_beside_frozen(recipe) if recipe.engine == "deepspeed" else ()),
            *_of_the_adapter(adapter, recipe),
            *_in_the_family(self.model, adapter, recipe),
            *(_of_runs(self.model, adapter, recipe, self.mesh) if adapter.runs else ()),
            *(_of_dora(self.model, adapter, recipe, self.mesh) if adapter.dora != "none" else ()),
            (
                any(self.model.stacked)
                and not self.model.stacked.grouped
                and self.mesh.model_ranks * self.mesh.ep > 1
                and "adapters of all experts of a layer on ranks that split the model",
                "data-parallel ranks",
            ),
            (
                bool(adapter.saved)
                and self.mesh.model_ranks > 1
                and "modules that are trained whole on ranks that split the model",
                "data-parallel ranks",
            ),
            (
                quantised
                and recipe.engine not in ("fsdp1", "fsdp2")
                and recipe.offloads_states
                and "quantised weights (QLoRA) and offload to host memory",
                "no offload",
            ),
        )
        refuse("LoRA with", cases, says="is not modelled yet")

    def _check_grouped_adapters(self) -> None:
        """Raise SpecError for jobs with which NeMo AutoModel's adapters of experts are not modelled."""
        recipe, mesh = self.recipe, self.mesh
        shared = mesh.ep > 1 and mesh.dp_shard > mesh.ep
        own = bool(SENDING & set(recipe.fused_parts))
        refuse("NeMo AutoModel's adapters of experts with", (
            (not own and "other experts than its own", "fused_kernels grouped-experts, or experts_rank 0"),
            (recipe.engine != "fsdp2" and f"engine {recipe.engine!r}", "engine 'fsdp2'"),
            (recipe.precision != "bf16" and f"precision {recipe.precision!r}", "'bf16'"),
            (mesh.ep == 1 and mesh.dp_shard > 1 and "experts that all ranks shard", "ep with as many ranks"),
            (shared and f"ep={mesh.ep} below the {mesh.dp_shard} ranks", "as many"),
            (mesh.tp * mesh.cp > 1 and "tp or cp", "tp=1 and cp=1"),
            (self.model.is_quantised and "quantised weights", "none"),
            ("looped-experts" in recipe.fused_parts and "experts one after the other", "grouped-experts"),
        ))  # fmt: skip

    def _check_frozen(self) -> None:
        """Raise SpecError for options that are not modelled with frozen parameters."""
        recipe = self.recipe
        if recipe.engine not in ("ddp", "fsdp2", "deepspeed"):
            raise SpecError(
                f"frozen parameters with engine {recipe.engine!r} are not modelled yet; use engine 'ddp', 'fsdp2' or 'deepspeed'"
            )
        if recipe.engine == "deepspeed" and recipe.zero_stage == 3:
            refuse("frozen parameters with", _beside_frozen(recipe), says="are not modelled yet")

    def _check_recompute_layers(self, layers: int) -> None:
        """Raise SpecError if the model has fewer blocks, or if recomputing some of them is not modelled."""
        model = self.model
        if layers > model.num_hidden_layers:
            raise SpecError(
                f"recompute_layers={layers} is more than the {model.num_hidden_layers} layers of the model; use fewer"
            )
        if model.profile is not None:
            raise SpecError(
                f"recompute_layers={layers} with a profile is not modelled; use a model of a known family, or leave it out"
            )

    def _check_resharding(self) -> None:
        """Raise SpecError where ``fully_shard`` does (torch 2.13 _fsdp_init.py, ``_get_post_forward_mesh_info``)."""
        ways, ranks = ways_of_resharding(self.recipe.fsdp2), self.mesh.dp_shard
        if self.recipe.engine == "fsdp2" and ways is not None and ranks % ways:
            raise SpecError(
                f"reshard_after_forward={ways} does not divide the {ranks:,} ranks that shard; give a factor of them"
            )
