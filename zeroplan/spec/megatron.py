"""Checks jobs with engine ``megatron``: what Megatron-LM itself refuses, and what zeroplan's formulas do not cover."""

import re
from collections.abc import Iterator

from zeroplan.errors import SpecError, refuse
from zeroplan.spec.adapter import GROUPS, OLD_ROUTER, AdapterSpec
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.family import modelled
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.pipeline import Stage, cut, stages_per_rank
from zeroplan.spec.recipe import ADAM, RecipeSpec
from zeroplan.spec.traits import ATTENTION, MLP
from zeroplan.spec.vision import VISION_PARTS, VisionSpec

#: Precisions in Megatron-LM's table of bytes per parameter.
PRECISIONS = ("bf16-mixed", "fp16-mixed", "fp32")
SCHEDULES = (None, "1f1b", "interleaved-1f1b")


def chunks_of(layers: int, parts: int, by_hand: tuple[int, ...] | None = None) -> tuple[Stage, ...]:
    """Cut the layers into pipeline chunks: by hand, or evenly.

    If the chunks do not divide the layers, embedding and loss count as one layer each.

    Source: Megatron-LM 2026-08, megatron/core/transformer/transformer_block.py, get_num_layers_to_build. A layout
    (``--pipeline-model-parallel-layout``) can describe every cut, also with a chunk without layers.

    >>> [[chunk.layers for chunk in chunks_of(*one)] for one in ((8, 4), (14, 4), (13, 4), (6, 4, (0, 3, 3, 0)))]
    [[2, 2, 2, 2], [3, 4, 4, 3], [3, 4, 4, 2], [0, 3, 3, 0]]
    """
    even = (layers // parts,) * parts if layers % parts == 0 else None
    return cut(layers, parts, by_hand or even, fewest=0)


def layers_of_layout(text: str) -> tuple[int, ...]:
    """Return the layers of each chunk of a ``--pipeline-model-parallel-layout``.

    Raises SpecError if the embedding is not in the first chunk, or the loss and multi-token prediction are not in the last one.
    Source: Megatron-LM 2026-08, megatron/core/transformer/pipeline_parallel_layer_layout.py, parse_str_to_list.

    >>> layers_of_layout("Et*3|(tt|)*2,tmL")
    (3, 2, 2, 1)
    """
    plain = text.replace(",", "")
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        plain = re.sub(repeated, lambda found: found[1] * int(found[2]), plain)
    if not re.fullmatch(r"Et*(\|t*)*m*L", plain):
        raise SpecError(f"layout {text!r} is not modelled; use E in the first stage, m and L in the last, and t between")
    return tuple(chunk.count("t") for chunk in plain.split("|"))


def cut_flags(chunks: tuple[Stage, ...], predictions: int = 0) -> tuple[str, ...]:
    """Return Megatron-LM's arguments for this cut, with ``predictions`` modules for multi-token prediction; none if it is even.

    >>> cut_flags(chunks_of(6, 2)), cut_flags(chunks_of(5, 2)), cut_flags(chunks_of(14, 4))[0]
    ((), ('--pipeline-model-parallel-layout Ettt|ttL',), '--account-for-embedding-in-pipeline-split')
    """
    each = [chunk.layers for chunk in chunks]
    if len(set(each)) == 1:
        return ()
    whole = {one + (at in (0, len(each) - 1)) for at, one in enumerate(each)}
    if len(whole) == 1 and len(each) > 2:
        return "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"
    written = "|".join(
        "E" * chunk.is_first + "t" * chunk.layers + ("m" * predictions + "L") * chunk.is_last for chunk in chunks
    )
    return (f"--pipeline-model-parallel-layout {written}",)


def check_megatron(model: ModelSpec, recipe: RecipeSpec, mesh: MeshSpec, batch: BatchSpec) -> None:
    """Raise SpecError for options that are not modelled, and for splits that Megatron-LM refuses (arguments.py, validate_args)."""
    cases = (
        *_not_modelled(model, recipe, mesh), *_not_pretrained(model, recipe, mesh), *_not_split(model, recipe, mesh, batch)
    )  # fmt: skip
    refuse("engine 'megatron' with", cases)


def _not_modelled(model: ModelSpec, recipe: RecipeSpec, mesh: MeshSpec) -> Iterator[tuple[str | bool, str]]:
    yield not model.has("megatron") and f"family {model.family!r}", f"one of {', '.join(modelled('megatron'))}"
    yield model.max_window_layers > 0 and "a sliding window in some layers", "a window in all layers, or none"
    yield model.hidden_act is not None and f"activation function {model.hidden_act!r}", "engine 'fsdp2'"
    if model.adapter is not None:
        yield from _not_adapted(model, model.adapter, recipe, mesh)
    if model.vision is not None:
        yield from _not_with_a_tower(model.vision, recipe, mesh)
    yield model.frozen is not None and "frozen parameters", "engine 'fsdp2'"
    yield recipe.precision not in PRECISIONS and f"precision {recipe.precision!r}", f"one of {', '.join(PRECISIONS)}"
    yield recipe.optimizer not in (*ADAM, "muon") and f"optimizer {recipe.optimizer!r}", "adamw, adam or muon"
    if recipe.optimizer == "muon":
        yield from _not_by_muon(recipe)
    else:
        yield recipe.optimizer_impl not in (None, "fused") and f"optimizer_impl {recipe.optimizer_impl!r}", "fused, its own"
    yield from _not_of_recipe(recipe, mesh, has_experts=model.moe is not None)
    yield from _not_scheduled(recipe, mesh)
    if recipe.megatron.overlap_moe_expert_parallel_comm:
        yield from _not_overlapped(model, recipe, mesh)
    predicts = recipe.megatron.mtp_num_layers > 0
    yield predicts and model.positions > 0 and "mtp_num_layers and learned positions", "a model with rotary positions"
    if recipe.megatron.hybrid_layer_pattern is not None:
        yield from _not_hybrid(model, recipe, mesh)


def _not_adapted(
    model: ModelSpec, adapter: AdapterSpec, recipe: RecipeSpec, mesh: MeshSpec
) -> Iterator[tuple[str | bool, str]]:
    """Yield what is not modelled beside adapters: targets that Megatron-Core's matrices do not have, and parts of the recipe."""
    own, there, other_engine = recipe.megatron, set(model.adapted_layers), "engine 'fsdp2'"
    gate, up, down = model.traits.converted or MLP
    beyond = {*there, *adapter.targets.replace(" ", "").split(",")} - {*GROUPS, *ATTENTION, gate, up, down}
    if OLD_ROUTER not in adapter.targets.split(","):
        beyond -= {OLD_ROUTER}  # a router is no linear layer in Megatron-Core
    parts = [names for names in (ATTENTION[:3], (gate, up)) if 0 < len(there & set(names)) < len(names)]
    modules = set(own.recompute_modules.split(",")) - {"core_attn"} if recipe.recompute == "selective" else set[str]()
    for refused, what, instead in (
        (
            not model.has("megatron adapters"),
            f"adapters in a {model.family} model",
            f"one of {', '.join(modelled('megatron adapters'))}",
        ),
        (beyond, f"adapters of {', '.join(sorted(beyond))}", "targets 'attention,mlp'"),
        (parts, f"adapters of only some of {', '.join(next(iter(parts), ()))}, which it joins", "all of these targets"),
        (adapter.quantize != "none", f"adapters and quantize {adapter.quantize!r}", other_engine),
        (adapter.compute == "fp32", "adapters that compute in fp32", "compute 'autocast'"),
        (adapter.dora != "none", "DoRA", "dora 'none'"),
        (adapter.saved and model.tie_word_embeddings, "modules that are trained whole in a tied model", "adapters alone"),
        (recipe.zero_stage > 1, "adapters and Megatron-FSDP", "stage 1, the distributed optimizer"),
        (recipe.optimizer == "muon", "adapters and optimizer 'muon'", "'adamw'"),
        (modules, f"adapters and recompute_modules {own.recompute_modules!r}", "core_attn"),
        (model.moe is not None and own.expert_ways(mesh.tp) > 1, "adapters and experts that ranks split, as mcore-bridge has not,",
         "expert_tensor_parallel_size 1"),
        (own.fp8_format is not None, "adapters and matrices in FP8", "bf16"),
        (own.optimizer_offload_fraction > 0, "adapters and optimizer_offload_fraction", "no offload"),
        (own.gradients_beside > 0 or not own.main_weights, "adapters and gradients_beside or no main_weights", "neither"),
        (own.defer_embedding_wgrad_compute, "adapters and defer_embedding_wgrad_compute", "false for it"),
        (own.cross_entropy_fusion_impl == "verl", "adapters and verl's fused head", "another loss"),
        (own.mtp_num_layers > 0 or own.hybrid_layer_pattern is not None, "adapters and mtp_num_layers or a pattern", "neither"),
        (own.overlap_moe_expert_parallel_comm, "adapters and overlap_moe_expert_parallel_comm", "false for it"),
        (own.pretrains != "gpt", "adapters in BERT or T5", "pretrains 'gpt'"),
    ):  # fmt: skip
        yield bool(refused) and what, instead


def _not_with_a_tower(vision: VisionSpec, recipe: RecipeSpec, mesh: MeshSpec) -> Iterator[tuple[str | bool, str]]:
    """Yield what is not modelled beside a vision tower: its training, and what is not on every first rank alike."""
    yield vision.frozen_names != VISION_PARTS and "a trained vision tower", "--freeze tower,projector"
    yield not vision.has_blocks and "this vision tower", "engine 'fsdp2'"
    yield mesh.cp > 1 and "a vision tower and cp", "tp"
    yield recipe.zero_stage > 1 and "Megatron-FSDP and a vision tower", "stage 1, the distributed optimizer"
    yield recipe.megatron.overlap_moe_expert_parallel_comm and "a vision tower and overlapped micro-batches", "neither"


def _not_of_recipe(recipe: RecipeSpec, mesh: MeshSpec, *, has_experts: bool) -> Iterator[tuple[str | bool, str]]:
    """Yield what is not modelled of loss, attention, layers and the distributed optimizer."""
    yield recipe.loss != "full" and f"loss {recipe.loss!r}", "loss 'full'"
    yield bool(recipe.keep_logits) and "keep_logits", "no keep_logits"
    yield recipe.offload_activations and "offload_activations", "recompute 'full'"
    yield (
        mesh.tp > 1 and has_experts and not recipe.sequence_parallel and "experts and tp without sequence_parallel",
        "sequence_parallel",
    )
    if recipe.megatron.last_tokens is not None:
        yield from _not_of_last_tokens(recipe)
    overlaps = recipe.megatron.tp_comm_overlap and not (recipe.sequence_parallel and mesh.tp > 1)
    yield overlaps and "tp_comm_overlap without sequence_parallel, as Megatron-LM refuses it,", "sequence_parallel"
    aware = recipe.megatron.use_precision_aware_optimizer
    yield aware and not recipe.zero_stage and "use_precision_aware_optimizer and stage 0", "stage 1, the distributed optimizer"
    yield aware and recipe.precision == "fp32" and "use_precision_aware_optimizer and precision 'fp32'", "'bf16-mixed'"
    yield (
        not recipe.megatron.main_weights
        and recipe.precision != "bf16-mixed"
        and f"main_weights=false and {recipe.precision!r}",
        "'bf16-mixed'",
    )
    if recipe.zero_stage > 1:
        yield from _not_fully_sharded(recipe, mesh)
    if recipe.megatron.fp8_format is not None:
        yield from _not_in_fp8(recipe)
    kind, old = recipe.megatron.moe_token_dispatcher_type, recipe.megatron.core_release == "0.12"
    yield kind in ("flex", "deepep") and old and f"moe_token_dispatcher_type {kind!r} and core_release 0.12", "'0.13'"
    predicts = recipe.megatron.mtp_num_layers > 0
    yield predicts and recipe.megatron.pretrains != "gpt" and "mtp_num_layers and BERT or T5", "pretrains 'gpt'"
    local = recipe.megatron.transformer_impl == "local"
    yield local and recipe.attention != "eager" and f"transformer_impl 'local' and attention {recipe.attention!r}", "'eager'"
    yield mesh.cp > 1 and recipe.attention == "eager" and "attention 'eager' on context-parallel ranks", "attention 'sdpa'"


def _not_of_last_tokens(recipe: RecipeSpec) -> Iterator[tuple[str | bool, str]]:
    """Yield what is not modelled where the loss reads the last token of each sequence."""
    own = recipe.megatron
    for refused, name in (
        (own.mtp_num_layers > 0, "mtp_num_layers"), (own.pretrains != "gpt", "BERT or T5"),
        (recipe.zero_stage > 1, "Megatron-FSDP"),
        (own.defer_embedding_wgrad_compute, "defer_embedding_wgrad_compute"),
        (own.cross_entropy_fusion_impl == "verl", "verl's fused head"), (own.gradients_beside > 0, "gradients_beside"),
    ):  # fmt: skip
        yield refused and f"last_tokens {own.last_tokens!r} and {name}", "neither, or engine 'fsdp2'"


def _not_scheduled(recipe: RecipeSpec, mesh: MeshSpec) -> Iterator[tuple[str | bool, str]]:
    """Yield what is not modelled of a pipeline's schedule."""
    schedule, each = recipe.pipeline_schedule, recipe.pipeline_stages_per_rank
    yield schedule not in SCHEDULES and f"schedule {schedule!r}", "1f1b or interleaved-1f1b"
    yield mesh.pp == 1 and recipe.cuts_pipelines and "a pipeline's schedule or layers and pp=1", "several pipeline ranks"
    yield schedule in (None, "1f1b") and (each or 1) > 1 and "several stages per rank and schedule '1f1b'", "interleaved-1f1b"
    yield (
        mesh.pp == 1 and recipe.megatron.defer_embedding_wgrad_compute and "defer_embedding_wgrad_compute and pp=1",
        "several pipeline ranks, or leave it out",
    )
    yield schedule == "interleaved-1f1b" and each == 1 and "one stage per rank and an interleaved schedule", "1f1b"


def _not_fully_sharded(recipe: RecipeSpec, mesh: MeshSpec) -> Iterator[tuple[str | bool, str]]:
    """Yield what is not modelled under Megatron-FSDP, which is stages 2 and 3."""
    own, what = recipe.megatron, f"Megatron-FSDP (stage {recipe.zero_stage}) and "
    for refused, name in (
        (mesh.pp > 1, "pipeline ranks"), (mesh.dp_shard * mesh.cp == 1, "one data-parallel rank"),
        (recipe.optimizer == "muon", "optimizer 'muon'"),
        (own.use_precision_aware_optimizer, "use_precision_aware_optimizer"), (own.pretrains != "gpt", "BERT or T5"),
        (own.num_distributed_optimizer_instances > 1, "several instances of the optimizer"),
        (own.hybrid_layer_pattern is not None, "hybrid_layer_pattern"), (own.mtp_num_layers > 0, "mtp_num_layers"),
        (own.overlap_moe_expert_parallel_comm, "overlap_moe_expert_parallel_comm"),
        (own.core_release == "0.12", "core_release 0.12"), (own.gradients_beside > 0, "gradients_beside, which nanotron has alone"),
        (not own.main_weights, "no main weights, as nanotron may have"),
    ):  # fmt: skip
        yield refused and f"{what}{name}", "stage 1, the distributed optimizer, or leave it out"


def _not_in_fp8(recipe: RecipeSpec) -> Iterator[tuple[str | bool, str]]:
    """Yield what is not modelled with matrices in FP8."""
    own, what = recipe.megatron, f"fp8_format {recipe.megatron.fp8_format!r} and "
    others = set(own.recompute_modules.split(",")) - {"core_attn", "mlp", "moe"} if recipe.recompute == "selective" else set()
    blocks = own.fp8_recipe in ("blockwise", "mxfp8")
    for refused, name, instead in (
        (own.transformer_impl == "local", "transformer_impl 'local'", "'transformer_engine'"),
        (own.pretrains != "gpt", "BERT or T5", "pretrains 'gpt'"),
        (own.hybrid_layer_pattern is not None, "hybrid_layer_pattern", "layers of one kind"),
        (bool(others), f"recompute_modules {own.recompute_modules!r}", "core_attn, mlp or moe"),
        (recipe.zero_stage > 1 and not own.fp8_param_gather, "Megatron-FSDP without fp8_param_gather", "fp8_param_gather"),
        (recipe.zero_stage > 1 and blocks, f"Megatron-FSDP and fp8_recipe {own.fp8_recipe!r}", "'tensorwise', or stage 1"),
        (recipe.optimizer == "muon", "optimizer 'muon'", "'adamw'"),
    ):  # fmt: skip
        yield refused and f"{what}{name}", instead


def _not_by_muon(recipe: RecipeSpec) -> Iterator[tuple[str | bool, str]]:
    """Yield what Megatron-LM's Muon does not support (megatron/core/optimizer/__init__.py), and hybrid patterns."""
    own, what = recipe.megatron, "optimizer 'muon' and "
    yield recipe.precision != "bf16-mixed" and f"{what}precision {recipe.precision!r}", "'bf16-mixed'"
    yield own.grad_reduce_in_bf16 and f"{what}grad_reduce_in_bf16", "main gradients in fp32"
    yield own.use_precision_aware_optimizer and f"{what}use_precision_aware_optimizer", "fp32 states"
    yield not own.main_weights and f"{what}main_weights=false", "main weights"
    yield own.num_distributed_optimizer_instances > 1 and f"{what}several instances of it", "one"
    yield own.hybrid_layer_pattern is not None and f"{what}hybrid_layer_pattern", "layers of one kind"


def _not_hybrid(model: ModelSpec, recipe: RecipeSpec, mesh: MeshSpec) -> Iterator[tuple[str | bool, str]]:
    """Yield what is not modelled with a hybrid layer pattern."""
    own, what = recipe.megatron, "hybrid_layer_pattern and "
    pattern = own.hybrid_layer_pattern or ""
    yield not set(pattern) <= set("M*-E") and f"hybrid_layer_pattern {pattern!r}", "letters M, *, - and E"
    yield (
        len(pattern) != model.num_hidden_layers and f"{len(pattern)} letters for {model.num_hidden_layers} layers",
        "one a layer",
    )
    yield "E" in pattern and model.moe is None and f"{what}no experts", "a model with experts for E"
    yield "-" in pattern and model.moe is not None and f"{what}both MLPs and experts", "one of them"
    heads = own.mamba_num_heads or 2 * model.hidden_size // own.mamba_head_dim
    for name, count in (("heads", heads), ("groups", own.mamba_num_groups)):
        yield count % mesh.tp > 0 and f"{what}{count} {name} of Mamba on tp={mesh.tp} ranks", f"a factor of the {name}"
    yield mesh.cp > 1 and f"{what}cp={mesh.cp}", "cp=1"
    yield recipe.recompute != "none" and f"{what}recompute {recipe.recompute!r}", "'none'"
    yield own.transformer_impl == "local" and f"{what}transformer_impl 'local'", "'transformer_engine'"
    yield own.pretrains != "gpt" and f"{what}BERT or T5", "pretrains 'gpt'"
    yield (own.mtp_num_layers > 0 or own.overlap_moe_expert_parallel_comm) and f"{what}mtp_num_layers or overlap", "neither"


def _not_overlapped(model: ModelSpec, recipe: RecipeSpec, mesh: MeshSpec) -> Iterator[tuple[str | bool, str]]:
    """Yield what Megatron-LM refuses with overlap (transformer_config.py, __post_init__), and pipelines, which are not modelled."""
    what, own = "overlap_moe_expert_parallel_comm and ", recipe.megatron
    yield mesh.ep == 1 and f"{what}ep=1", "several expert-parallel ranks"
    gathers = own.moe_token_dispatcher_type == "allgather"  # noqa: S105  tokens of text
    yield gathers and f"{what}moe_token_dispatcher_type 'allgather'", "'alltoall'"
    yield recipe.recompute != "none" and f"{what}recompute {recipe.recompute!r}", "'none'"
    yield mesh.pp > 1 and f"{what}pp={mesh.pp}", "pp=1"
    yield own.mtp_num_layers > 0 and f"{what}mtp_num_layers", "no mtp_num_layers"
    dense = 0 if model.moe is None else model.moe.num_dense_layers
    yield dense > 0 and f"{what}dense layers before those with experts", "layers of one kind"


def _not_pretrained(model: ModelSpec, recipe: RecipeSpec, mesh: MeshSpec) -> Iterator[tuple[str | bool, str]]:
    """Yield what is not modelled for BERT and T5, whose attention reads a padding mask."""
    script = recipe.megatron.pretrains
    what = f"pretrains {script!r} and "
    if script == "gpt":
        return
    yield model.family != "gpt2" and f"{what}family {model.family!r}", "gpt2"
    yield recipe.attention != "eager" and f"{what}attention {recipe.attention!r}", "'eager'"
    yield not recipe.megatron.masked_softmax_fusion and f"{what}masked_softmax_fusion=false", "masked_softmax_fusion"
    yield recipe.recompute != "none" and f"{what}recompute {recipe.recompute!r}", "'none'"
    if script == "t5":
        yield mesh.pp > 1 and f"{what}pp={mesh.pp}", "pp=1 (Megatron-LM refuses it, too)"
        yield recipe.sequence_parallel and f"{what}sequence_parallel", "tensor ranks that each have whole hidden states"


def _not_in_groups(recipe: RecipeSpec, mesh: MeshSpec, steps: int) -> Iterator[tuple[str | bool, str]]:
    """Yield micro-batches that the interleaved schedule refuses (schedules.py, forward_backward_pipelining_with_interleaving)."""
    size = recipe.megatron.microbatch_group_size_per_virtual_pipeline_stage
    if size is None:
        yield steps % mesh.pp > 0 and f"{steps} interleaved micro-batches on pp={mesh.pp} ranks", "a multiple of pp"
        return
    fits = mesh.pp <= size <= steps and (steps % size == 0 or steps % size >= mesh.pp)
    what = f"groups of {size} of {steps} interleaved micro-batches on pp={mesh.pp} ranks"
    yield not fits and what, "groups, the last one too, of no fewer than pp and no more than there are"


def _beyond_fused_softmax(model: ModelSpec, recipe: RecipeSpec, mesh: MeshSpec, batch: BatchSpec) -> str:
    """Return the shape of local attention if the fused softmax does not support it; empty otherwise.

    Source: Megatron-Core 0.16, fusions/fused_softmax.py, is_kernel_available.
    """
    own, tokens = recipe.megatron, batch.seq_len
    if own.transformer_impl != "local" or own.pretrains != "gpt" or not own.masked_softmax_fusion or recipe.precision == "fp32":
        return ""
    rows = batch.micro_batch_size * model.num_attention_heads // mesh.tp
    fits = 16 < tokens <= 4096 and tokens % 4 == 0 and rows % (4 if tokens > 128 else 8) == 0
    return "" if fits else f"masked_softmax_fusion, {tokens:,} tokens and {rows} heads of a micro-batch"


def _not_split(model: ModelSpec, recipe: RecipeSpec, mesh: MeshSpec, batch: BatchSpec) -> Iterator[tuple[str | bool, str]]:
    layers, experts = model.num_hidden_layers, 0 if model.moe is None else model.moe.num_experts
    chunks = stages_per_rank(recipe.pipeline_schedule or "1f1b", recipe.pipeline_stages_per_rank) if mesh.pp > 1 else 1
    chunks_of(layers, mesh.pp * chunks, recipe.layers_by_hand)
    if chunks > 1:
        yield from _not_in_groups(recipe, mesh, batch.grad_accum_steps)
    for what, count in (("query", model.num_attention_heads), ("key/value", model.num_key_value_heads)):
        yield count % mesh.tp > 0 and f"{count} {what} heads on tp={mesh.tp} ranks", "a factor of the heads"
    cut = 2 * mesh.cp if mesh.cp > 1 else 1
    yield batch.seq_len % cut > 0 and f"seq_len={batch.seq_len:,} on cp={mesh.cp} ranks", f"a multiple of {cut}"
    yield mesh.ep > 1 and not experts and f"ep={mesh.ep} and no experts, which Megatron-Core refuses,", "ep=1"
    yield _beyond_fused_softmax(model, recipe, mesh, batch), "megatron.masked_softmax_fusion=false, as it then runs anyway"
    yield experts % mesh.ep > 0 and f"{experts} experts on ep={mesh.ep} ranks", "a factor of the experts"
    own, sharing = recipe.megatron, mesh.dp_shard * mesh.cp * mesh.tp
    etp = own.expert_ways(mesh.tp) if experts else own.expert_tensor_parallel_size or 1
    yield etp > 1 and not experts and f"expert_tensor_parallel_size={etp} and no experts", "1 for it"
    over = f"ep={mesh.ep} x expert_tensor_parallel_size={etp} on {sharing:,} ranks of a pipeline stage"
    yield sharing % (mesh.ep * etp) > 0 and over, "a factor of the ranks"
