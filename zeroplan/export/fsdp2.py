"""Writes a job as a training script for FSDP2 (``fully_shard``): a loop over random tokens, to be replaced by the user's data."""

from zeroplan.export.fsdp2_split import part, pieces
from zeroplan.spec.job import JobSpec
from zeroplan.spec.recipe import RecipeSpec

#: Replaces `_EVERY` if only the first blocks are recomputed.
_FIRST = """    first = set(blocks(model)[:{layers}])
"""
_EVERY = "    kinds = {type(block) for block in blocks(model)}\n", "lambda one: type(one) in kinds"


def reshards(recipe: RecipeSpec) -> bool:
    """Whether FSDP2 reshards parameters between forward and backward, over all ranks or some.

    >>> reshards(RecipeSpec(zero_stage=3)), reshards(RecipeSpec(zero_stage=2))
    (True, False)
    """
    reshard = recipe.fsdp2.reshard_after_forward
    return recipe.zero_stage == 3 if reshard is None else bool(reshard)


FSDP2_FILE = "fsdp2-zeroplan.py"
"""The script's file name."""


def fsdp2_script(job: JobSpec) -> str:
    """Return the script. It needs torch and transformers, and also runs on CPU ranks."""
    recipe, mesh, batch = job.recipe, job.mesh, job.batch
    ways = recipe.fsdp2.reshard_after_forward
    policies, imports = _policies(recipe)
    accumulates = batch.grad_accum_steps > 1 and not recipe.sync_every_micro_batch
    sync = "            model.set_requires_gradient_sync(micro_batch == GRAD_ACCUM - 1)\n" if accumulates else ""
    attention, split = {"flash": "flash_attention_2"}.get(recipe.attention, recipe.attention), pieces(mesh)
    return part("script").format(
        launch=f"torchrun --nproc-per-node ... (on {mesh.world_size} GPUs in all) {FSDP2_FILE} MODEL",
        **split._asdict(),
        fsdp_imports=imports,
        micro_batch=batch.micro_batch_size,
        seq_len=batch.seq_len,
        grad_accum=batch.grad_accum_steps,
        replicas=mesh.dp_replicate,
        shards=mesh.dp_shard,
        reshard=ways if type(ways) is int else reshards(recipe),
        policies=policies,
        attention="unmasked()" if split.unmasked else f'"{attention}"',
        checkpointing=_checkpointing(recipe),
        placed='"cpu"' if recipe.fsdp2.cpu_offload else "device",
        optimizer_step=recipe.optimizer_impl or "foreach",
        sync=sync,
    )


def _checkpointing(recipe: RecipeSpec) -> str:
    lines = "" if recipe.recompute == "none" else part(recipe.recompute)
    if recipe.recompute_layers is None:
        return lines
    kinds, is_one = _EVERY
    return lines.replace(kinds, _FIRST.format(layers=recipe.recompute_layers)).replace(is_one, "first.__contains__")


def _policies(recipe: RecipeSpec) -> tuple[str, str]:
    """Return ``fully_shard``'s arguments for precision and offload, and the names that they import."""
    said, names = "", ["fully_shard"]
    if recipe.precision == "bf16-mixed":
        reduced = "float32" if recipe.fsdp2.reduce_dtype == "fp32" else "bfloat16"
        said += f', "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.{reduced})'
        names.append("MixedPrecisionPolicy")
    if recipe.fsdp2.cpu_offload:
        said += ', "offload_policy": CPUOffloadPolicy()'
        names.append("CPUOffloadPolicy")
    return said, ", ".join(sorted(names, key=str.lower))
