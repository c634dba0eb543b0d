"""Which jobs, one setting away from the one that a user describes, would run out of memory as torch's message says?

A user who describes a run from memory is often wrong in one setting: the stage, the micro-batch, the length, or a flag of the
loop. Each of these is changed alone. A job agrees if its step has a request of the message's size with as much in tensors before
it, to 2 % of the card.
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
"""By which part of the card prediction and message may differ."""
_STAGES: tuple[Stage, ...] = (0, 1, 2, 3)
_CHOICES: dict[str, tuple[str, ...]] = {
    "recompute": ("none", "selective", "full"), "precision": ("bf16-mixed", "bf16", "fp32"), "attention": ("sdpa", "eager"),
    "optimizer": ("adamw", "adamw-8bit", "sgd"),
}  # fmt: skip
_TIMES = (2, 4, 8)
_Setting = tuple[str, str, dict[str, object]]
"""Its flags, the part of the job that it is of, and the part's fields."""


class Other(NamedTuple):
    """A job that agrees with the message: the flags that make it, and its request."""

    flags: str
    found: Found


def agrees(found: Found, message: Message) -> bool:
    """Whether as much is in tensors before the request as the message says, to 2 % of the card."""
    return abs(found.live_bytes - message.allocated_bytes) <= NEAR * message.capacity_bytes


def other_jobs(message: Message, job: JobSpec, *, most: int = 4) -> tuple[Other, ...]:
    """Return the jobs one setting away that agree with the message, the nearest first. Takes seconds for a large model."""
    agreeing = [other for other in _others(message, job) if agrees(other.found, message)]
    return tuple(sorted(agreeing, key=lambda one: abs(one.found.live_bytes - message.allocated_bytes))[:most])


def _others(message: Message, job: JobSpec) -> Iterator[Other]:
    for flags, part, fields in _settings(job):
        try:
            answer = estimate(replace(job, **{part: replace(getattr(job, part), **fields)}))
        except SpecError:  # what the engine does not offer, or two settings that exclude each other
            continue
        lowest, near = sum(int(line.n_bytes) for line in answer.held), NEAR * message.capacity_bytes
        if not lowest - near <= message.allocated_bytes <= answer.peak_bytes + near:
            continue  # so much is never in its tensors
        found = nearest_request(message, answer)
        if found is not None:
            yield Other(flags, found)


def _settings(job: JobSpec) -> Iterator[_Setting]:
    """Every setting that is changed alone."""
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
