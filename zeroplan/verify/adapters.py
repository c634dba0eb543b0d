"""Low-rank adapters as peft puts them into a model."""

import warnings

from torch import nn

from zeroplan.spec.adapter import AdapterSpec
from zeroplan.spec.recipe import RecipeSpec


def with_adapters(model: nn.Module, adapter: AdapterSpec, recipe: RecipeSpec) -> nn.Module:
    """Freeze a transformers model and put adapters beside its linear layers.

    peft makes adapters of 16-bit weights fp32 where that is what is trained. DeepSpeed casts the whole module to 16 bits, and is
    handed it so.
    """
    with warnings.catch_warnings(), next(model.parameters()).device:
        warnings.simplefilter("ignore")  # peft calls what transformers is about to rename
        return _adapted(model, adapter, recipe)


def _adapted(model: nn.Module, adapter: AdapterSpec, recipe: RecipeSpec) -> nn.Module:
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415  takes seconds

    wanted = LoraConfig(r=adapter.rank, lora_alpha=2 * adapter.rank, target_modules=list(adapter.layers), task_type="CAUSAL_LM")
    wide = recipe.precision.endswith("mixed") and recipe.engine != "deepspeed"
    adapted: nn.Module = get_peft_model(model, wanted, autocast_adapter_dtype=wide)
    return adapted.train()


def unwrapped(module: nn.Module) -> nn.Module:
    """The transformers model inside peft's wrapper, whose parts have the names that they have without it."""
    inside = getattr(module, "get_base_model", None)
    return module if inside is None else inside()
