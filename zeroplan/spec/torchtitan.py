"""Checks jobs with torchtitan's own modules: only its Llama 3 under FSDP2 without other parallelism is modelled.

``torchtitan`` is release 0.2.2, ``torchtitan-0.3`` is 0.3.0, whose loss comes in chunks.
"""

from collections.abc import Iterator

from zeroplan.errors import SpecError
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.compiled import COMPILED_BLOCKS
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec

CHUNKS = 8
"""Of 0.3's loss (components/loss.py, ``ChunkedLossWrapper.Config.num_chunks``)."""


def check_torchtitan(model: ModelSpec, recipe: RecipeSpec, mesh: MeshSpec, batch: BatchSpec) -> None:
    """Raise SpecError for a job with torchtitan's modules that torchtitan does not support or that is not modelled."""
    if not recipe.fsdp2.are_torchtitans:
        return
    for refused, instead in refusals(model, recipe, mesh, batch):
        raise SpecError(f"modules of torchtitan with {refused} are not modelled; use {instead}, or --modules transformers")


def refusals(model: ModelSpec, recipe: RecipeSpec, mesh: MeshSpec, batch: BatchSpec) -> Iterator[tuple[str, str]]:
    """Yield settings that torchtitan does not support or that are not modelled with it, and what to use instead."""
    in_chunks = _of_0_3(model, recipe, mesh, batch) if recipe.fsdp2.modules == "torchtitan-0.3" else ()
    for refused, instead in (*_of_the_model(model), *_of_the_recipe(recipe), *_of_the_ranks(mesh), *in_chunks):
        if isinstance(refused, str):
            yield refused, instead


def _of_the_model(model: ModelSpec) -> Iterator[tuple[str | bool, str]]:
    own = model.hidden_act is not None or model.attention_bias or model.mlp_bias
    yield model.family != "llama" and f"a {model.family} model", "a Llama"
    yield own and "biases or another activation function", "the shape of a Llama 3"
    yield model.head_dim * model.num_attention_heads != model.hidden_size and "a head_dim of its own", "hidden_size / heads"
    yield model.vision is not None and model.vision.has_blocks and "a vision tower", "a text"
    yield model.tie_word_embeddings and "a head tied to the embedding", "an untied head"
    yield bool(model.unplaced_parameters) and "a shape inferred from a bare count", "a model's name"
    yield (model.adapter is not None or model.frozen is not None) and "adapters or frozen parts", "full training"


def _of_the_recipe(recipe: RecipeSpec) -> Iterator[tuple[str | bool, str]]:
    options = recipe.fsdp2
    yield recipe.engine != "fsdp2" and f"engine {recipe.engine!r}", "engine 'fsdp2'"
    yield recipe.zero_stage != 3 and f"stage {recipe.zero_stage}", "stage 3"
    yield recipe.precision != "bf16-mixed" and f"precision {recipe.precision!r}", "precision 'bf16-mixed'"
    loss = "full" if options.modules == "torchtitan" else "chunked"
    yield recipe.loss != loss and f"loss {recipe.loss!r}", f"loss {loss!r}"
    yield bool(recipe.keep_logits) and "keep_logits (it lets go of them)", "no keep_logits"
    yield recipe.attention != "sdpa" and f"attention {recipe.attention!r}", "attention 'sdpa'"
    yield recipe.kernels == "cpu" and "a CPU's kernels", "kernels 'cuda'"
    yield recipe.recompute_layers is not None and "recompute_layers", "all layers"
    yield recipe.offloads and "offload to host memory", "no offload"
    yield not recipe.sync_every_micro_batch and "no_sync", "sync_every_micro_batch"
    yield options.of_torch_2_15 and "the FSDP2 of torch 2.15", "fsdp2.torch=2.13"
    yield options.reduce_dtype != "fp32" and "reduce_dtype 'param'", "reduce_dtype 'fp32'"
    yield options.reshard_after_forward not in (None, True) and "reshard_after_forward of its own", "true"


def _of_the_ranks(mesh: MeshSpec) -> Iterator[tuple[str | bool, str]]:
    split = {"tp": mesh.tp, "cp": mesh.cp, "pp": mesh.pp, "ep": mesh.ep, "dp_replicate": mesh.dp_replicate}
    for name, degree in split.items():
        yield degree > 1 and f"{name}={degree}", f"{name}=1"
    yield mesh.dp_shard == 1 and "a single GPU (torchtitan then shards nothing)", "several GPUs"


def _of_0_3(model: ModelSpec, recipe: RecipeSpec, mesh: MeshSpec, batch: BatchSpec) -> Iterator[tuple[str | bool, str]]:
    keys = model.num_key_value_heads * model.head_dim
    yield bool(keys % mesh.dp_shard) and f"dp_shard={mesh.dp_shard}", f"ranks that divide {keys}, the keys' width"
    yield bool(batch.seq_len % CHUNKS) and f"seq_len {batch.seq_len}", f"a multiple of {CHUNKS}, the chunks of its loss"
    float8 = recipe.float8_recipe
    yield float8 not in (None, "mxfp8", "nvfp4") and f"float8_recipe {float8!r}", "'mxfp8' or 'nvfp4'"
    uncompiled = float8 is not None and COMPILED_BLOCKS not in recipe.fused_parts
    yield uncompiled and f"float8_recipe {float8!r} without a compiler", "fused_kernels 'compiled-blocks'"
