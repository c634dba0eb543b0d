"""Runs real DeepSpeed on the CPU, as rank 0 of a fake process group, and reports the bytes alive in one training step.

It needs a process of its own (``tests/deepspeed_process.py``), since DeepSpeed replaces functions of torch for good.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from tests.causal_models import causal_model
from zeroplan.export.deepspeed import configuration
from zeroplan.spec.job import JobSpec
from zeroplan.transformer.blocks import Compute
from zeroplan.verify.watching.allocations import Timeline, mark, recorded

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

    from zeroplan.spec.recipe import RecipeSpec

STEPS = 3


def optimizer(recipe: RecipeSpec, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return torch's AdamW. Its fused kernel stands for DeepSpeed's FusedAdam, which needs a GPU."""
    if recipe.optimizer_impl in (None, "fused"):
        return torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=recipe.optimizer_impl == "foreach")


def join_fake_group(n_ranks: int) -> None:
    """Make this process rank 0 of a fake group of ``n_ranks``."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(n_ranks), LOCAL_WORLD_SIZE=str(n_ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    dist.init_process_group("fake", rank=0, world_size=n_ranks, store=FakeStore())


def engine_of(job: JobSpec) -> DeepSpeedEngine:
    """Return DeepSpeed's engine around the model. The moment after the model is built is marked."""
    import deepspeed

    spec, recipe = job.model, job.recipe
    compute = Compute(4 if recipe.precision == "fp32" else 2, autocast=False, attention=recipe.attention)
    model = causal_model(spec, compute)
    if recipe.recompute == "full":
        # On a GPU machine the random state that checkpointing keeps is in host memory.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, "preserve_rng_state": False})
    mark("init start")
    config = {**configuration(job), "zero_allow_untested_optimizer": True, "steps_per_print": 10**9}
    if recipe.zero_stage == 0 and recipe.optimizer_impl in (None, "fused"):
        deepspeed.runtime.engine.FusedAdam = torch.optim.AdamW  # so that DeepSpeed uses FusedAdam's wrapper
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer(recipe, list(model.parameters())), config=config)
    return engine


def train(engine: DeepSpeedEngine, recipe: RecipeSpec, ids: torch.Tensor, steps: int, grad_accum_steps: int) -> None:
    """Take training steps, and mark the phases of each micro-batch."""
    for step in range(steps):
        for micro in range(grad_accum_steps):
            mark(f"forward {step}.{micro}")
            output = engine(input_ids=ids, labels=ids)
            loss = output.loss
            if not recipe.keep_logits:
                del output
            mark(f"backward {step}.{micro}")
            engine.backward(loss)
            del loss
            output = None
            mark(f"step {step}.{micro}")
            engine.step()
            mark(f"end {step}.{micro}")


def measure(job: JobSpec, *, top: int = 0) -> dict[str, object]:
    """Return the peak bytes of construction and of the last step's phases, and the ``top`` largest allocations at each peak."""
    join_fake_group(job.mesh.world_size)
    recipe, batch, accumulate = job.recipe, job.batch, job.batch.grad_accum_steps
    torch.manual_seed(0)
    ids = torch.randint(0, job.model.vocab_size, (batch.micro_batch_size, batch.seq_len))
    with recorded() as timeline:
        mark("start")
        engine = engine_of(job)
        mark("init end")
        train(engine, recipe, ids, STEPS, accumulate)
    return summary(timeline, accumulate, top=top)


def summary(timeline: Timeline, accumulate: int, *, top: int) -> dict[str, object]:
    last = STEPS - 1
    micros = range(accumulate)
    phases = {
        "init": [("init start", "init end")],
        "forward": [(f"forward {last}.{m}", f"backward {last}.{m}") for m in micros],
        "backward": [(f"backward {last}.{m}", f"step {last}.{m}") for m in micros],
        "step": [(f"step {last}.{accumulate - 1}", f"end {last}.{accumulate - 1}")],
    }
    result: dict[str, object] = {"between": timeline.live_bytes(f"forward {last}.0")}
    result["end"] = timeline.live_bytes(f"end {last}.{accumulate - 1}")
    for phase, windows in phases.items():
        result[phase] = max(peak_bytes(timeline, *window) for window in windows)
        if top:
            window = max(windows, key=lambda window: peak_bytes(timeline, *window))
            result[f"{phase} live"] = live_at_peak(timeline, *window, top=top)
    return result


def peak_bytes(timeline: Timeline, start: str, end: str) -> int:
    """Return the most bytes alive between two marks, even if nothing is allocated between them."""
    return max([timeline.live_bytes(start), *(event.live_bytes for event in timeline.between(start, end))])


def live_at_peak(timeline: Timeline, start: str, end: str, *, top: int) -> list[str]:
    """Return the largest allocations alive at the peak, for debugging."""
    events = timeline.between(start, end)
    if not events:
        return []
    peak = max(events, key=lambda event: event.live_bytes)
    live: dict[int, tuple[int, str]] = {}
    for event in timeline.allocations:
        if event.time_ns > peak.time_ns:
            break
        if event.n_bytes > 0:
            live[event.address] = (event.n_bytes, " > ".join(event.operators[-4:])[-110:])
        else:
            live.pop(event.address, None)
    groups: dict[tuple[int, str], int] = {}
    for entry in live.values():
        groups[entry] = groups.get(entry, 0) + 1
    ordered = sorted(groups.items(), key=lambda item: -item[0][0] * item[1])[:top]
    rows = [f"{size * count:>12,} = {count} x {size:,}  {path}" for (size, path), count in ordered]
    return [f"peak {peak.live_bytes:,} at {' > '.join(peak.operators[-3:])}", *rows]
