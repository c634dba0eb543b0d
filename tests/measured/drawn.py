"""Draws the jobs of the matrix: a sample in which every two choices meet, the same on every machine.

Every choice of one factor meets every choice of every other in each sweep; sweeps differ, so that more of them also bring
most triples together. A sweep is drawn greedily: of several random rows that each begin with a pair not yet met, the one
that meets most new pairs is taken.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

from zeroplan import BatchSpec, JobSpec, MeshSpec, RecipeSpec
from zeroplan.catalog.model import model
from zeroplan.transformer.params import parameter_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zeroplan.spec.model import ModelSpec
    from zeroplan.spec.recipe import Engine, Stage

SEED, FRESH_SEED, ROOMS_SEED = 20_260, 20_263, 20_266
"""Of the sample, of another that nobody looked at while the estimate was made, and of the one for full cards."""
T = TypeVar("T")


class Choice(NamedTuple):
    """An engine, its stage, and whether there are replicas of the sharded group."""

    engine: Engine
    stage: Stage
    replicated: bool = False


ENGINES = (
    Choice("ddp", 0), Choice("ddp", 1), Choice("fsdp2", 2), Choice("fsdp2", 3), Choice("fsdp2", 3, replicated=True),
    Choice("deepspeed", 0), Choice("deepspeed", 1), Choice("deepspeed", 2), Choice("deepspeed", 3),
)  # fmt: skip
#: Real models of every family, from small to large.
FAMILIES: dict[str, tuple[str, str, str, str]] = {
    "llama": ("smollm2-135m", "llama-3.2-1b", "llama-3.1-8b", "llama-3.1-405b"),
    "qwen2": ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b", "qwen2.5-72b"),
    "qwen3": ("qwen3-0.6b", "qwen3-1.7b", "qwen3-8b", "qwen3-32b"),
    "gemma3_text": ("gemma-3-1b", "gemma-3-4b", "gemma-3-12b", "gemma-3-27b"),
    "phi3": ("phi-4-mini", "phi-3-mini", "phi-3-medium", "phi-4"),
    "gpt2": ("gpt2", "gpt2-medium", "gpt2-xl", "gpt3-175b"),
    "gpt_neox": ("pythia-160m", "pythia-1.4b", "pythia-6.9b", "gpt-neox-20b"),
    "mixtral": ("mixtral-8x7b", "mixtral-8x7b", "mixtral-8x22b", "mixtral-8x22b"),
    "qwen3_moe": ("qwen3-30b-a3b", "qwen3-30b-a3b", "qwen3-235b-a22b", "qwen3-coder-480b-a35b"),
    "deepseek_v3": ("deepseek-v3", "deepseek-v3", "deepseek-v3", "kimi-k2"),
}
#: Micro-batch and sequence; one of them odd, to meet every rounding.
SHAPES = ((1, 512), (8, 512), (4, 1024), (3, 1000), (1, 4096), (2, 4096), (1, 16_384))
#: Ranks, and of how many replicas where there are any; one of them divides no dimension of a model.
RANKS = ((4, 2), (6, 2), (8, 2), (64, 8), (512, 4))
FACTORS: tuple[tuple[object, ...], ...] = (
    ENGINES, tuple(FAMILIES), (0, 1, 2, 3), ("none", "selective", "full"), ("bf16-mixed", "bf16", "fp32"),
    ("fused", "foreach"), (1, 4), SHAPES, RANKS,
)  # fmt: skip

#: DeepSpeed has bfloat16 without an fp32 copy at stages 1 to 3 only, and fails at stage 3 with selective recomputation.
NOT_OFFERED: tuple[tuple[object, object], ...] = ((Choice("deepspeed", 0), "bf16"), (Choice("deepspeed", 3), "selective"))

Row: TypeAlias = "tuple[int, ...]"
"""Which choice of each factor, by number."""
Pair: TypeAlias = "tuple[int, int, int, int]"
"""A factor, which choice of it, another factor, which choice of that."""


@cache
def drawn(count: int, *, seed: int = SEED) -> tuple[JobSpec, ...]:
    """Return the first ``count`` jobs of the sample; a larger sample begins with a smaller one.

    >>> drawn(40)[:10] == drawn(10)
    True
    """
    jobs: dict[JobSpec, None] = {}
    for row in _rows(seed):
        jobs.setdefault(_job(row))
        if len(jobs) >= count:
            break
    return tuple(jobs)[:count]


def sweep() -> list[Row]:
    """Return the first sweep: rows in which every two choices meet."""
    return list(_sweep(random.Random(SEED)))  # noqa: S311  a sample, not a secret


def _rows(seed: int) -> Iterator[Row]:
    dice = random.Random(seed)  # noqa: S311  a sample, not a secret
    while True:
        yield from _sweep(dice)


_TRIES = 20


def _sweep(dice: random.Random) -> Iterator[Row]:
    open_pairs = dict.fromkeys(_all_pairs())
    while open_pairs:
        row = max((_row(open_pairs, dice) for _ in range(_TRIES)), key=lambda row: len(open_pairs.keys() & set(_pairs(row))))
        for pair in _pairs(row):
            open_pairs.pop(pair, None)
        yield row


def _all_pairs() -> Iterator[Pair]:
    for one, other in combinations(range(len(FACTORS)), 2):
        for here in range(len(FACTORS[one])):
            pairs = ((one, here, other, there) for there in range(len(FACTORS[other])))
            yield from (pair for pair in pairs if _offered(pair))


@cache
def _offered(pair: Pair) -> bool:
    one, here, other, there = pair
    return (FACTORS[one][here], FACTORS[other][there]) not in NOT_OFFERED


def _pairs(row: Row) -> Iterator[Pair]:
    return ((one, row[one], other, row[other]) for one, other in combinations(range(len(row)), 2))


def _row(open_pairs: dict[Pair, None], dice: random.Random) -> Row:
    """Start with a pair that has not met yet; for every other factor take the choice that meets most new pairs."""
    one, here, other, there = _any(tuple(open_pairs), dice)
    chosen = {one: here, other: there}
    for factor in _shuffled(tuple(range(len(FACTORS))), dice):
        if factor not in chosen:
            choices = _shuffled(tuple(range(len(FACTORS[factor]))), dice)
            met = {choice: _met(chosen, factor, choice) for choice in choices}
            offered = {choice: pairs for choice, pairs in met.items() if all(map(_offered, pairs))}
            chosen[factor] = max(offered, key=lambda choice: sum(pair in open_pairs for pair in offered[choice]))
    return tuple(chosen[factor] for factor in range(len(FACTORS)))


def _met(chosen: dict[int, int], factor: int, choice: int) -> list[Pair]:
    """Return the pairs that a choice forms with the earlier ones."""
    return [
        (other, there, factor, choice) if other < factor else (factor, choice, other, there) for other, there in chosen.items()
    ]


def _any(things: Sequence[T], dice: random.Random) -> T:
    """Return one of the things. Only ``random()`` of a generator is promised never to change."""
    return things[int(dice.random() * len(things))]


def _shuffled(things: Sequence[T], dice: random.Random) -> list[T]:
    return [thing for _, thing in sorted(((dice.random(), thing) for thing in things), key=lambda pair: pair[0])]


# --- from a row to a job ----------------------------------------------------------------------------------------------------


def _job(row: Row) -> JobSpec:
    engine, family, size, recompute, precision, impl, accumulate, (micro_batch, seq_len), (ranks, replicas) = (
        factor[choice] for factor, choice in zip(FACTORS, row, strict=True)
    )  # type: ignore[misc]
    mesh = MeshSpec(dp_shard=ranks // replicas, dp_replicate=replicas) if engine.replicated else MeshSpec(dp_shard=ranks)
    whole = model(FAMILIES[family][size])
    longest = whole.max_position_embeddings
    recipe = RecipeSpec(
        engine=engine.engine,
        zero_stage=engine.stage,
        precision=precision,
        optimizer_impl=impl,
        recompute=recompute,
    )
    return JobSpec(
        model=_cut(whole, recipe, mesh, accumulate),
        recipe=as_ran(recipe, whole),
        mesh=mesh,
        batch=BatchSpec(micro_batch_size=micro_batch, seq_len=min(seq_len, longest), grad_accum_steps=accumulate),
    )


def as_ran(recipe: RecipeSpec, model: ModelSpec) -> RecipeSpec:
    """Return the recipe with the release that the records are of, if a newer one keeps routers in fp32, which FSDP2 refuses."""
    wide = model.traits.wide_router == "since 5.24" and recipe.precision == "bf16" and recipe.engine != "deepspeed"
    return replace(recipe, transformers="5.23") if wide else recipe


_STATES, _ROOM = 16, 320 * 10**9
"""Bytes of states per parameter, and what larger cards than today's may have: beyond it nobody runs a job."""
_LAYERS_RUN = 24
"""Where all layers are run one by one, in every micro-batch, more of them take minutes and show nothing new."""


def _cut(whole: ModelSpec, recipe: RecipeSpec, mesh: MeshSpec, accumulate: int) -> ModelSpec:
    """Return the model with as many layers as fit a card, and with fewer if the run executes every layer."""
    layers = whole.num_hidden_layers
    if recipe.engine == "deepspeed" or (recipe.engine == "ddp" and recipe.zero_stage == 1):
        layers = min(layers, _LAYERS_RUN // accumulate)
    ways = mesh.dp_shard if recipe.zero_stage == 3 else 1
    while layers > 1 and _STATES * parameter_count(_with_layers(whole, layers)) > _ROOM * ways:
        layers = layers // 2
    return _with_layers(whole, layers)


def _with_layers(whole: ModelSpec, layers: int) -> ModelSpec:
    """Return the model with at least one layer with experts beside the dense first ones."""
    if layers == whole.num_hidden_layers:
        return whole
    moe = whole.moe
    if moe is not None and moe.num_dense_layers >= layers:
        moe = replace(moe, num_dense_layers=layers - 1)
    return replace(whole, num_hidden_layers=layers, moe=moe)
