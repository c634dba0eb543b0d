"""Which jobs that differ in one setting from the user's description match torch's out-of-memory message?

A description of a failed run is often wrong in one setting, such as stage, micro-batch, length or a flag of the loop. This file
tries each alone. A job matches if its step has a request of the message's size, and the tensors alive before it have the
message's bytes, within 2 % of the GPU's memory.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from zeroplan.errors import SpecError
from zeroplan.estimator import estimate
from zeroplan.snapshots.message import Message
from zeroplan.snapshots.request_of_message import Found, nearest_request
from zeroplan.spec.job import JobSpec, engine_at
from zeroplan.spec.recipe import RecipeSpec, Stage

NEAR = 0.02
"""The tolerance, as a share of the GPU's memory."""
_STAGES: tuple[Stage, ...] = (0, 1, 2, 3)
_CHOICES: dict[str, tuple[str, ...]] = {
    "recompute": ("none", "selective", "full"), "precision": ("bf16-mixed", "bf16", "fp32"), "attention": ("sdpa", "eager"),
    "optimizer": ("adamw", "adamw-8bit", "sgd"),
}  # fmt: skip
_TIMES = (2, 4, 8)
_Setting = tuple[str, str, dict[str, object]]
"""The flags, the changed part of the job, and the part's new fields."""


class Other(NamedTuple):
    """A job that matches the message: the flags that change the user's job, and the matching request."""

    flags: str
    found: Found


def agrees(found: Found, message: Message) -> bool:
    """Whether the bytes alive before the request equal the message's, within 2 % of the GPU's memory."""
    return abs(found.live_bytes - message.allocated_bytes) <= NEAR * message.capacity_bytes


def other_jobs(message: Message, job: JobSpec, *, most: int = 4) -> tuple[Other, ...]:
    """Return the jobs that differ in one setting and match the message, the nearest first; takes seconds for large models."""
    agreeing = [other for other in _others(message, job) if agrees(other.found, message)]
    return tuple(sorted(agreeing, key=lambda one: abs(one.found.live_bytes - message.allocated_bytes))[:most])


def _others(message: Message, job: JobSpec) -> Iterator[Other]:
    for flags, part, fields in _settings(job):
        try:
            answer = estimate(replace(job, **{part: replace(getattr(job, part), **fields)}))
        except SpecError:  # the engine does not support it, or settings exclude each other
            continue
        lowest, near = sum(int(line.n_bytes) for line in answer.held), NEAR * message.capacity_bytes
        if not lowest - near <= message.allocated_bytes <= answer.peak_bytes + near:
            continue  # its tensors never have this many bytes
        found = nearest_request(message, answer)
        if found is not None:
            yield Other(flags, found)


def _settings(job: JobSpec) -> Iterator[_Setting]:
    """Yield every change of a single setting."""
    gpus, shards = job.mesh.world_size, job.mesh.dp_shard
    for times in _TIMES:
        sequences, tokens = job.batch.micro_batch_size * times, job.batch.seq_len * times
        yield f"--micro-batch {sequences}", "batch", {"micro_batch_size": sequences}
        yield f"--seq-len {tokens}", "batch", {"seq_len": tokens}
        yield f"--gpus {gpus * times}", "mesh", {"dp_shard": shards * times}
        if shards % times == 0 and shards > times:
            yield f"--gpus {gpus // times}", "mesh", {"dp_shard": shards // times}
    for flags, fields in _of_a_recipe(job.recipe):
        if any(getattr(job.recipe, name) != value for name, value in fields.items() if name != "optimizer_impl"):
            yield flags, "recipe", fields
    if job.model.adapter is not None:
        yield "no --lora-rank", "model", {"adapter": None}


def _of_a_recipe(recipe: RecipeSpec) -> Iterator[tuple[str, dict[str, object]]]:
    for stage in _STAGES:
        engine = engine_at(stage, recipe.engine)
        flags = f"--stage {stage}" + f" --engine {engine}" * (engine != recipe.engine)
        yield flags, {"zero_stage": stage, "engine": engine}
    for name, values in _CHOICES.items():
        for value in values:
            step = {"optimizer_impl": None} if name == "optimizer" else {}
            yield f"--{name} {value}", {name: value, **step}
    yield "--keep-logits fp32", {"keep_logits": "fp32"}
