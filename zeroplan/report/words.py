"""Shared by all renderings of an answer: text layout, the job in words, bytes per parameter, the verdict."""

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from zeroplan.estimator import Estimate, estimate, step_implementation
from zeroplan.ledger import Kind, Line, bytes_by_kind
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.hardware import SETTINGS
from zeroplan.spec.job import ENGINE_STAGES, JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.units import Unit, format_size

if TYPE_CHECKING:
    from zeroplan.replay import OnCard, Replayed

T = TypeVar("T")
WIDTH = 100
"""Columns of running text in a terminal. [characters]"""
COLUMNS = 80
"""Columns of an answer on one screen. [characters]"""
EXPANDABLE = "PYTORCH_ALLOC_CONF=expandable_segments:True"


def no_change() -> str:
    """Return the sentence for a job that no change makes fit."""
    from zeroplan.remedies import MOST_GPUS  # noqa: PLC0415  keeps start-up fast

    return (
        "Nothing that zeroplan tries makes it fit: recomputation, a higher ZeRO stage, smaller micro-batches, shorter sequences, "
        f"up to {MOST_GPUS:,} GPUs."
    )


def paragraphs(parts: Iterable[Sequence[str]]) -> str:
    """Return the non-empty parts of an answer, with an empty line between them."""
    return "\n\n".join("\n".join(part) for part in parts if part)


def filled(text: str) -> list[str]:
    """Return a text wrapped to the columns of one screen."""
    return textwrap.wrap(text, COLUMNS, break_long_words=False, break_on_hyphens=False)


def cells(*each: str) -> str:
    """Return a row of a table in Markdown."""
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in each) + " |"


def item(text: str, width: int = WIDTH) -> str:
    """Return one item of a list."""
    return textwrap.fill(text, width, initial_indent="  - ", subsequent_indent="    ")


def notes_part(notes: Sequence[str]) -> list[str]:
    """Return the notes of an answer under their heading; empty without notes."""
    return ["Notes", *map(item, notes)] if notes else []


def every_note(answer: Estimate, notes: Sequence[str]) -> list[str]:
    """Return all notes: assumed settings, inexact parts, and the engine's notes."""
    return [*notes, *([answer.approximate] if answer.approximate else []), *answer.notes]


def kinds_by_size(lines: tuple[Line, ...]) -> list[tuple[Kind, int]]:
    """Return bytes by kind, the largest first, without empty kinds."""
    kinds = [(kind, int(n_bytes)) for kind, n_bytes in bytes_by_kind(lines).items() if n_bytes]
    return sorted(kinds, key=lambda one: -one[1])


def spread(front: Sequence[T], most: int) -> list[T]:
    """Return the whole sequence, or both ends and some items between if it is long.

    >>> spread("abcde", 3)
    ['a', 'c', 'e']
    """
    last = len(front) - 1
    return list(front) if last < most else [front[round(last * at / (most - 1))] for at in range(most)]


def made() -> str:
    """Return zeroplan's version and the user's date, for pictures and reports: ``zeroplan 0.1.0, 1 March 2026``."""
    from zeroplan import __version__  # noqa: PLC0415  the package imports this module

    day = date.today()  # noqa: DTZ011  the user's own day
    return f"zeroplan {__version__}, {day.day} {day:%B %Y}"


def headline(answer: Estimate) -> str:
    """Return the model, the GPUs and the recipe in words."""
    return headline_of(answer.job)


def headline_of(job: JobSpec) -> str:
    """Return the model, the GPUs and the recipe of a job in words."""
    return f"{subject(job)}, {stage_words(job)}"


def stage_words(job: JobSpec) -> str:
    """Return the ZeRO stage and its engine: ``ZeRO stage 3: FSDP2``."""
    engine = engine_words(job)
    return engine if "DeepSpeed stage" in engine else f"ZeRO stage {job.recipe.zero_stage}: {engine}"


def engine_words(job: JobSpec) -> str:
    """Return an engine's name at this stage; a plain loop on one GPU without DDP has none."""
    recipe = job.recipe
    if recipe.engine == "ddp" and job.mesh.world_size == 1 and not recipe.wraps_one_rank:
        return "plain loop"
    if recipe.engine == "ddp" and recipe.zero_stage == 1 and recipe.optimizer.startswith("shampoo"):
        return "DDP + Shampoo's blocks among ranks"
    return ENGINE_STAGES[recipe.engine][recipe.zero_stage]


