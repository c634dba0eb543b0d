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
from zeroplan.spec.recipe import Attention, Optimizer, Precision, RecipeSpec, Recompute, Stage

NEAR = 0.02
"""By which part of the card prediction and message may differ."""
_STAGES: tuple[Stage, ...] = (0, 1, 2, 3)
_RECOMPUTATIONS: tuple[Recompute, ...] = ("none", "selective", "full")
_PRECISIONS: tuple[Precision, ...] = ("bf16-mixed", "bf16", "fp32")
_OPTIMIZERS: tuple[Optimizer, ...] = ("adamw", "adamw-8bit", "sgd")
_ATTENTIONS: tuple[Attention, ...] = ("sdpa", "eager")
_TIMES = (2, 4, 8)


class Other(NamedTuple):
    """A job that agrees with the message: the flags that make it, and its request."""

    flags: str
    found: Found


def agrees(found: Found, message: Message) -> bool:
    """Whether as much is in tensors before the request as the message says, to 2 % of the card."""
    return abs(found.live_bytes - message.allocated_bytes) <= NEAR * message.capacity_bytes


def other_jobs(message: Message, job: JobSpec, *, most: int = 4) -> tuple[Other, ...]:
    """Return the jobs one setting away that agree with the message, the nearest first. Takes about a second."""
    agreeing = [other for other in _others(message, job) if agrees(other.found, message)]
    return tuple(sorted(agreeing, key=lambda one: abs(one.found.live_bytes - message.allocated_bytes))[:most])


def _others(message: Message, job: JobSpec) -> Iterator[Other]:
    for flags, changes in _settings(job):
        try:
            answer = estimate(replace(job, **changes))  # type: ignore[arg-type]
        except SpecError:  # what the engine does not offer
            continue
        if answer.peak_bytes < message.allocated_bytes - NEAR * message.capacity_bytes:
            continue  # so much is never in its tensors
        found = nearest_request(message, answer)
        if found is not None:
            yield Other(flags, found)


def _settings(job: JobSpec) -> Iterator[tuple[str, dict[str, object]]]:
    """Every setting that is changed alone: its flags, and the parts of the job that it makes."""
    yield from _other_gpus(job)
    for times in _TIMES:
        sequences, tokens = job.batch.micro_batch_size * times, job.batch.seq_len * times
        yield f"--micro-batch {sequences}", {"batch": replace(job.batch, micro_batch_size=sequences)}
        yield f"--seq-len {tokens}", {"batch": replace(job.batch, seq_len=tokens)}
    for flags, recipe in _other_recipes(job.recipe):
        if recipe != job.recipe:
            yield flags, {"recipe": recipe}
    if job.model.adapter is not None:
        yield "no --lora-rank", {"model": replace(job.model, adapter=None)}


def _other_recipes(recipe: RecipeSpec) -> Iterator[tuple[str, RecipeSpec]]:
    for stage in _STAGES:
        engine = engine_at(stage, recipe.engine)
        flags = f"--stage {stage}" + f" --engine {engine}" * (engine != recipe.engine)
        yield flags, replace(recipe, zero_stage=stage, engine=engine)
    for recompute in _RECOMPUTATIONS:
        yield f"--recompute {recompute}", replace(recipe, recompute=recompute)
    for precision in _PRECISIONS:
        yield f"--precision {precision}", replace(recipe, precision=precision)
    for optimizer in _OPTIMIZERS:
        if optimizer != recipe.optimizer:
            yield f"--optimizer {optimizer}", replace(recipe, optimizer=optimizer, optimizer_impl=None)
    for attention in _ATTENTIONS:
        yield f"--attention {attention}", replace(recipe, attention=attention)
    if not recipe.keep_logits:
        yield "--keep-logits fp32", replace(recipe, keep_logits="fp32")


def _other_gpus(job: JobSpec) -> Iterator[tuple[str, dict[str, object]]]:
    mesh, gpus = job.mesh, job.mesh.world_size
    for times in _TIMES:
        yield f"--gpus {gpus * times}", {"mesh": replace(mesh, dp_shard=mesh.dp_shard * times)}
        if mesh.dp_shard % times == 0 and mesh.dp_shard > times:
            yield f"--gpus {gpus // times}", {"mesh": replace(mesh, dp_shard=mesh.dp_shard // times)}
