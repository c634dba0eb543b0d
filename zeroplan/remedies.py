"""What are the nearest changes that would make a job fit its GPU?

Each candidate is one change a person would try, in the order of what it costs them; each is estimated in full. Where no single
change is enough, changes are combined in the same order until one combination fits.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from zeroplan.estimator import Estimate, estimate
from zeroplan.spec.job import DEFAULT_ENGINE, ENGINE_STAGES, JobSpec
from zeroplan.spec.recipe import DdpOptions, Stage

_MOST_GPUS = 4096


class Remedy(NamedTuple):
    """A change (or several together) after which the job fits."""

    change: str
    """For a reader: ``recompute everything``."""
    flags: str
    """For the command line: ``--recompute full``."""
    needed_bytes: int
    """Allocated peak and what is outside the allocator, after the change."""
    room_bytes: int


class _Candidate(NamedTuple):
    change: str
    flags: str
    job: JobSpec


def remedies(short: Estimate, *, most: int = 5) -> tuple[Remedy, ...]:
    """Return up to ``most`` changes that make the job fit, single ones first; empty where it fits or no GPU is named.

    Leaves out changes of the model and of the GPU.
    """
    if short.fits is not False:
        return ()
    singles = [remedy for change in _candidates(short.job) if (remedy := _if_it_fits(change))]
    if singles:
        return tuple(singles[:most])
    combined = _combined(short.job)
    return () if combined is None else (combined,)


def _if_it_fits(candidate: _Candidate) -> Remedy | None:
    answer = estimate(candidate.job)
    if not answer.fits:
        return None
    return Remedy(candidate.change, candidate.flags, answer.least_bytes, answer.room_bytes or 0)


def _combined(job: JobSpec) -> Remedy | None:
    """Apply every kind of change once, cheapest first, and stop at the first combination that fits."""
    changes: list[str] = []
    flags: list[str] = []
    current = job
    for step in (_lighter_step, _higher_stage, _recompute, _fewer_sequences, _more_gpus):
        for candidate in step(current):
            fitting = _if_it_fits(candidate._replace(
                change="; ".join([*changes, candidate.change]), flags=" ".join([*flags, candidate.flags])))  # fmt: skip
            if fitting:
                return fitting
            last = candidate
        if any(True for _ in step(current)):
            changes.append(last.change)
            flags.append(last.flags)
            current = last.job
    return None


def _candidates(job: JobSpec) -> Iterator[_Candidate]:
    for step in (_lighter_step, _recompute, _higher_stage, _fewer_sequences, _shorter_sequences, _more_gpus, _smaller_state):
        yield from step(job)


def _lighter_step(job: JobSpec) -> Iterator[_Candidate]:
    recipe = job.recipe
    if recipe.optimizer in ("adamw", "adam") and recipe.optimizer_impl != "fused" and recipe.engine != "paper":
        lighter = replace(recipe, optimizer_impl="fused")
        yield _Candidate("use the fused optimizer step", "--optimizer-impl fused", replace(job, recipe=lighter))
    if recipe.engine == "ddp" and not recipe.ddp.gradient_as_bucket_view:
        view = replace(recipe, ddp=DdpOptions(gradient_as_bucket_view=True))
        change = "keep gradients as views of DDP's buckets"
        yield _Candidate(change, "--set ddp.gradient_as_bucket_view=true", replace(job, recipe=view))
    if recipe.attention == "eager":
        yield _Candidate("use fused attention", "--attention sdpa", replace(job, recipe=replace(recipe, attention="sdpa")))


def _recompute(job: JobSpec) -> Iterator[_Candidate]:
    if job.recipe.recompute == "none":
        selective = replace(job.recipe, recompute="selective")
        yield _Candidate("recompute selectively", "--recompute selective", replace(job, recipe=selective))
    if job.recipe.recompute != "full":
        full = replace(job.recipe, recompute="full")
        yield _Candidate("recompute every block", "--recompute full", replace(job, recipe=full))


def _higher_stage(job: JobSpec) -> Iterator[_Candidate]:
    if job.mesh.dp_shard == 1:
        return
    stages: tuple[Stage, ...] = (1, 2, 3)
    for stage in stages[job.recipe.zero_stage :]:
        engine = job.recipe.engine if stage in ENGINE_STAGES[job.recipe.engine] else DEFAULT_ENGINE[stage]
        higher = replace(job, recipe=replace(job.recipe, zero_stage=stage, engine=engine))
        yield _Candidate(f"shard more: ZeRO stage {stage}", f"--stage {stage} --engine {engine}", higher)


def _fewer_sequences(job: JobSpec) -> Iterator[_Candidate]:
    sequences, steps = job.batch.micro_batch_size, job.batch.grad_accum_steps
    while sequences % 2 == 0:
        sequences, steps = sequences // 2, steps * 2
        batch = replace(job.batch, micro_batch_size=sequences, grad_accum_steps=steps)
        flags = f"--micro-batch {sequences} --grad-accum {steps}"
        yield _Candidate(f"smaller micro-batches, more of them: {sequences}", flags, replace(job, batch=batch))


def _shorter_sequences(job: JobSpec) -> Iterator[_Candidate]:
    seq_len = job.batch.seq_len
    while seq_len >= 1024:
        seq_len //= 2
        batch = replace(job.batch, seq_len=seq_len)
        yield _Candidate(f"shorter sequences: {seq_len:,} tokens", f"--seq-len {seq_len}", replace(job, batch=batch))


def _more_gpus(job: JobSpec) -> Iterator[_Candidate]:
    if job.recipe.zero_stage == 0:
        return
    shard = job.mesh.dp_shard * 2
    while shard * job.mesh.dp_replicate * job.mesh.tp <= _MOST_GPUS:
        mesh = replace(job.mesh, dp_shard=shard)
        yield _Candidate(f"more GPUs: {mesh.world_size:,}", f"--gpus {mesh.world_size}", replace(job, mesh=mesh))
        shard *= 2


def _smaller_state(job: JobSpec) -> Iterator[_Candidate]:
    if job.recipe.optimizer in ("adamw", "adam") and job.recipe.engine != "deepspeed":
        recipe = replace(job.recipe, optimizer="adamw-8bit", optimizer_impl=None)
        yield _Candidate("keep the optimizer state in 8 bits", "--optimizer adamw-8bit", replace(job, recipe=recipe))
