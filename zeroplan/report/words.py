"""Sentences that every rendering of an answer shares: what the job is, what a parameter costs, whether it fits."""

from collections.abc import Iterator

from zeroplan.estimator import Estimate
from zeroplan.ledger import Kind
from zeroplan.spec.job import ENGINE_STAGES
from zeroplan.units import format_size

#: From which ZeRO stage on a kind of state is divided among the ranks (arXiv:1910.02054, section 5).
_DIVIDED_FROM = {Kind.OPTIMIZER_STATE: 1, Kind.GRADIENTS: 2, Kind.PARAMETERS: 3}


def headline(answer: Estimate) -> str:
    """What is trained, on how many GPUs, how."""
    job = answer.job
    gpus = job.mesh.world_size
    gpu = "" if job.cluster.gpu is None else f" {job.cluster.gpu.full_name}"
    name = job.model.name or f"a {job.model.family} model"
    engine = ENGINE_STAGES[job.recipe.engine][job.recipe.zero_stage]
    active = "" if answer.active_parameters == answer.parameters else f", {answer.active_parameters:,} of them active"
    count = "" if "parameters" in name else f" ({answer.parameters:,} parameters{active})"
    return f"{name}{count} on {gpus:,}{gpu or ' GPU'}{'s' if gpus > 1 else ''}, ZeRO stage {job.recipe.zero_stage}: {engine}"


def job_lines(answer: Estimate) -> Iterator[str]:
    """The recipe and the batch, one line each."""
    recipe, batch, mesh = answer.job.recipe, answer.job.batch, answer.job.mesh
    impl = "" if recipe.optimizer_impl is None else f" {recipe.optimizer_impl}"
    yield f"{recipe.precision}, {recipe.optimizer}{impl}, recomputation {recipe.recompute}, attention {recipe.attention}"
    accumulated = "" if batch.grad_accum_steps == 1 else f", {batch.grad_accum_steps} micro-batches per step"
    yield f"{batch.micro_batch_size:,} x {batch.seq_len:,} tokens per GPU and micro-batch{accumulated}"
    if mesh.dp_replicate > 1 or mesh.tp > 1:
        yield f"{mesh.dp_replicate} replicas x {mesh.dp_shard} shards x {mesh.tp} tensor-parallel ranks"


def per_parameter(answer: Estimate, kind: Kind | None = None) -> str:
    """Bytes per parameter of a kind of state, or of all, and how the stage divides them: ``4 x Ψ / 8``.

    The factor is measured on this rank's bytes, so padding and uneven shards show in it.
    """
    if kind is None:
        whole = sum(_per_parameter(answer, one) for one in answer.states_by_kind)
        return f"{_short(whole)} x Ψ before sharding, {_short(_on_this_rank(answer))} x Ψ on this GPU"
    ranks = f" / {answer.job.mesh.dp_shard}" if _divided(answer, kind) else ""
    split = f" / {answer.job.mesh.tp} (tensor-parallel)" if answer.job.mesh.tp > 1 else ""
    return f"{_short(_per_parameter(answer, kind))} x Ψ{split}{ranks}"


def _divided(answer: Estimate, kind: Kind) -> bool:
    return answer.job.recipe.zero_stage >= _DIVIDED_FROM[kind] and answer.job.mesh.dp_shard > 1


def _per_parameter(answer: Estimate, kind: Kind) -> float:
    ranks = answer.job.mesh.dp_shard if _divided(answer, kind) else 1
    return answer.states_by_kind[kind] * ranks * answer.job.mesh.tp / answer.parameters


def _on_this_rank(answer: Estimate) -> float:
    return sum(answer.states_by_kind.values()) / answer.parameters


def _short(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")


def verdict_sentence(answer: Estimate) -> str:
    """Whether it fits, with how much room, and what that rests on."""
    if answer.capacity_bytes is None:
        need = format_size(answer.comfortable_bytes)
        return f"It needs a GPU with {need}. Name one with --gpu to see whether it fits (zeroplan gpus lists them)."
    gpu = answer.job.cluster.gpu
    name = "" if gpu is None else gpu.full_name
    capacity, room = format_size(answer.capacity_bytes), format_size(abs(answer.room_bytes or 0))
    if answer.verdict == "fits":
        return f"It fits {name} ({capacity}), with {room} of room."
    if answer.verdict == "tight":
        return (
            f"It fits {name} ({capacity}) tightly: {room} of room beside the peak, less than the allocator likes to cache; "
            "set PYTORCH_ALLOC_CONF=expandable_segments:True."
        )
    return f"It does not fit {name} ({capacity}): {room} too much."
