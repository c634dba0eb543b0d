"""Checks whether a job may offload activations to host memory, with and without recomputation."""

from collections.abc import Iterator

from zeroplan.errors import SpecError
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.spec.releases import release_of


def check_offloaded(model: ModelSpec, recipe: RecipeSpec, mesh: MeshSpec) -> None:
    """Raise SpecError for jobs whose offloaded activations are not modelled."""
    if not recipe.offload_activations:
        return
    if model.profile is not None:
        raise SpecError("offload_activations with a profile is not modelled; leave it out")
    if model.family == "gpt2" and recipe.attention == "eager":
        raise SpecError("offload_activations with gpt2 and attention 'eager' is not modelled; use attention 'sdpa'")
    for refused in _of_all_that_is_saved(model, recipe, mesh) if recipe.recompute == "none" else ():
        if refused:
            raise SpecError(
                f"offload_activations with recompute 'none' and {refused} is not modelled; use recompute 'full', or leave it out"
            )


def _of_all_that_is_saved(model: ModelSpec, recipe: RecipeSpec, mesh: MeshSpec) -> Iterator[str | bool]:
    """Yield settings whose saved tensors (views of weights among them) the blocks' formulas do not list one by one."""
    yield recipe.engine == "deepspeed" and recipe.zero_stage == 3 and "DeepSpeed's own linear layers at stage 3"
    yield recipe.engine == "megatron" and "engine 'megatron'"
    yield recipe.fsdp2.are_torchtitans and "modules 'torchtitan'"
    yield bool(recipe.fused_parts) and "fused_kernels"
    yield release_of(recipe.transformers).has_other_blocks and f"transformers={recipe.transformers!r}"
    yield model.is_quantised and "quantised weights"
    if model.adapter is not None:
        yield model.moe is not None and "adapters beside experts"
        yield model.adapter.compute == "fp32" and "adapters that compute in fp32"
    yield not model.has("offloaded activations") and f"a {model.family} model"
    for name in ("tp", "cp", "pp", "ep"):
        yield getattr(mesh, name) > 1 and f"{name}={getattr(mesh, name)}"
