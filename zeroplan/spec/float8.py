"""Checks whether a job may run its linear layers in float8."""

from collections.abc import Iterator

from zeroplan.errors import SpecError, refuse
from zeroplan.spec.compiled import COMPILED_BLOCKS
from zeroplan.spec.family import modelled
from zeroplan.spec.hardware import GpuSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec

#: torchao's float8 products need widths that 16 divides (float8/float8_linear_utils.py, ``_auto_filter_for_recipe``).
_GROUP = 16
#: A block of MXFP8 has 32 elements; NVFP4's kernels take multiples of 128 (nvfp4_training/nvfp4_linear.py, nvfp4_mm_triton).
_GROUPS = {"mxfp8": 32, "nvfp4": 128}
ON_BLACKWELL = ("mxfp8", "nvfp4")


def check_float8(model: ModelSpec, recipe: RecipeSpec, mesh: MeshSpec, gpu: GpuSpec | None = None) -> None:
    """Raise SpecError, in one line with the way out, if float8 is not modelled for this job.

    >>> from zeroplan.spec.model import ModelSpec
    >>> tiny = ModelSpec(family="llama", hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    ...                  num_key_value_heads=2, head_dim=16, vocab_size=256)
    >>> check_float8(tiny, RecipeSpec(engine="ddp", zero_stage=0, float8_recipe="rowwise"), MeshSpec())
    Traceback (most recent call last):
    zeroplan.errors.SpecError: float8_recipe 'rowwise' with engine 'ddp' is not modelled; use engine 'fsdp2'
    """
    if recipe.fsdp2.float8_all_gather:
        refuse("fsdp2.float8_all_gather with", _not_gathered(recipe))
    if recipe.fsdp2.float8_layers is not None:
        refuse(f"fsdp2.float8_layers={recipe.fsdp2.float8_layers} with", _not_some_layers(model, recipe))
    if recipe.float8_recipe is None:
        return
    refuse(f"float8_recipe {recipe.float8_recipe!r} with", _not_modelled(model, recipe, mesh))
    if recipe.float8_recipe in ON_BLACKWELL and gpu is not None and "fp4" not in gpu.dense_flops_per_s:
        raise SpecError(f"GPU {gpu.name!r} has no products in {recipe.float8_recipe!r}; use 'rowwise', or a B200")
    if gpu is not None and "fp8" not in gpu.dense_flops_per_s:
        raise SpecError(f"GPU {gpu.name!r} does not multiply in float8; leave float8_recipe out, or use an H100")


def _not_gathered(recipe: RecipeSpec) -> Iterator[tuple[str | bool, str]]:
    # torchao 0.18, float8/config.py, Float8LinearConfig: a scale per row cannot be gathered
    yield recipe.float8_recipe != "tensorwise" and f"float8_recipe {recipe.float8_recipe or 'none'!r}", "'tensorwise'"
    yield recipe.fsdp2.cpu_offload and "fsdp2.cpu_offload", "one of them"
    yield not isinstance(recipe.fsdp2.reshard_after_forward, bool | None) and "smaller shards", "reshard_after_forward=true"


def _not_some_layers(model: ModelSpec, recipe: RecipeSpec) -> Iterator[tuple[str | bool, str]]:
    yield recipe.float8_recipe is None and "float8_recipe 'none'", "'nvfp4'"
    yield recipe.fsdp2.modules != "torchtitan-0.3" and f"modules {recipe.fsdp2.modules!r}", "modules 'torchtitan-0.3'"
    too_many = (recipe.fsdp2.float8_layers or 0) > model.num_hidden_layers
    yield too_many and f"a model of {model.num_hidden_layers} layers", "fewer"


def _not_modelled(model: ModelSpec, recipe: RecipeSpec, mesh: MeshSpec) -> Iterator[tuple[str | bool, str]]:
    yield recipe.engine != "fsdp2" and f"engine {recipe.engine!r}", "engine 'fsdp2'"
    yield not recipe.precision.startswith("bf16") and f"precision {recipe.precision!r}", "'bf16-mixed' or 'bf16'"
    yield model.profile is not None and "a profile", "a model of the catalogue"
    yield not model.has("float8") and f"a {model.family} model", f"one of {', '.join(modelled('float8'))}"
    in_blocks = recipe.float8_recipe in _GROUPS
    yield in_blocks and (model.attention_bias or model.mlp_bias) and "biases", "a model without them, or 'rowwise'"
    yield (model.adapter is not None or model.frozen is not None) and "frozen weights", "full training"
    uncompiled = recipe.recompute == "selective" and COMPILED_BLOCKS not in recipe.fused_parts
    yield uncompiled and "recompute 'selective'", "recompute 'full' or 'none', or compiled blocks"
    yield recipe.offload_activations and "offload_activations", "recompute 'full' alone"
    for name in ("tp", "cp", "pp", "ep"):
        yield getattr(mesh, name) > 1 and f"{name}={getattr(mesh, name)}", f"{name}=1"
    widths = model.hidden_size, model.intermediate_size, model.num_key_value_heads * model.head_dim
    group = _GROUPS.get(recipe.float8_recipe or "", _GROUP)
    yield any(width % group for width in widths) and f"widths that {group} does not divide", "a model whose widths it divides"
