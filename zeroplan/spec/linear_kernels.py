"""Whether kernels of other packages run a job's linear attention."""

from collections.abc import Iterator

from zeroplan.errors import refuse
from zeroplan.spec.family import OF_MAMBA, families
from zeroplan.spec.model import LinearSpec, ModelSpec
from zeroplan.spec.recipe import RecipeSpec

#: Families whose linear attention transformers runs by kernels of other packages, where these are installed.
_FAMILIES = families(lambda one: one.kernels)


def check_linear_attention(model: ModelSpec, recipe: RecipeSpec) -> None:
    """Raise SpecError, in one line with the way out, if the kernels of linear attention are not modelled for this job."""
    if recipe.linear_attention == "kernels":
        refuse("linear_attention 'kernels' with", _not_modelled(model, recipe), ", or linear_attention 'torch'")


def runs_by_kernels(model: ModelSpec, recipe: RecipeSpec) -> bool:
    """Whether the kernels are modelled for this model and recipe."""
    return not any(one for one, _ in _not_modelled(model, recipe))


def _not_modelled(model: ModelSpec, recipe: RecipeSpec) -> Iterator[tuple[str | bool, str]]:
    yield not model.traits.kernels and f"a {model.family} model", f"one of {', '.join(_FAMILIES)}"
    yield model.profile is not None and "a profile", "a model of the catalogue"
    engines = "ddp", "fsdp1", "fsdp2", "deepspeed"
    yield recipe.engine not in engines and f"engine {recipe.engine!r}", f"one of {', '.join(engines)}"
    away = recipe.offload_activations and recipe.recompute == "none"
    yield away and "offload_activations and recompute 'none'", "recompute 'full'"
    yield _needs_copies(model) and "channels of Mamba-2 that 8 does not divide", "a model whose channels it divides"
    yield recipe.kernels == "cpu" and "kernels 'cpu'", "'cuda'"


def _needs_copies(model: ModelSpec) -> bool:
    """Whether the convolution's kernel needs copies of its input, or refuses it (mamba_ssm 2.3, ``ensure_stride``)."""
    own = model.linear
    return (
        model.traits.kernels == OF_MAMBA and own is not None and any(one % 8 for one in (own.num_value_heads, _channels(own)))
    )


def _channels(own: LinearSpec) -> int:
    return own.num_value_heads * own.value_head_dim + 2 * own.num_key_heads * own.key_head_dim
