"""Which layers does a rank of Megatron-Core's pipeline have, and how many of them wait for their backward?

A rank has one chunk of layers, or several where chunks are interleaved. Chunks may differ in their layers, and in the kinds of
these (dense ones before those with experts).
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from zeroplan.engines.megatron_schedule import order_of
from zeroplan.numeric import Int
from zeroplan.spec.megatron import chunks_of
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.pipeline import Stage as Chunk
from zeroplan.spec.pipeline import stages_per_rank
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.transformer.megatron import HYBRID, PREDICTS, mamba_heads
from zeroplan.transformer.parameters import BlockRun, Parameter
from zeroplan.transformer.params import layout
from zeroplan.transformer.params_modules import layer_norm, linear

#: Layers of each kind, in the order of the model's runs.
Counts = tuple[int, ...]
#: The letter of each kind in a hybrid pattern.
LETTERS = {kind: letter for letter, kind in HYBRID.items()}


def chunks_per_rank(recipe: RecipeSpec, mesh: Mesh) -> int:
    """Chunks of layers on each pipeline rank (``--num-virtual-stages-per-pipeline-rank``)."""
    return 1 if int(mesh.pp) == 1 else stages_per_rank(recipe.pipeline_schedule or "1f1b", recipe.pipeline_stages_per_rank)


def stages_of(at: int, model: ModelSpec, recipe: RecipeSpec, mesh: Mesh) -> tuple[Chunk, ...]:
    """The chunks of one pipeline rank: every pp-th of all."""
    pp = int(mesh.pp)
    return chunks_of(model.num_hidden_layers, pp * chunks_per_rank(recipe, mesh), recipe.layers_by_hand)[at::pp]


@lru_cache(maxsize=256)
def runs_of(model: ModelSpec, recipe: RecipeSpec) -> tuple[BlockRun, ...]:
    """The model's layers by kind, with those of multi-token prediction; T5 has an encoder before them, to which they attend."""
    runs, hidden, own = layout(model).runs, model.hidden_size, recipe.megatron
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
    )  # fmt: skip  # the last is as large as the self attention's
    encoder = runs[0]._replace(kind="encoder", layers=own.encoder_num_layers or runs[0].layers)
    return encoder, runs[0]._replace(kind="decoder", parameters=(*runs[0].parameters, *crossed))


def _hybrid_runs(model: ModelSpec, recipe: RecipeSpec) -> Iterator[BlockRun]:
    """Layers of a hybrid pattern by kind: parts of the model's own, and Mamba-2."""
    own, whole = recipe.megatron, layout(model).runs[-1]
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


def counts_of(chunk: Chunk, model: ModelSpec, recipe: RecipeSpec) -> Counts:
    """How many layers of each kind a chunk has. T5's are all on one rank."""
    runs = runs_of(model, recipe)
    if recipe.megatron.pretrains == "t5":
        return tuple(run.layers for run in runs)
    pattern = recipe.megatron.hybrid_layer_pattern
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


def ranks_in_question(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh) -> dict[int, int]:
    """The ranks that may be the fullest or the slowest, and how many there are like each.

    The first, the last, and of those between that have the same layers the first, with the most in flight.
    """
    last, alike = int(mesh.pp) - 1, {0: 1}
    first: dict[tuple[Counts, ...], int] = {}
    for at in range(1, last):
        one = first.setdefault(tuple(counts_of(chunk, model, recipe) for chunk in stages_of(at, model, recipe, mesh)), at)
        alike[one] = alike.get(one, 0) + 1
    return alike | {last: 1}


class Schedule(NamedTuple):
    """The order in which one rank runs its chunks."""

    warm: int
    """Chunks that go forward before each forward is followed by a backward. 1F1B: pp - rank - 1; interleaved: 2·(pp - rank - 1)
    + (v - 1)·g of v chunks per rank, in groups of g micro-batches. Never more than there are."""
    chunks: int
    group: int
    """Micro-batches that pass a chunk before the next chunk's turn."""


def fullest(
    schedule: Schedule, each: tuple[Counts, ...], micro_batches: Int, weights: tuple[Int, ...], *, loss: bool
) -> tuple[Int, ...]:
    """Layers of each kind that wait for their backward when they weigh most; ``loss``: when the last chunk has gone forward.

    ``each``: the layers of every chunk; ``weights``: what a layer of each kind keeps. [bytes]

    >>> fullest(Schedule(3, 2, 2), ((3,), (1,)), 4, (1,), loss=False)
    (12,)
    """
    if isinstance(micro_batches, int) and all(isinstance(weight, int) for weight in weights):
        return _fullest(schedule, each, micro_batches, weights, loss=loss)
    import numpy as np  # noqa: PLC0415  keeps start-up fast

    columns = np.broadcast_arrays(micro_batches, *weights)
    rows = zip(*(column.ravel().tolist() for column in columns), strict=True)
    found = np.array([_fullest(schedule, each, steps, tuple(bytes_of), loss=loss) for steps, *bytes_of in rows], dtype=np.int64)
    return tuple(kind.reshape(columns[0].shape) for kind in found.T)


