"""Which layers has each Megatron-Core pipeline rank, and how many of them wait for their backward?

A rank has one chunk of layers, or several with the interleaved schedule. Chunks may differ in the number and kinds of their layers,
for example dense layers before layers with experts.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from zeroplan.numeric import Int, for_each_row
from zeroplan.spec.described import Job
from zeroplan.spec.megatron import chunks_of
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.pipeline import Stage as Chunk
from zeroplan.spec.pipeline import stages_per_rank
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.transformer.megatron import HYBRID, PREDICTS, mamba_heads
from zeroplan.transformer.parameters import BlockRun, Layout, Parameter
from zeroplan.transformer.params import text_layout
from zeroplan.transformer.params_modules import layer_norm, linear

#: Number of layers of each kind, in the order of the model's runs.
Counts = tuple[int, ...]
#: The letter of each kind in a hybrid pattern.
LETTERS = {kind: letter for letter, kind in HYBRID.items()}


def without_adapters(model: ModelSpec) -> Layout:
    """Return the parameters of the text model, without adapters, which Megatron-Core puts beside matrices that it joins."""
    return text_layout(model if model.adapter is None else replace(model, adapter=None))


def chunks_per_rank(job: Job) -> int:
    """Return the number of chunks on each pipeline rank (``--num-virtual-stages-per-pipeline-rank``)."""
    return (
        1
        if int(job.mesh.pp) == 1
        else stages_per_rank(job.recipe.pipeline_schedule or "1f1b", job.recipe.pipeline_stages_per_rank)
    )


def layers_of_a_checkpoint(recipe: RecipeSpec) -> int:
    """Return how many layers one checkpoint of full recomputation has (``--recompute-method uniform``)."""
    return recipe.megatron.recompute_num_layers if recipe.recompute == "full" else 1


def stages_of(at: int, job: Job) -> tuple[Chunk, ...]:
    """Return the chunks of one pipeline rank: every pp-th chunk of the model."""
    pp = int(job.mesh.pp)
    return chunks_of(job.model.num_hidden_layers, pp * chunks_per_rank(job), job.recipe.layers_by_hand)[at::pp]


def runs_of(job: Job) -> tuple[BlockRun, ...]:
    """Return the model's layers by kind, with those of multi-token prediction.

    T5 has encoder layers first; each decoder layer also has parameters to attend to the encoder's output.
    """
    return _runs(job.model, job.recipe)


@lru_cache(maxsize=256)
def _runs(model: ModelSpec, recipe: RecipeSpec) -> tuple[BlockRun, ...]:
    runs, hidden, own = without_adapters(model).runs, model.hidden_size, recipe.megatron
    if own.hybrid_layer_pattern is not None:
        return tuple(_hybrid_runs(model, recipe))
    if own.mtp_num_layers:
        joining = Parameter("mtp.eh_proj.weight", (2 * hidden, hidden))
        norms = tuple(Parameter(f"mtp.{name}norm.weight", (hidden,)) for name in ("e", "h", "final_layer"))
        return *runs, runs[-1]._replace(
            kind=PREDICTS, layers=own.mtp_num_layers, parameters=(*runs[-1].parameters, joining, *norms)
        )
    if own.pretrains != "t5":
        return runs
    width = model.num_attention_heads * model.head_dim
    crossed = (
        *layer_norm("ln_cross_attn", hidden), *linear("crossattention.q_attn", hidden, width, bias=True),
        *linear("crossattention.kv_attn", hidden, 2 * width, bias=True), *linear("attn.c_proj", width, hidden, bias=True),
    )  # fmt: skip  # the cross attention's output projection is as large as the self attention's
    encoder = runs[0]._replace(kind="encoder", layers=own.encoder_num_layers or runs[0].layers)
    return encoder, runs[0]._replace(kind="decoder", parameters=(*runs[0].parameters, *crossed))


def _hybrid_runs(model: ModelSpec, recipe: RecipeSpec) -> Iterator[BlockRun]:
    """Yield the layers of a hybrid pattern by kind: attention, MLP or experts of the model's layers, and Mamba-2."""
    own, whole = recipe.megatron, without_adapters(model).runs[-1]
    attends = tuple(one for one in whole.parameters if "attn" in one.name or one.name.startswith(("input_layernorm", "ln_1")))
    rest = tuple(one for one in whole.parameters if one not in attends)
    heads, hidden = mamba_heads(model, recipe), model.hidden_size
    inner, factors = heads * own.mamba_head_dim, 2 * own.mamba_num_groups * own.mamba_state_dim
    mamba = (
        Parameter("norm.weight", (hidden,)), Parameter("mixer.in_proj.weight", (2 * inner + factors + heads, hidden)),
        Parameter("mixer.conv1d.weight", (inner + factors, 4)), Parameter("mixer.conv1d.bias", (inner + factors,)),
        Parameter("mixer.of_heads.bias", (3 * heads,)), Parameter("mixer.scale.bias", (inner,)),
        Parameter("mixer.out_proj.weight", (hidden, inner)),
    )  # fmt: skip
    for letter, kind in HYBRID.items():
        if layers := (own.hybrid_layer_pattern or "").count(letter):
            yield BlockRun(kind, layers, {"attention": attends, "mamba": mamba}.get(kind, rest))


