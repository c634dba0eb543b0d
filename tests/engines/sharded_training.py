"""Trains a small model under real FSDP2 on a CPU, as rank 0 of a fake process group, and records its second step.

The second step is the first that begins with optimizer states. Later steps are like it.
"""

from __future__ import annotations

import gc
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.causal_models import causal_model
from zeroplan.transformer.blocks import Compute
from zeroplan.verify.watching.allocations import Timeline, mark, recorded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from zeroplan.spec.job import JobSpec
    from zeroplan.spec.recipe import RecipeSpec

STEPS = 2

#: Operators that request memory on the CPU but not on CUDA: padded and cast copies in ``_chunk_cat`` and, in torch 2.15, around it;
#: a cast copy when two dtypes are added (gradients that accumulate in another dtype than they are computed in).
CPU_ONLY = ("aten::_chunk_cat", "fsdp::chunk_cat_mixed_dtype", "aten::add_")


@contextmanager
def fake_ranks(job: JobSpec) -> Iterator[DeviceMesh]:
    """Yield the job's mesh, as rank 0 of torch's fake process group, which moves no data."""
    replicas, shards = job.mesh.dp_replicate, job.mesh.dp_shard
    dist.init_process_group("fake", rank=0, world_size=replicas * shards, store=FakeStore())
    try:
        if replicas == 1:
            yield init_device_mesh("cpu", (shards,))
        else:
            yield init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
    finally:
        dist.destroy_process_group()


def second_step(job: JobSpec) -> Timeline:
    """Train two steps. Mark ``forward``, ``backward`` and ``after`` of each micro-batch, ``step`` and ``end`` of each step."""
    gc.collect()  # or an earlier model's reference cycles would be freed during this recording
    torch.backends.mkldnn.enabled = False
    with fake_ranks(job) as mesh, warnings.catch_warnings(), recorded() as timeline:
        warnings.simplefilter("ignore")
        model = _sharded(job, mesh)
        recipe, batch = job.recipe, job.batch
        optimizer = torch.optim.AdamW(model.parameters(), **{recipe.optimizer_impl or "foreach": True})
        ids = torch.randint(0, job.model.vocab_size, (batch.micro_batch_size, batch.seq_len))
        for step in range(STEPS):
            for micro in range(batch.grad_accum_steps):
                last = micro == batch.grad_accum_steps - 1
                model.set_requires_gradient_sync(last or recipe.sync_every_micro_batch)
                _micro_step(model, ids, f"{step}.{micro}", keep_logits=recipe.keep_logits)
            mark(f"step {step}")
            optimizer.step()
            mark(f"end {step}")
            optimizer.zero_grad()
        del model, optimizer
    return timeline


def _micro_step(model: nn.Module, ids: torch.Tensor, at: str, *, keep_logits: bool) -> None:
    mark(f"forward {at}")
    output = model(input_ids=ids, labels=ids)
    loss = output.loss
    if not keep_logits:
        del output
    mark(f"backward {at}")
    loss.backward()
    mark(f"after {at}")


def _sharded(job: JobSpec, mesh: DeviceMesh) -> nn.Module:
    recipe = job.recipe
    model = causal_model(job.model, _compute(recipe))
    if recipe.precision.endswith("mixed"):
        model.float()
    if recipe.recompute == "full":
        # On a GPU machine the random state that a checkpoint saves is in host memory; a CPU run would count it.
        options = {"use_reentrant": False, "preserve_rng_state": False}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    blocks = model.transformer.h if job.model.family == "gpt2" else model.model.layers
    chosen = recipe.fsdp2.reshard_after_forward
    reshard = recipe.zero_stage == 3 if chosen is None else chosen
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=_policy(recipe), reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, mp_policy=_policy(recipe), reshard_after_forward=False)


def _compute(recipe: RecipeSpec) -> Compute:
    return Compute(4 if recipe.precision == "fp32" else 2, autocast=False, attention=recipe.attention)


def _policy(recipe: RecipeSpec) -> MixedPrecisionPolicy:
    if not recipe.precision.endswith("mixed"):
        return MixedPrecisionPolicy()
    reduce_dtype = torch.float32 if recipe.fsdp2.reduce_dtype == "fp32" else torch.bfloat16
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