def subject(job: JobSpec) -> str:
    """Return the model and the number of GPUs in words."""
    gpus = job.mesh.world_size
    gpu = plural(gpus, "GPU") if job.cluster.gpu is None else f"{gpus:,} x {job.cluster.gpu.full_name}"
    return f"{model_words(job)} on {gpu}"


def model_words(job: JobSpec) -> str:
    """Return the model's name, or its family's, with LoRA or frozen parts if not all is trained.

    >>> from zeroplan import job
    >>> model_words(job(model="llama-3.1-8b", lora_rank=16, quantize="nf4"))
    'llama-3.1-8b with QLoRA (nf4) of rank 16'
    """
    name, method = job.model.name or f"a {job.model.family} model", method_words(job.model)
    return f"{name} with {method}" if method else name


def method_words(model: ModelSpec) -> str:
    """Return LoRA, QLoRA with its number format, or frozen parts; empty if every parameter is trained."""
    adapter = model.adapter
    if adapter is None:
        return "" if model.frozen is None else "frozen parts"
    return f"{'LoRA' if adapter.quantize == 'none' else f'QLoRA ({adapter.quantize})'} of rank {adapter.rank:,}"


def partly_trained(model: ModelSpec) -> str:
    """Return the layers with adapters, or the frozen parts; empty if every parameter is trained."""
    if model.adapter is not None:
        whole = f"; {model.adapter.modules_to_save} trained whole" if model.adapter.modules_to_save else ""
        return f"adapters in {model.adapter.targets}{whole}"
    if model.frozen is None:
        return ""
    blocks = (f"the first {plural(model.frozen.layers, 'block')}",) if model.frozen.layers else ()
    return f"frozen: {', '.join((*model.frozen.names, *blocks))}"


def recipe_line(recipe: RecipeSpec) -> str:
    """Return precision, optimizer, recomputation and attention in words, and the release of transformers if it is given."""
    offloaded = ", activations offloaded" if recipe.offload_activations else ""
    release = "" if recipe.transformers is None else f", transformers {recipe.transformers}"
    return (
        f"{recipe.precision}, {_optimizer(recipe)}, {recompute_words(recipe)}{offloaded}, attention {recipe.attention}{release}"
    )


def recompute_words(recipe: RecipeSpec) -> str:
    """Return the recomputation in words, with the number of blocks if not all.

    >>> recompute_words(RecipeSpec(recompute="full", recompute_layers=8))
    'recomputation full of the first 8 blocks'
    """
    layers = recipe.recompute_layers
    return f"recomputation {recipe.recompute}" + ("" if layers is None else f" of the first {plural(layers, 'block')}")


def batch_line(batch: BatchSpec, mesh: MeshSpec) -> str:
    """Return one data-parallel rank's micro-batch, and the micro-batches per step."""
    accumulated = "" if batch.grad_accum_steps == 1 else f", {batch.grad_accum_steps:,} micro-batches per step"
    return f"{sequences(batch)} per {those_that_share(mesh)} and micro-batch{accumulated}"


def those_that_share(mesh: MeshSpec) -> str:
    """Return the GPUs that run one micro-batch: one, or the ranks that split a model or a sequence.

    >>> those_that_share(MeshSpec(dp_shard=8)), those_that_share(MeshSpec(dp_shard=2, tp=2, pp=2))
    ('GPU', '4 GPUs')
    """
    together = mesh.tp * mesh.cp * mesh.pp
    return "GPU" if together == 1 else f"{together} GPUs"


def sequences(batch: BatchSpec) -> str:
    """Return the number of sequences and their tokens."""
    return f"{plural(batch.micro_batch_size, 'sequence')} of {plural(batch.seq_len, 'token')}"


def mesh_line(mesh: MeshSpec) -> str:
    """Return replicas, shards and model-parallel ranks; empty if there are only shards."""
    if mesh.dp_replicate * mesh.model_ranks * mesh.ep == 1:
        return ""
    ways = ((mesh.tp, "tensor"), (mesh.cp, "context"), (mesh.pp, "pipeline"), (mesh.ep, "expert"))
    split = (plural(number, f"{what}-parallel rank") for number, what in ways if number > 1)
    return " x ".join((plural(mesh.dp_replicate, "replica"), plural(mesh.dp_shard, "shard"), *split))