def counts_of(chunk: Chunk, job: Job) -> Counts:
    """Return the number of layers of each kind in a chunk. T5 has all layers on one rank."""
    runs = runs_of(job)
    if job.recipe.megatron.pretrains == "t5":
        return tuple(run.layers for run in runs)
    pattern = job.recipe.megatron.hybrid_layer_pattern
    if pattern is not None:
        return tuple(pattern[chunk.start : chunk.stop].count(LETTERS[run.kind]) for run in runs)
    counts, start = [], 0
    for run in runs:
        if run.kind == PREDICTS:
            counts.append(run.layers if chunk.is_last else 0)
            continue
        counts.append(max(0, min(chunk.stop, start + run.layers) - max(chunk.start, start)))
        start += run.layers
    return tuple(counts)


def ranks_in_question(job: Job) -> dict[int, int]:
    """Return the ranks that may be the fullest or the slowest, and for each the number of similar ranks, itself included.

    These are the first rank, the last rank, and the first of each group of ranks between with the same layers. The first of a group
    has the most micro-batches in flight.
    """
    last, alike = int(job.mesh.pp) - 1, {0: 1}
    first: dict[tuple[Counts, ...], int] = {}
    for at in range(1, last):
        one = first.setdefault(tuple(counts_of(chunk, job) for chunk in stages_of(at, job)), at)
        alike[one] = alike.get(one, 0) + 1
    return alike | {last: 1}


class Schedule(NamedTuple):
    """The order in which one rank runs its chunks."""

    warm: int
    """Chunk forwards of the warm-up, before forwards and backwards alternate. A step with fewer forwards cuts it short.

    1F1B: pp - rank - 1. Interleaved: 2·(pp - rank - 1) + (v - 1)·g, with v chunks per rank and groups of g micro-batches.
    """
    chunks: int
    """Chunks of layers on the rank."""
    group: int
    """Micro-batches that run through a chunk before the next chunk runs."""


def order_of(chunks: int, group: int, micro_batches: int) -> Iterator[int]:
    """Yield the chunk of every forward. Backwards run the chunks in reverse order."""
    for start in range(0, micro_batches, group):
        for chunk in range(chunks):
            yield from [chunk] * min(group, micro_batches - start)


def fullest(
    schedule: Schedule, each: tuple[Counts, ...], micro_batches: Int, weights: tuple[Int, ...], *, loss: bool
) -> tuple[Int, ...]:
    """Return the number of layers of each kind that wait for their backward, when their activations are largest.

    ``loss``: consider only the moments right after the last chunk's forward. ``each``: the layers of every chunk. ``weights``: the
    activations that a layer of each kind keeps. [bytes]

    >>> fullest(Schedule(3, 2, 2), ((3,), (1,)), 4, (1,), loss=False)
    (12,)
    """
    return for_each_row(lambda steps, *bytes_of: _fullest(schedule, each, steps, bytes_of, loss=loss), micro_batches, *weights)


