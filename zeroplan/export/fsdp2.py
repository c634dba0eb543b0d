"""Writes a job as a training script for FSDP2 (``fully_shard``): a loop over random tokens, to be replaced by the user's data."""

from zeroplan.export.fsdp2_split import pieces
from zeroplan.spec.job import JobSpec
from zeroplan.spec.recipe import RecipeSpec

_SCRIPT = '''"""FSDP2 as planned by zeroplan: put your data where the random tokens are.

    {launch}
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import {imports}
{more_imports}from transformers import AutoConfig, AutoModelForCausalLM

MICRO_BATCH, SEQ_LEN, GRAD_ACCUM = {micro_batch}, {seq_len}, {grad_accum}
REPLICAS, SHARDS = {replicas}, {shards}
{degrees}STEPS, LEARNING_RATE = int(os.environ.get("STEPS", "10")), 3e-4


def blocks(model):
    """The longest list of modules: the transformer's blocks."""
    return max((one for one in model.modules() if isinstance(one, torch.nn.ModuleList)), key=len)
{helpers}

def sharded(model, mesh):
    options = {{"mesh": mesh, "reshard_after_forward": {reshard}{policies}}}
    for block in blocks(model):
        fully_shard(block, **options)
    return fully_shard(model, **options)


def main():
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = "cuda" if gpu else "cpu"
    dist.init_process_group("nccl" if gpu else "gloo")
    if dist.get_world_size() != {world}:
        raise SystemExit(f"planned for {{{world}}} ranks, started on {{dist.get_world_size()}}")
    mesh = init_device_mesh(device, {mesh})
    config = AutoConfig.from_pretrained(sys.argv[1])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation={attention})
{splitting}{checkpointing}    model = sharded(model, {among})
    model.to_empty(device={placed})
    model.init_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, {step}=True)
{tokens}    for step in range(STEPS):
        for micro_batch in range(GRAD_ACCUM):
{sync}{step_of_a_batch}        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {{step + 1}} of {{STEPS}}: loss {{loss.item():.3f}}", flush=True)
    dist.destroy_process_group()


main()
'''

_FULL = """    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapping

    kinds = {type(block) for block in blocks(model)}
    wrapping.apply_activation_checkpointing(model, check_fn=lambda one: type(one) in kinds)
"""
_SELECTIVE = """    from functools import partial

    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapping
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    aten = torch.ops.aten
    kept = [aten.mm.default, aten.bmm.default, aten.addmm.default, aten._scaled_dot_product_flash_attention.default,
            aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_cudnn_attention.default]
    contexts = partial(create_selective_checkpoint_contexts, kept)
    wrapper = partial(wrapping.checkpoint_wrapper, context_fn=contexts, preserve_rng_state=False)
    kinds = {type(block) for block in blocks(model)}
    wrapping.apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrapper, check_fn=lambda one: type(one) in kinds)
"""
#: Replaces `_EVERY` if only the first blocks are recomputed.
_FIRST = """    first = set(blocks(model)[:{layers}])
"""
_EVERY = "    kinds = {type(block) for block in blocks(model)}\n", "lambda one: type(one) in kinds"
_CHECKPOINTING = {"none": "", "full": _FULL, "selective": _SELECTIVE}


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
    return _SCRIPT.format(
        launch=f"torchrun --nproc-per-node ... (on {mesh.world_size} GPUs in all) {FSDP2_FILE} MODEL",
        imports=imports,
        micro_batch=batch.micro_batch_size,
        seq_len=batch.seq_len,
        grad_accum=batch.grad_accum_steps,
        replicas=mesh.dp_replicate,
        shards=mesh.dp_shard,
        reshard=ways if type(ways) is int else reshards(recipe),
        policies=policies,
        mesh=split.mesh,
        attention="unmasked()" if split.unmasked else f'"{attention}"',
        more_imports=split.imports,
        degrees=split.degrees,
        helpers=split.helpers,
        world=split.world,
        splitting=split.splitting,
        among=split.among,
        tokens=split.tokens,
        step_of_a_batch=split.step,
        checkpointing=_checkpointing(recipe),
        placed='"cpu"' if recipe.fsdp2.cpu_offload else "device",
        step=recipe.optimizer_impl or "foreach",
        sync=sync,
    )


def _checkpointing(recipe: RecipeSpec) -> str:
    lines = _CHECKPOINTING[recipe.recompute]
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
