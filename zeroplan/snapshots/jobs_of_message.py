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
from zeroplan.spec.recipe import Precision, Recompute, Stage

NEAR = 0.02
"""By which part of the card prediction and message may differ."""
_STAGES: tuple[Stage, ...] = (0, 1, 2, 3)
_RECOMPUTATIONS: tuple[Recompute, ...] = ("none", "selective", "full")
_PRECISIONS: tuple[Precision, ...] = ("bf16-mixed", "bf16", "fp32")
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
    recipe, batch = job.recipe, job.batch
    for stage in _STAGES:
        if stage != recipe.zero_stage:
            engine = engine_at(stage, recipe.engine)
            flags = f"--stage {stage}" + f" --engine {engine}" * (engine != recipe.engine)
            yield flags, {"recipe": replace(recipe, zero_stage=stage, engine=engine)}
    for times in _TIMES:
        sequences, tokens = batch.micro_batch_size * times, batch.seq_len * times
        yield f"--micro-batch {sequences}", {"batch": replace(batch, micro_batch_size=sequences)}
        yield f"--seq-len {tokens}", {"batch": replace(batch, seq_len=tokens)}
    for recompute in _RECOMPUTATIONS:
        if recompute != recipe.recompute:
            yield f"--recompute {recompute}", {"recipe": replace(recipe, recompute=recompute)}
    for precision in _PRECISIONS:
        if precision != recipe.precision:
            yield f"--precision {precision}", {"recipe": replace(recipe, precision=precision)}
    if recipe.attention != "eager":
        yield "--attention eager", {"recipe": replace(recipe, attention="eager")}
    if not recipe.keep_logits:
        yield "--keep-logits fp32", {"recipe": replace(recipe, keep_logits="fp32")}
