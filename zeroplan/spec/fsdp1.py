"""Checks whether FSDP1 can run a job, and whether zeroplan models it."""

from zeroplan.errors import SpecError, refuse
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec


def check_fsdp1(model: ModelSpec, recipe: RecipeSpec, mesh: MeshSpec) -> None:
    """Raise SpecError, in one line, for a job that FSDP1 cannot run or that is not modelled with it.

    >>> from zeroplan.spec.model import ModelSpec
    >>> tiny = ModelSpec(family="llama", hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    ...                  num_key_value_heads=2, head_dim=16, vocab_size=256)
    >>> check_fsdp1(tiny, RecipeSpec(engine="fsdp1", optimizer="muon"), MeshSpec(dp_shard=8))
    Traceback (most recent call last):
    zeroplan.errors.SpecError: engine 'fsdp1' with optimizer 'muon' (it takes matrices, and shards are flat) fails; use 'adamw'
    """
    if recipe.engine != "fsdp1":
        return
    if recipe.optimizer == "muon":
        raise SpecError("engine 'fsdp1' with optimizer 'muon' (it takes matrices, and shards are flat) fails; use 'adamw'")
    cases = (
        (mesh.dp_shard == 1 and "one rank that shards, where it shards nothing (NO_SHARD),", "engine 'ddp', or more GPUs"),
        (recipe.loss == "chunked" and "loss 'chunked'", "loss 'full'"),
        (model.profile is not None and "a profile", "engine 'fsdp2'"),
        *_of_adapters(model, recipe),
    )
    refuse("engine 'fsdp1' with", cases)


def _of_adapters(model: ModelSpec, recipe: RecipeSpec) -> tuple[tuple[str | bool, str], ...]:
    options, around = recipe.fsdp1, recipe.fsdp1.checkpoints_units
    if model.adapter is None:
        return (
            (options.ignores_adapters and "ignores_adapters without LoRA", "false for it"),
            (around and recipe.recompute != "full" and "checkpoints_units without recompute 'full'", "false for it"),
        )
    return (
        (not options.wraps_adapters and "adapters in the unit of their block", "wraps_adapters=true, as peft wraps them"),
        (options.cpu_offload and options.ignores_adapters and "offload to host memory and ignores_adapters", "false for it"),
        (options.forward_prefetch and "forward_prefetch and LoRA", "false for it"),
        (recipe.recompute == "selective" and "recompute 'selective' and LoRA", "recompute 'full'"),
        (recipe.offload_activations and "offload_activations and LoRA", "recompute 'full' alone"),
        (recipe.recompute_layers is not None and "recompute_layers and LoRA", "all layers"),
        (around and recipe.recompute != "full" and "checkpoints_units without recompute 'full'", "false for it"),
    )
