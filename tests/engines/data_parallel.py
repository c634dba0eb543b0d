"""Trains a small model under real ``DistributedDataParallel`` on a CPU and records every allocation of its third step."""

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.causal_models import causal_model
from zeroplan.engines.optimizers import implementation
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.transformer.blocks import Compute
from zeroplan.verify.watching.allocations import Timeline, mark, recorded

STEPS = 3


@contextmanager
def process_group(ranks: int, rank: int = 0) -> Iterator[None]:
    """Be one rank of several under torch's fake process group.

    The group moves no data. Unlike gloo it has no thread of its own, whose releases the profiler would miss.
    """
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def third_step(spec: ModelSpec, recipe: RecipeSpec, batch: BatchSpec, *, ranks: int = 2, rank: int = 0) -> Timeline:
    """Train three steps and mark ``forward``, ``backward`` and ``done`` of each micro-batch, ``step`` and ``end`` of each step.

    The recording begins before the model is built, so that it has all bytes.
    """
    gc.collect()  # or an earlier model's reference cycles would be freed during this recording
    with process_group(ranks, rank), recorded() as timeline:
        mark("start")
        model = _wrapped(spec, recipe)
        optimizer = _optimizer(model, recipe)
        ids = torch.randint(0, spec.vocab_size, (batch.micro_batch_size, batch.seq_len))
        for step in range(STEPS):
            for micro in range(batch.grad_accum_steps):
                last = micro == batch.grad_accum_steps - 1
                with nullcontext() if last or recipe.sync_every_micro_batch else model.no_sync():
                    _micro_step(model, recipe, ids, f"{step}.{micro}")
            mark(f"step {step}")
            optimizer.step()
            mark(f"end {step}")
            optimizer.zero_grad()
        del model, optimizer
    return timeline


def compute_of(recipe: RecipeSpec) -> Compute:
    """Return the compute dtypes of the recipe."""
    mixed = recipe.precision.endswith("mixed")
    return Compute(4 if recipe.precision == "fp32" else 2, mixed, recipe.attention)


def _wrapped(spec: ModelSpec, recipe: RecipeSpec) -> DistributedDataParallel:
    model = causal_model(spec, compute_of(recipe))
    if recipe.recompute == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    wrapped = DistributedDataParallel(
        model,
        gradient_as_bucket_view=recipe.ddp.gradient_as_bucket_view,
        bucket_cap_mb=recipe.ddp.bucket_cap_mb,
        find_unused_parameters=recipe.ddp.find_unused_parameters,
        static_graph=recipe.ddp.static_graph,
    )
    wrapped.register_comm_hook(None, _nothing_to_reduce)
    return wrapped


def _nothing_to_reduce(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Hand the bucket back at once: DDP's reducer cannot read what the fake group's all-reduce returns."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _optimizer(model: DistributedDataParallel, recipe: RecipeSpec) -> torch.optim.Optimizer:
    classes = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adafactor": torch.optim.Adafactor}
    impl = implementation(recipe.optimizer, recipe.optimizer_impl)
    flags = {"fused": True} if impl == "fused" else {"foreach": impl == "foreach"}
    if recipe.zero_stage == 1:
        return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=classes[recipe.optimizer], lr=1e-3, **flags)
    return classes[recipe.optimizer](model.parameters(), lr=1e-3, **flags)


def _autocast(recipe: RecipeSpec) -> AbstractContextManager[object]:
    if not recipe.precision.endswith("mixed"):
        return nullcontext()
    return torch.autocast("cpu", dtype=torch.bfloat16 if recipe.precision == "bf16-mixed" else torch.float16)


def _micro_step(model: DistributedDataParallel, recipe: RecipeSpec, ids: torch.Tensor, name: str) -> None:
    mark(f"forward {name}")
    with _autocast(recipe):
        output = model(input_ids=ids, labels=ids)
    loss = output.loss
    if not recipe.keep_logits:
        del output
    mark(f"backward {name}")
    loss.backward()
    mark(f"done {name}")


def rebuilt_buckets(spec: ModelSpec, recipe: RecipeSpec, batch: BatchSpec) -> list[int]:
    """Return the bytes of the buckets that the reducer makes in the second step and reports in the third, in its order."""
    with process_group(2):
        model = _wrapped(spec, recipe)
        ids = torch.randint(0, spec.vocab_size, (batch.micro_batch_size, batch.seq_len))
        for _ in range(STEPS):
            model(input_ids=ids, labels=ids).loss.backward()
            model.zero_grad()
        sizes = model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    return [int(size) for size in sizes.split(",")]