def job_lines(answer: Estimate) -> Iterator[str]:
    """Yield the model's size, the recipe and the batch, one line each."""
    recipe, batch, mesh = answer.job.recipe, answer.job.batch, answer.job.mesh
    active = "" if answer.active_parameters == answer.parameters else f", {answer.active_parameters:,} of them used per token"
    if active or "parameters" not in answer.job.model.name:
        yield f"{answer.parameters:,} parameters{active}"
    model = answer.job.model
    if model.adapter is not None:
        trained = f"{answer.trained_parameters:,} parameters trained, the others frozen"
        yield f"{partly_trained(model)}: {trained}"
    if model.frozen is not None:
        yield f"{answer.trained_parameters:,} parameters trained; {partly_trained(model)}"
    yield recipe_line(recipe)
    accumulated = "" if batch.grad_accum_steps == 1 else f"{batch.grad_accum_steps:,} micro-batches or "
    tokens = batch.micro_batch_size * batch.seq_len * batch.grad_accum_steps * mesh.dp_replicate * mesh.dp_shard
    yield f"{sequences(batch)} per {those_that_share(mesh)} and micro-batch; {accumulated}{tokens:,} tokens per step"
    if arranged := mesh_line(mesh):
        yield arranged


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 GPU``, ``8 GPUs``.

    >>> plural(1, "GPU"), plural(1024, "GPU")
    ('1 GPU', '1,024 GPUs')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _optimizer(recipe: RecipeSpec) -> str:
    """Return the optimizer, the implementation of its step, and whether the user or zeroplan chose it."""
    carried_out = step_implementation(recipe)
    if carried_out is None:
        return recipe.optimizer
    return f"{recipe.optimizer} ({carried_out}{', the default' if recipe.optimizer_impl is None else ''})"


def per_parameter(answer: Estimate, kind: Kind | None = None) -> str:
    """Return bytes per parameter of a kind of state, or of all: ``4 x Ψ``, or ``4 x Ψ / 8`` if the ranks share it evenly.

    Otherwise (whole copies beside shards, padding, uneven chunks): the bytes of a single rank, and the bytes of this
    rank.
    """
    whole, here, mesh = _unsharded(answer.job), answer.states_by_kind, answer.job.mesh
    before = sum(whole.values()) if kind is None else whole[kind]
    after = sum(here.values()) if kind is None else here[kind]
    split, shards = f" / {mesh.tp} (tensor-parallel)" if mesh.tp > 1 else "", mesh.dp_shard * mesh.cp
    if kind is not None and _short(after / max(before, 1)) == "1":
        return f"{_short(before * mesh.tp / answer.parameters)} x Ψ{split}"
    if kind is not None and _short(after * shards / max(before, 1)) == "1":
        return f"{_short(before * mesh.tp / answer.parameters)} x Ψ{split} / {shards:,}"
    return f"{_short(before / answer.parameters)} x Ψ before sharding, {_short(after / answer.parameters)} x Ψ on this GPU"


@lru_cache(maxsize=16)
def _unsharded(job: JobSpec) -> Mapping[Kind, int]:
    """Return the states of the same job on one data-parallel rank, without sharding; cached per job."""
    fsdp2 = replace(job.recipe.fsdp2, reshard_after_forward=None, cpu_offload=False, modules="transformers")
    here = replace(job.recipe.deepspeed, offload_optimizer="none", offload_param="none")
    engine = "fsdp2" if job.recipe.engine == "fsdp1" else job.recipe.engine  # FSDP2 on one rank shards nothing
    recipe = replace(
        job.recipe, engine=engine, fsdp2=fsdp2, deepspeed=replace(here, zero_hpz_partition_size=1), pipeline_schedule=None,
        pipeline_stages_per_rank=None, pipeline_layers=None,
    )  # fmt: skip
    return estimate(replace(job, recipe=recipe, mesh=MeshSpec(tp=job.mesh.tp))).states_by_kind


def _short(number: float) -> str:
    digits = f"{number:,.2f}"
    return "less than 0.01" if digits == "0.00" and number else digits.rstrip("0").rstrip(".")


NAME_A_GPU = "Check: --gpu NAME."


