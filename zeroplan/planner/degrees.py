"""The ways to split a model over GPUs: tensor, context, pipeline and expert parallelism.

Degrees are structure: the search evaluates each combination separately, with the engines that support it (FSDP2, Megatron-Core).
Tensor parallelism stays within a node. By default parts of a sequence have many tokens, and pipeline stages have about equal
numbers of layers. If nothing fits, the search is *wide*: it tries every degree that an engine can start.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product

from zeroplan.planner.space import WHOLE, Degrees, Fixed, gpus_per_node
from zeroplan.spec.job import JobSpec
from zeroplan.spec.pipeline import SPLIT, PipelineSchedule
from zeroplan.spec.recipe import Engine, RecipeSpec, ways_of_resharding

#: Engines that can split a model.
SPLITTING: tuple[Engine, ...] = ("fsdp2", "megatron")
#: Pipeline schedules that the search tries; the first is the default.
SCHEDULES: tuple[PipelineSchedule | None, ...] = (None, "interleaved-1f1b", "interleaved-zero-bubble", "zbv")
#: The fewest tokens of a sequence per context-parallel rank. With fewer, a rank waits longer than it computes. [tokens]
LEAST_OF_A_SEQUENCE = 4096


@lru_cache(maxsize=64)
def degrees(base: JobSpec, fixed: Fixed, *, wide: bool = False) -> tuple[Degrees, ...]:
    """Return all combinations of degrees that divide the GPUs, the simplest first. Requested degrees are fixed.

    With an engine that cannot split a model, all degrees are 1.
    """
    gpus = base.mesh.world_size // (fixed.dp_replicate or 1)
    ways = product(
        _pipelines(base, gpus, wide=wide) if fixed.pp is None else (fixed.pp,),
        _contexts(base, gpus, wide=wide) if fixed.cp is None else (fixed.cp,),
        _tensors(base, wide=wide) if fixed.tp is None else (fixed.tp,),
        _experts(base, wide=wide) if fixed.ep is None else (fixed.ep,),
    )
    every = (Degrees(tp, cp, pp, ep) for pp, cp, tp, ep in ways)
    splits = fixed.engine in (None, *SPLITTING)
    return tuple(
        one for one in every if (splits or one == WHOLE) and gpus % one.model_ranks == 0 and (gpus // one.pp) % one.ep == 0
    )


def _is_tried(one: Degrees, base: JobSpec, fixed: Fixed) -> bool:
    """Whether to try this pipeline under FSDP2: even stages, with ``tp`` and ``ep`` either 1 or as large as possible.

    Each layout takes time to evaluate. Requested degrees are always tried.
    """
    if one.pp & (one.pp - 1) or base.model.num_hidden_layers % one.pp:
        return False
    furthest = max(_tensors(base)) if fixed.tp is None else one.tp, max(_experts(base)) if fixed.ep is None else one.ep
    return one.tp in (1, furthest[0]) and one.ep in (1, furthest[1])


def degrees_of(recipe: RecipeSpec, base: JobSpec, fixed: Fixed, *, wide: bool = False) -> Iterator[Degrees]:
    """Yield the combinations that the recipe's engine supports; FSDP2's pipelines only with simple recipes, to save time."""
    for one in degrees(base, fixed, wide=wide):
        if (
            one == WHOLE
            or recipe.engine == "megatron"
            or (
                recipe.engine in SPLITTING
                and (one.pp == 1 or (_plain(recipe, fixed) and (wide or fixed.pp is not None or _is_tried(one, base, fixed))))
            )
        ):
            yield one


def scheduled(recipe: RecipeSpec, split: Degrees, fixed: Fixed, layers: int) -> Iterator[RecipeSpec]:
    """Yield the recipe with each pipeline schedule to try: 1F1B, interleaved, and those that split the backward, if modelled."""
    recipe = with_split_sequences(recipe, split)
    if split.pp == 1:
        yield recipe
        return
    for schedule in SCHEDULES if fixed.pipeline_schedule is None else (fixed.pipeline_schedule,):
        if schedule in SPLIT and schedule != fixed.pipeline_schedule and not _may_split(recipe, split):
            continue
        stages = fixed.pipeline_stages_per_rank
        if recipe.engine == "megatron" and schedule == "interleaved-1f1b" and stages is None:
            stages = _chunks(layers, split.pp)
        yield _with_schedule(recipe, schedule, stages)


@lru_cache(maxsize=4096)
def _with_schedule(recipe: RecipeSpec, schedule: PipelineSchedule | None, stages: int | None) -> RecipeSpec:
    return replace(recipe, pipeline_schedule=schedule, pipeline_stages_per_rank=stages)


@lru_cache(maxsize=4096)
def _with_split_sequences(recipe: RecipeSpec) -> RecipeSpec:
    return replace(recipe, sequence_parallel=True)


def with_split_sequences(recipe: RecipeSpec, split: Degrees) -> RecipeSpec:
    """Return the recipe; under Megatron with ``tp`` it gets sequence parallelism, which saves memory and costs no time."""
    return _with_split_sequences(recipe) if recipe.engine == "megatron" and split.tp > 1 else recipe


def _chunks(layers: int, pp: int) -> int | None:
    """Return the fewest stages per rank into which the layers can be cut; None, the default of two, if they cannot."""
    return next((each for each in range(2, layers // pp + 1) if is_balanced(layers, pp * each)), None)


#: The largest chunk of a pipeline may have this multiple of the mean number of layers; embedding and loss count as one layer each.
_UNEVEN = 1.05


def is_balanced(layers: int, parts: int) -> bool:
    """Whether chunks have nearly the same number of layers.

    >>> is_balanced(80, 16), is_balanced(61, 16), is_balanced(80, 32)
    (True, True, False)
    """
    return layers % parts == 0 or -(-(layers + 2) // parts) * parts <= _UNEVEN * (layers + 2)


def _may_split(recipe: RecipeSpec, split: Degrees) -> bool:
    """Whether schedules that split the backward are modelled: stages not split further, no recomputation, stage 2."""
    plain = recipe.engine == "fsdp2" and recipe.recompute == "none" and recipe.zero_stage == 2
    plain = plain and not (recipe.fsdp2.ends_apart or recipe.fsdp2.of_torch_2_15)
    return plain and split.tp == split.cp == split.ep == 1


def _plain(recipe: RecipeSpec, fixed: Fixed) -> bool:
    """Whether the recipe has no unrequested loss or resharding, for which there are equally good alternatives."""
    return (recipe.loss == "full" or fixed.loss is not None) and (
        ways_of_resharding(recipe.fsdp2) is None or fixed.fsdp2 is not None
    )


def _powers(most: int, *, wide: bool = False) -> Iterable[int]:
    """Return the degrees up to ``most``: all of them in a wide search, or powers of two."""
    return range(1, max(most, 1) + 1) if wide else (1 << power for power in range(max(most, 1).bit_length()))


def _tensors(base: JobSpec, *, wide: bool = False) -> Iterator[int]:
    """Tensor degrees within a node that give every rank whole key/value heads."""
    heads = base.model.num_key_value_heads
    return (ways for ways in _powers(gpus_per_node(base), wide=wide) if heads % ways == 0)


def _contexts(base: JobSpec, gpus: int, *, wide: bool) -> Iterator[int]:
    """Context degrees that give every rank two equal parts of a long sequence, one from its beginning and one from its end."""
    length = base.batch.seq_len
    most = max(1, length // (2 if wide else LEAST_OF_A_SEQUENCE))
    ways = _powers(min(most, gpus), wide=wide)
    return (each for each in ways if gpus % each == 0 and (each == 1 or length % (2 * each) == 0))


def _pipelines(base: JobSpec, gpus: int, *, wide: bool) -> Iterator[int]:
    """Pipeline degrees that give every stage nearly the same number of layers, where embedding and loss may count as one each."""
    layers = base.model.num_hidden_layers
    ways = (ways for ways in range(1, layers + 1) if gpus % ways == 0)
    return (each for each in ways if wide or is_balanced(layers, each))


def _experts(base: JobSpec, *, wide: bool = False) -> Iterator[int]:
    """Expert degrees that give every rank the same number of experts."""
    experts = 1 if base.model.moe is None else base.model.moe.num_experts
    return (ways for ways in _powers(experts, wide=wide) if experts % ways == 0)
