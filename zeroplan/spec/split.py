"""Checks whether tensor parallelism (FSDP2 with DTensor) and context parallelism can split a job, and are modelled for it."""

from zeroplan.errors import SpecError, refuse
from zeroplan.numeric import Bool, Int
from zeroplan.spec.adapter import HEAD
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.family import DISPATCHED_FAMILIES, TRAITS, families
from zeroplan.spec.mesh import MeshSpec, Split
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.pipeline import SPLIT
from zeroplan.spec.recipe import Engine, RecipeSpec, ways_of_resharding

#: Optimizers whose states and step are those of a rank's own parts of the weights. Transformer Engine's and flashoptim's steps
#: were read, not run.
_OPTIMIZERS = (
    "adamw", "adam", "sgd", "sgd-momentum", "adagrad", "rmsprop", "te-adam", "te-adam-remainders", "te-adam-masters", "flash-adamw",
    "flash-adamw-32bit",
)  # fmt: skip


def check_tensor_parallel(model: ModelSpec, recipe: RecipeSpec, batch: BatchSpec, mesh: MeshSpec) -> None:
    """Raise SpecError for dimensions that DTensor cannot split evenly, and for options not modelled with tensor parallelism.

    >>> from zeroplan.spec.model import ModelSpec
    >>> tiny = ModelSpec(family="llama", hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    ...                  num_key_value_heads=2, head_dim=16, vocab_size=256)
    >>> check_tensor_parallel(tiny, RecipeSpec(), BatchSpec(), MeshSpec(tp=4))
    Traceback (most recent call last):
    zeroplan.errors.SpecError: tp=4 does not divide num_key_value_heads=2; use a factor of it
    """
    ranks = mesh.tp
    _check_family("tp", ranks, model, mesh)
    for name, number in (
        ("num_attention_heads", model.num_attention_heads),
        ("num_key_value_heads", model.num_key_value_heads),
        ("intermediate_size", model.intermediate_size),
        ("vocab_size", model.vocab_size),
        ("seq_len" if mesh.cp == 1 else f"seq_len / cp={mesh.cp}", batch.seq_len // mesh.cp),
    ):
        if number % ranks:
            raise SpecError(f"tp={ranks} does not divide {name}={number:,}; use a factor of it")
    if ways_of_resharding(recipe.fsdp2) is not None:  # torch 2.13, _fsdp_param.py, FSDPParam.to_sharded_post_forward
        raise SpecError(f"tp={ranks} with reshard_after_forward as a number is what FSDP2 refuses; use true or false for it")
    cases = *_of_whole_sequences(recipe, mesh), *_of_adapters(model, recipe, mesh), *_not_modelled(model, recipe, batch)
    refuse(f"tp={ranks} with", cases, ", or tp=1")


def check_context_parallel(model: ModelSpec, recipe: RecipeSpec, batch: BatchSpec, mesh: MeshSpec) -> None:
    """Raise SpecError for sequences that do not divide evenly, and for options not modelled with context parallelism.

    >>> from zeroplan.spec.model import ModelSpec
    >>> tiny = ModelSpec(family="llama", hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    ...                  num_key_value_heads=2, head_dim=16, vocab_size=256)
    >>> check_context_parallel(tiny, RecipeSpec(), BatchSpec(seq_len=4100), MeshSpec(cp=4))
    Traceback (most recent call last):
    zeroplan.errors.SpecError: cp=4 needs a seq_len that 8 divides (each rank has an early and a late part), not 4,100
    """
    ranks = mesh.cp
    _check_family("cp", ranks, model, mesh)
    if batch.seq_len % (2 * ranks):
        raise SpecError(
            f"cp={ranks} needs a seq_len that {2 * ranks} divides (each rank has an early and a late part), not {batch.seq_len:,}"
        )
    in_32_bits = recipe.precision == "fp32"
    cases = (
        (recipe.engine != "fsdp2" and f"engine {recipe.engine!r}", "engine 'fsdp2'"),
        (in_32_bits and "precision 'fp32', for which no kernel accepts grouped heads,", "bf16-mixed"),
        (recipe.kernels == "cuda-7" and "a GPU before compute capability 8.0, which has no flash kernel,", "a newer GPU"),
        (recipe.fsdp2.cpu_offload and "offload to host memory", "no offload"),
        (ways_of_resharding(recipe.fsdp2) is not None and "reshard_after_forward as a number", "true or false for it"),
        (model.adapter is not None and "adapters", "full training"),
        # torch 2.13, aten/src/ATen/native/transformers/attention.cpp, pad_last_dim: ranks then exchange wider keys and values.
        (model.head_dim % 8 != 0 and f"head_dim={model.head_dim}, which the flash kernel pads,", "a multiple of 8 for it"),
        (recipe.loss not in ("full", "fused") and f"loss {recipe.loss!r}", "loss 'full' or 'fused'"),
        *_of_model_and_batch(model, recipe, batch),
    )
    refuse(f"cp={ranks} with", cases, ", or cp=1")


def split_families(*, with_experts: bool) -> tuple[str, ...]:
    """Return the families with tensor and context parallelism; those with experts have it beside expert parallelism."""
    return families(lambda one: "split" in one.modelled and (one.experts != "none") == with_experts)


def may_split(model: ModelSpec, engine: Engine, mesh: Split) -> bool:
    """Whether these degrees are modelled for the family under this engine. If not, every job with them is refused.

    >>> from zeroplan.spec.model import ModelSpec
    >>> tiny = ModelSpec(family="gemma2", hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    ...                  num_key_value_heads=2, head_dim=16, vocab_size=256)
    >>> may_split(tiny, "fsdp2", MeshSpec(dp_shard=8)), may_split(tiny, "fsdp2", MeshSpec(tp=2))
    (True, False)
    """
    if engine == "megatron":
        return model.has("megatron")
    if mesh.ep > 1 and model.family not in DISPATCHED_FAMILIES:
        return False
    return (mesh.tp * mesh.cp == 1 or _is_split(model, mesh)) and (mesh.pp == 1 or model.has("pipeline"))


def _is_split(model: ModelSpec, mesh: Split) -> bool:
    """Whether tensor and context parallelism are modelled for the family: of one with experts beside expert parallelism."""
    return model.has("split") and model.profile is None and (model.traits.experts != "none") == (mesh.ep > 1)


def _check_family(way: str, ranks: int, model: ModelSpec, mesh: MeshSpec) -> None:
    if _is_split(model, mesh):
        return
    if model.has("split") and model.profile is None and mesh.ep == 1:
        raise SpecError(f"{way}={ranks} of experts that every rank has is not modelled; use an ep above 1, or {way}=1")
    what = "a profile" if model.profile is not None else f"family {model.family!r}"
    beside = f" beside ep={mesh.ep}" if mesh.ep > 1 else ""
    others = ", ".join(split_families(with_experts=mesh.ep > 1))
    raise SpecError(f"{way}={ranks} of {what}{beside} is not modelled; use {way}=1, or one of {others}")


def shards_of_experts_are_even(experts: int, widths: tuple[int, int], sharing: Int, ep: int) -> Bool:
    """Whether ``fully_shard`` can shard experts evenly over these ranks. With more ranks than experts it shards along dim 1.

    ``widths``: the size of dim 1 of the two weights, :func:`widths_of_experts`.

    >>> shards_of_experts_are_even(8, (192, 64), 16, 2), shards_of_experts_are_even(8, (192, 64), 20, 2)
    (True, False)
    """
    ranks = sharing // ep
    return (sharing <= experts) | ((widths[0] % ranks == 0) & (widths[1] % ranks == 0))


def widths_of_experts(model: ModelSpec) -> tuple[int, int]:
    """Return the size of dim 1 of the experts' two weights."""
    width = 0 if model.moe is None else model.moe.moe_intermediate_size
    return width if model.family in ("gpt_oss", "nemotron_h") else 2 * width, model.width_of_experts


def _not_modelled(model: ModelSpec, recipe: RecipeSpec, batch: BatchSpec) -> tuple[tuple[str | bool, str], ...]:
    return (
        (recipe.loss != "full" and f"loss {recipe.loss!r}", "loss 'full'"),
        *_of_model_and_batch(model, recipe, batch),
        (recipe.optimizer not in _OPTIMIZERS and f"optimizer {recipe.optimizer!r}", "adamw"),
        (not recipe.sync_every_micro_batch and "sync_every_micro_batch=False", "true for it"),
    )


def _of_whole_sequences(recipe: RecipeSpec, mesh: MeshSpec) -> tuple[tuple[str | bool, str], ...]:
    if recipe.fsdp2.sequence_parallel:
        return ()
    beside = " and ".join(f"{name}={ways}" for name, ways in (("cp", mesh.cp), ("ep", mesh.ep)) if ways > 1)
    return (
        (beside != "" and f"fsdp2.sequence_parallel=false and {beside}", "true for it"),
        (
            recipe.pipeline_schedule in SPLIT and f"fsdp2.sequence_parallel=false and {recipe.pipeline_schedule!r}",
            "true for it",
        ),
    )


def _of_adapters(model: ModelSpec, recipe: RecipeSpec, mesh: MeshSpec) -> tuple[tuple[str | bool, str], ...]:
    adapter = model.adapter
    if adapter is None:
        return ()
    outside = HEAD in adapter.layers_in(model.family) or bool(adapter.saved)
    return (
        (recipe.fsdp2.sequence_parallel and "adapters and fsdp2.sequence_parallel", "false for it"),
        (adapter.quantize != "none" and f"adapters of weights in {adapter.quantize}", "16-bit weights"),
        (adapter.rank % mesh.tp > 0 and f"adapters of rank {adapter.rank}", f"a rank that {mesh.tp} divides"),
        (outside and "adapters or trained copies of embedding and head", "adapters in blocks"),
        (recipe.precision not in ("bf16", "fp32") and f"adapters and precision {recipe.precision!r}", "'bf16'"),
        (recipe.recompute != "none" and f"adapters and recompute {recipe.recompute!r}", "'none'"),
        (adapter.dropout and "dropout of adapters", "none of it"),
        (recipe.fsdp2.cpu_offload and "adapters and offload", "no offload"),
        (mesh.pp > 1 and "adapters and pp", "one pipeline rank"),
    )


def _of_model_and_batch(model: ModelSpec, recipe: RecipeSpec, batch: BatchSpec) -> tuple[tuple[str | bool, str], ...]:
    window = model.sliding_window
    biased = model.mlp_bias or (model.attention_bias and TRAITS[model.family].biased_output)
    return (
        (model.frozen is not None and "frozen parameters", "full training"),
        (biased and "biases of output and down projection", "a model without them"),
        (window is not None and batch.seq_len >= window and f"a sliding window of {window:,}", "a shorter seq_len"),
        (recipe.attention != "sdpa" and f"attention {recipe.attention!r}", "attention 'sdpa'"),
        (recipe.offload_activations and "offload_activations", "recompute 'full' alone"),
    )