def verdict_sentence(answer: Estimate, unit: Unit | None = None, *, name_a_gpu: str = NAME_A_GPU) -> str:
    """Return whether the job fits, and the spare memory; without a GPU the size of GPU it needs, and ``name_a_gpu``.

    Without a unit, sizes are in GB and GiB.
    """
    size = format_size if unit is None else unit.size
    if answer.capacity_bytes is None:
        fits, least = size(answer.comfortable_bytes), size(answer.least_bytes)
        also = "" if fits == least else f", and tightly one of {least}"
        return f"It fits a GPU of {fits}{also}. {name_a_gpu}"
    gpu = answer.job.cluster.gpu
    name = "" if gpu is None else gpu.full_name
    capacity, room = size(answer.capacity_bytes), size(abs(answer.room_bytes or 0))
    if answer.least_bytes > answer.capacity_bytes:
        return f"It does not fit {name} ({capacity}): {room} too much."
    if answer.verdict == "does not fit":
        return f"It does not fit {name} ({capacity}), though the peak leaves {room} of room. {allocator_sentence(answer, unit)}"
    tightly, way_out = (" tightly", f" Set {EXPANDABLE}.") if answer.verdict == "tight" else ("", "")
    if answer.needs_expandable_segments:
        tightly, way_out = " with expandable segments only", f" Set {EXPANDABLE}."
    if answer.is_tight_by_length:
        longest = answer.job.batch.longest_seq_len or 0
        way_out = (
            f" It does not fit with the longest possible sequences ({longest:,} tokens); give a file of lengths to be sure."
        )
    pressed = allocator_sentence(answer, unit)
    return f"It fits {name} ({capacity}){tightly}, with {room} of room beside the peak.{pressed and ' ' + pressed}{way_out}"


def is_data_parallel(answer: Estimate) -> bool:
    """Whether traffic is comparable with DDP's: model-parallel ranks also send activations, and have a part of the gradients."""
    return answer.job.mesh.model_ranks == 1


def replay_sentence(answer: Estimate, unit: Unit, *, briefly: bool = False) -> str:
    """Return the memory that the allocator reserves in a replay of the step's requests; empty without a replay.

    ``briefly`` leaves out free memory that the allocator could not use.
    """
    if answer.replay is None:
        return ""
    default, expandable = (answer.replay.replayed(settings) for settings in SETTINGS)
    beyond = unit.size(default.reserved_bytes - answer.peak_bytes)
    unusable = "" if briefly else _unusable(default, unit)
    return (
        f"Replayed: the allocator reserves {unit.size(default.reserved_bytes)}, {beyond} beyond the peak; with expandable segments "
        f"{unit.size(expandable.reserved_bytes)}.{unusable}"
    )


def _unusable(shown: "Replayed", unit: Unit) -> str:
    """The reserved memory that was free but unusable when the allocator last took more from the GPU; empty if none."""
    if not shown.unusable_bytes:
        return ""
    free = unit.size(shown.unusable_bytes)
    return f" When the allocator last took more from the card, {free} were free, but in pieces too small or for another stream."


def allocator_sentence(answer: Estimate, unit: Unit | None = None) -> str:
    """Return the consequence if the allocator would reserve more than the GPU has; empty if not, or without a GPU."""
    room, band = answer.allocator_room_bytes, answer.reserved
    if room is None or answer.peak_bytes > room or int(band.high_bytes) <= room:
        return ""
    size = format_size if unit is None else unit.size
    if answer.replay is not None:
        return _on_the_card(answer.replay.on_card(room), room, size) + _with_expandable(answer)
    may = "would" if int(band.low_bytes) > room else "may"
    span = f"{size(int(band.low_bytes))} to {size(int(band.high_bytes))}"
    return (
        f"The allocator {may} reserve {span}, but has only {size(room)}. Then it frees cached blocks and tries again, which costs "
        f"time. {_with_fragmentation(answer, room, size)}"
    )


def _on_the_card(shown: "OnCard", room: int, size: Callable[[int], str]) -> str:
    """Return the result of a replay on a GPU with ``room`` bytes for the allocator."""
    has = f"In a replay with the {size(room)} that the allocator has"
    if not shown.fits:
        where = "" if shown.phase is None else f" in the {shown.phase.value}"
        return f"{has}, the job runs out of memory{where}, with {size(shown.free_bytes)} reserved but unusable."
    if shown.retries:
        return f"{has}, the step completes. The allocator frees cached blocks {_times(shown.retries)}, which costs time."
    return f"{has}, the step completes."


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number:,} times"


def _with_expandable(answer: Estimate) -> str:
    """Whether expandable segments make a job fit that runs out of memory without them; empty if it does not run out."""
    if answer.fits_in_replay("default"):
        return ""
    return f" With expandable segments it {'completes' if answer.needs_expandable_segments else 'runs out, too'}."


def _with_fragmentation(answer: Estimate, room: int, size: Callable[[int], str]) -> str:
    """Whether the peak fits with fragmentation, by the smallest room in which similar jobs ran."""
    _, expected, most = map(int, answer.under_pressure())
    if most <= room:
        return f"With fragmentation the peak needs {size(most)} at most, which fits."
    if expected <= room:
        return f"With fragmentation the peak needs {size(expected)}, which fits, but up to {size(most)}, which would not."
    return f"With fragmentation the peak needs {size(expected)}, more than that: it may run out of memory."
