"""Checks whether a job's blocks may be compiled by ``torch.compile``, each by itself, and its loss."""

from collections.abc import Iterator

from zeroplan.errors import refuse
from zeroplan.spec.family import modelled
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec

COMPILED_BLOCKS, COMPILED_LOSS = "compiled-blocks", "compiled-loss"


def check_compiled(model: ModelSpec, recipe: RecipeSpec, mesh: MeshSpec) -> None:
    """Raise SpecError, in one line with the way out, if compiled blocks are not modelled for this job.

    >>> from zeroplan.spec.model import ModelSpec
    >>> tiny = ModelSpec(family="llama", hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    ...                  num_key_value_heads=2, head_dim=16, vocab_size=256)
    >>> check_compiled(tiny, RecipeSpec(engine="ddp", zero_stage=0, fused_kernels="compiled-blocks"), MeshSpec(dp_shard=8))
    Traceback (most recent call last):
    zeroplan.errors.SpecError: compiled blocks with engine 'ddp' are not modelled; use engine 'fsdp2', or zeroplan dryrun
    """
    if COMPILED_BLOCKS in recipe.fused_parts:
        refuse("compiled blocks with", _not_modelled(model, recipe, mesh), ", or zeroplan dryrun", says="are not modelled")


def _in_float8(recipe: RecipeSpec) -> Iterator[tuple[str | bool, str]]:
    """What a graph without its checkpoint keeps of float8 products depends on the sizes of its casts."""
    float8, own = recipe.float8_recipe, recipe.fsdp2.are_torchtitans
    by_blocks = float8 in ("mxfp8", "nvfp4") and recipe.fsdp2.modules != "torchtitan-0.3"
    yield by_blocks and f"float8_recipe {float8!r}", "'tensorwise' or 'rowwise'"
    in_graph = recipe.recompute == "selective" or (own and recipe.recompute == "full")
    yield float8 is not None and not in_graph and f"float8_recipe and recompute {recipe.recompute!r}", "recompute 'selective'"


#: Rows of a compiled graph's tensors longer than this are filled up to a multiple of the second number (torch 2.13,
#: _inductor/config.py, padding_stride_threshold and padding_alignment_bytes). [elements of 16 bits]
_LONG_ROW, _FILLED_TO = 1024, 64


def _fills_rows(model: ModelSpec) -> bool:
    heads = model.num_attention_heads, model.num_key_value_heads
    widths = model.hidden_size, model.intermediate_size, *(one * model.head_dim for one in heads)
    return any(width > _LONG_ROW and width % _FILLED_TO for width in widths)


def _not_modelled(model: ModelSpec, recipe: RecipeSpec, mesh: MeshSpec) -> Iterator[tuple[str | bool, str]]:
    # Under DDP dynamo splits a graph at the buckets (torch 2.13, _dynamo/backends/distributed.py, DDPOptimizer).
    yield recipe.engine != "fsdp2" and f"engine {recipe.engine!r}", "engine 'fsdp2'"
    yield not recipe.precision.startswith("bf16") and f"precision {recipe.precision!r}", "'bf16-mixed' or 'bf16'"
    yield model.profile is not None and "a profile", "a model of the catalogue"
    yield not model.has("compiled blocks") and f"a {model.family} model", f"one of {', '.join(modelled('compiled blocks'))}"
    yield _fills_rows(model) and f"widths that {_FILLED_TO} does not divide", "a model whose widths it divides"
    # flash-attn's call breaks the graph: inside a checkpoint torch then runs the block without the compiler
    yield recipe.attention != "sdpa" and f"attention {recipe.attention!r}", "'sdpa'"
    yield (model.adapter is not None or model.frozen is not None) and "frozen weights", "full training"
    yield model.vision is not None and "images", "text alone"
    yield recipe.offload_activations and "offload_activations", "recompute 'full' alone"
    yield from _in_float8(recipe)
    others = [one for one in recipe.fused_parts if one not in (COMPILED_BLOCKS, COMPILED_LOSS, "cross-entropy")]
    yield bool(others) and f"fused_kernels {', '.join(others)!r}", "none of them"
    for name in ("tp", "cp", "pp", "ep"):
        yield getattr(mesh, name) > 1 and f"{name}={getattr(mesh, name)}", f"{name}=1"
