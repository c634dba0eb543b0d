"""Which jobs may have padding in their batches?"""

from collections.abc import Iterator

from zeroplan.errors import refuse
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import ON_PAPER, RecipeSpec
from zeroplan.spec.releases import release_of


def check_padded(model: ModelSpec, recipe: RecipeSpec, mesh: MeshSpec) -> None:
    """Raise SpecError if padding is not modelled for the job."""
    refuse("padded with", not_padded(model, recipe, mesh), ", or leave padded out")


def is_modelled_padded(model: ModelSpec, recipe: RecipeSpec, mesh: MeshSpec) -> bool:
    """Whether padding is modelled for the job."""
    return not any(refused for refused, _ in not_padded(model, recipe, mesh))


def not_padded(model: ModelSpec, recipe: RecipeSpec, mesh: MeshSpec) -> Iterator[tuple[str | bool, str]]:
    """Yield what is not modelled with padding, or False, and what to use instead."""
    yield recipe.engine in (*ON_PAPER, "megatron") and f"engine {recipe.engine!r}", "engine 'fsdp2', 'ddp' or 'deepspeed'"
    yield recipe.attention == "eager" and "attention 'eager', which always has a mask,", "attention 'sdpa' or 'flash'"
    yield model.profile is not None and "a profile", "a model of a known family"
    yield recipe.fsdp2.are_torchtitans and "modules of torchtitan", "--modules transformers"
    yield release_of(recipe.transformers).has_other_blocks and f"transformers {recipe.transformers}", "a release from 5.0 on"
    for name, degree in (("tp", mesh.tp), ("cp", mesh.cp), ("pp", mesh.pp)):
        yield degree > 1 and f"{name}={degree}", f"{name}=1"