def _fullest(
    schedule: Schedule, each: tuple[Counts, ...], micro_batches: int, weights: tuple[Int, ...], *, loss: bool
) -> Counts:
    few = min(micro_batches, 4 * schedule.group + micro_batches % schedule.group)  # further groups repeat the earlier ones
    found = (
        tuple(sum(flying * kinds[at] for flying, kinds in zip(one, each, strict=True)) for at in range(len(weights)))
        for one in _in_flight(schedule, few, loss=loss)
    )
    return max(found, key=lambda counts: sum(count * weight for count, weight in zip(counts, weights, strict=True)))


@lru_cache(maxsize=1024)
def _in_flight(schedule: Schedule, micro_batches: int, *, loss: bool) -> tuple[tuple[int, ...], ...]:
    """Micro-batches of each chunk that wait for their backward, after every forward that follows the warm-up.

    Source: Megatron-LM 2026-08, megatron/core/pipeline_parallel/schedules.py, get_schedule_table.
    """
    order, flying, found = tuple(order_of(schedule.chunks, schedule.group, micro_batches)), [0] * schedule.chunks, set()
    warm = min(schedule.warm, len(order) - 1)
    for at, chunk in enumerate(order):
        flying[chunk] += 1
        if at < warm:
            continue
        if chunk == schedule.chunks - 1 or not loss:
            found.add(tuple(flying))
        flying[schedule.chunks - 1 - order[at - warm]] -= 1
    return tuple(sorted(found))


class Behind(NamedTuple):
    """Hidden states that graphs of layers that were run again leave, at the highest forward, loss, and so on."""

    forward: Int = 0
    loss: Int = 0
    backward: Int = 0
    embedding: Int = 0
    step: Int = 0


def left_behind(
    schedule: Schedule, layers: tuple[int, ...], routed: tuple[int, ...], micro_batches: Int, *, received: bool
) -> Behind:
    """What full recomputation of layers with experts leaves beyond what waits for its backward.

    A token dispatcher refers to its layer's last graph, and so to the layer's input and that one's gradient, until the layer runs
    again. ``layers`` and ``routed``: checkpoints of each chunk, and those of them with experts; ``received``: the gradient of a
    chunk's output is another tensor.

    >>> left_behind(Schedule(0, 1, 1), (4,), (4,), 8, received=False)
    Behind(forward=3, loss=0, backward=2, embedding=7, step=8)
    """
    if not isinstance(micro_batches, int):
        import numpy as np  # noqa: PLC0415  keeps start-up fast

        rows = [left_behind(schedule, layers, routed, one, received=received) for one in micro_batches.ravel().tolist()]
        return Behind(*(np.array(column).reshape(micro_batches.shape) for column in zip(*rows, strict=True)))
    few = min(micro_batches, 4 * schedule.group + micro_batches % schedule.group)
    return _behind(schedule, layers, routed, few, received=received)


@lru_cache(maxsize=1024)
def _behind(
    schedule: Schedule, layers: tuple[int, ...], routed: tuple[int, ...], micro_batches: int, *, received: bool
) -> Behind:
    order, flying, most = tuple(order_of(schedule.chunks, schedule.group, micro_batches)), 0, 0
    warm = min(schedule.warm, len(order) - 1)
    left = {chunk: 2 * count for chunk, count in enumerate(routed)}  # of the step before
    forward, loss, backward, embedding = [0], [0], [0], [0]
    for at in range(len(order) + warm):
        if at < len(order):
            chunk = order[at]
            others = sum(left.values()) - left[chunk]
            flying += layers[chunk]
            most = max(most, flying)
            forward.append(flying + others + max(0, left[chunk] - 1 - layers[chunk]))
            left[chunk] = 0
            if chunk == schedule.chunks - 1:
                loss.append(flying + others)
        if at >= warm:
            chunk = schedule.chunks - 1 - order[at - warm]
            others, own = sum(left.values()) - left[chunk], 2 * routed[chunk]
            again = max(own - 2, 0) if left[chunk] else max(routed[chunk] - 2 + (received and routed[chunk] > 1), 0)
            backward.append(flying + others + again)
            flying, left[chunk] = flying - layers[chunk], own
            if not chunk:
                embedding.append(flying + layers[0] + others + max(0, own - 1))
    beyond = [max(0, max(one) - most) for one in (forward, loss, backward, embedding)]
    return Behind._make([*beyond, 2 * sum(routed)])