def _fullest(
    schedule: Schedule, each: tuple[Counts, ...], micro_batches: int, weights: tuple[int, ...], *, loss: bool
) -> Counts:
    few = min(micro_batches, 4 * schedule.group + micro_batches % schedule.group)  # later groups repeat the earlier ones
    found = (
        tuple(sum(in_flight * kinds[at] for in_flight, kinds in zip(one, each, strict=True)) for at in range(len(weights)))
        for one in _in_flight(schedule, few, loss=loss)
    )
    return max(found, key=lambda counts: sum(count * weight for count, weight in zip(counts, weights, strict=True)))


@lru_cache(maxsize=1024)
def _in_flight(schedule: Schedule, micro_batches: int, *, loss: bool) -> tuple[tuple[int, ...], ...]:
    """Return how many micro-batches of each chunk wait for their backward, after every forward that follows the warm-up.

    Source: Megatron-LM 2026-08, megatron/core/pipeline_parallel/schedules.py, get_schedule_table.
    """
    order, in_flight, found = tuple(order_of(schedule.chunks, schedule.group, micro_batches)), [0] * schedule.chunks, set()
    warm = min(schedule.warm, len(order) - 1)
    for at, chunk in enumerate(order):
        in_flight[chunk] += 1
        if at < warm:
            continue
        if chunk == schedule.chunks - 1 or not loss:
            found.add(tuple(in_flight))
        in_flight[schedule.chunks - 1 - order[at - warm]] -= 1
    return tuple(sorted(found))


class Behind(NamedTuple):
    """Hidden states that the graphs of recomputed layers keep alive, at the peak of each part of a step.

    Each number counts those beyond the most checkpoint inputs in flight; at the step all count.
    """

    forward: Int = 0
    loss: Int = 0
    backward: Int = 0
    embedding: Int = 0
    step: Int = 0


def left_behind(
    schedule: Schedule, layers: tuple[int, ...], routed: tuple[int, ...], micro_batches: Int, *, received: bool
) -> Behind:
    """Return the hidden states that full recomputation of layers with experts keeps, beyond those that wait for their backward.

    A token dispatcher refers to its layer's last graph, and so to the layer's input and the input's gradient, until the layer runs
    again. ``layers``: checkpoints of each chunk. ``routed``: those of them with experts. ``received``: another chunk sends the
    gradient of a chunk's output, so that this is a tensor of its own.

    >>> left_behind(Schedule(0, 1, 1), (4,), (4,), 8, received=False)
    Behind(forward=3, loss=0, backward=2, embedding=7, step=8)
    """

    def at(steps: int) -> Behind:
        few = min(steps, 4 * schedule.group + steps % schedule.group)
        return _behind(schedule, layers, routed, few, received=received)

    return Behind(*for_each_row(at, micro_batches))


@lru_cache(maxsize=1024)
def _behind(
    schedule: Schedule, layers: tuple[int, ...], routed: tuple[int, ...], micro_batches: int, *, received: bool
) -> Behind:
    order, in_flight, most = tuple(order_of(schedule.chunks, schedule.group, micro_batches)), 0, 0
    warm = min(schedule.warm, len(order) - 1)
    left = {chunk: 2 * count for chunk, count in enumerate(routed)}  # from the previous step
    forward, loss, backward, embedding = [0], [0], [0], [0]
    for at in range(len(order) + warm):
        if at < len(order):
            chunk = order[at]
            others = sum(left.values()) - left[chunk]
            in_flight += layers[chunk]
            most = max(most, in_flight)
            forward.append(in_flight + others + max(0, left[chunk] - 1 - layers[chunk]))
            left[chunk] = 0
            if chunk == schedule.chunks - 1:
                loss.append(in_flight + others)
        if at >= warm:
            chunk = schedule.chunks - 1 - order[at - warm]
            others, own = sum(left.values()) - left[chunk], 2 * routed[chunk]
            again = max(own - 2, 0) if left[chunk] else max(routed[chunk] - 2 + (received and routed[chunk] > 1), 0)
            backward.append(in_flight + others + again)
            in_flight, left[chunk] = in_flight - layers[chunk], own
            if not chunk:
                embedding.append(in_flight + layers[0] + others + max(0, own - 1))
    beyond = [max(0, max(one) - most) for one in (forward, loss, backward, embedding)]
    return Behind._make([*beyond, 2 * sum(routed)])
