"""Checks whether a job's model may have embeddings of each layer (Gemma 4 E2B and E4B)."""

from zeroplan.errors import refuse
from zeroplan.spec.adapter import AdapterSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec

_ENGINES = ("ddp", "fsdp2", "deepspeed", "paper")


def check_per_layer(model: ModelSpec, recipe: RecipeSpec) -> None:
    """Raise SpecError for settings that are not modelled with embeddings of each layer, or with layers that share keys."""
    if model.per_layer is None:
        return
    refuse(
        "a model with embeddings of each layer (Gemma 4 E2B, E4B) and",
        (
            (recipe.engine not in _ENGINES and f"engine {recipe.engine!r}", f"one of {', '.join(_ENGINES)}"),
            *_of_adapters(model.adapter, recipe),
            (model.frozen is not None and "frozen parts", "full training"),
            (recipe.offload_activations and "offload_activations", "recompute 'full'"),
            (recipe.recompute_layers is not None and "recompute_layers", "recompute 'full' or 'none'"),
            (bool(recipe.fused_parts) and "fused_kernels", "transformers' own code"),
            (recipe.fsdp2.shards_ends and "units of their own for embedding and head", "the root's unit"),
            (recipe.ddp.compiled and "a compiled model", "DDP without torch.compile"),
            *_of_deepspeed(recipe),
        ),
    )


def _of_adapters(adapter: AdapterSpec | None, recipe: RecipeSpec) -> tuple[tuple[str | bool, str], ...]:
    if adapter is None:
        return ()
    return (
        (adapter.quantize not in ("none", "nf4", "nf4-double") and f"quantize={adapter.quantize!r}", "nf4-double"),
        (
            adapter.quantize != "none" and recipe.engine not in ("ddp", "fsdp2") and "QLoRA",
            "engine 'ddp' or 'fsdp2', or weights in 16 bits",
        ),
        (adapter.trains("embedding") and "a trained embedding beside adapters", "adapters alone"),
        (not adapter.is_of_peft and "adapters of NeMo AutoModel or prime-rl", "peft's"),
        (adapter.dora != "none" and "DoRA", "LoRA"),
        (adapter.compute == "fp32" and "adapters that compute in fp32", "autocast"),
    )


def _of_deepspeed(recipe: RecipeSpec) -> tuple[tuple[str | bool, str], ...]:
    options, is_it = recipe.deepspeed, recipe.engine == "deepspeed"
    less = options.zero_quantized_weights or options.zero_quantized_gradients or options.zero_hpz_partition_size > 1
    return (
        (is_it and less and "ZeRO++", "DeepSpeed without it"),
        (is_it and options.offloads and "DeepSpeed's offload", "engine 'fsdp2' with offload"),
        (is_it and not options.memory_efficient_linear and "torch's own linear layers", "memory_efficient_linear"),
    )
