"""In which ways may a model be split over GPUs, beside its data? Tensor, context, pipeline and expert parallelism.

These degrees are structure: every combination is looked at by itself, under the engines that have them: FSDP2
and Megatron-Core. Tensor parallelism stays within a node; a sequence is cut only into parts of many tokens; what divides nothing
evenly is not tried.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from zeroplan.planner.space import WHOLE, Degrees, Fixed, gpus_per_node
from zeroplan.spec.job import JobSpec
from zeroplan.spec.pipeline import SPLIT, PipelineSchedule
from zeroplan.spec.recipe import Engine, RecipeSpec, ways_of_resharding

#: Engines that split a model over ranks.
SPLITTING: tuple[Engine, ...] = ("fsdp2", "megatron")
#: Schedules of a pipeline that are tried where none is asked for; the first is what runs where nothing is said.
SCHEDULES: tuple[PipelineSchedule | None, ...] = (None, "interleaved-1f1b", "interleaved-zero-bubble", "zbv")
#: A rank with fewer tokens of a sequence than this would wait more than it computes, and none is tried. [tokens]
LEAST_OF_A_SEQUENCE = 4096


def degrees(base: JobSpec, fixed: Fixed) -> Iterator[Degrees]:
    """Every way of splitting the model that divides the GPUs, the plainest first; what is given is taken as it is.

    An engine that does not split a model leaves it whole.
    """
    gpus = base.mesh.world_size // (fixed.dp_replicate or 1)
    ways = product(
        _pipelines(base) if fixed.pp is None else (fixed.pp,),
        _contexts(base) if fixed.cp is None else (fixed.cp,),
        _tensors(base) if fixed.tp is None else (fixed.tp,),
        _experts(base) if fixed.ep is None else (fixed.ep,),
    )
    for pp, cp, tp, ep in ways:
        one = Degrees(tp, cp, pp, ep)
        if one != WHOLE and fixed.engine not in (None, *SPLITTING):
            continue
        if gpus % one.model_ranks == 0 and (gpus // pp) % ep == 0 and _worth_a_look(one, base, fixed):
            yield one


def _worth_a_look(one: Degrees, base: JobSpec, fixed: Fixed) -> bool:
    """Beside a pipeline that is not asked for matrices and experts stay together, or are split as far as it goes.

    Each layout of a pipeline takes its time. What is asked for is looked at.
    """
    if one.pp == 1 or fixed.pp is not None:
        return True
    furthest = max(_tensors(base)) if fixed.tp is None else one.tp, max(_experts(base)) if fixed.ep is None else one.ep
    return one.tp in (1, furthest[0]) and one.ep in (1, furthest[1])


def degrees_of(recipe: RecipeSpec, base: JobSpec, fixed: Fixed) -> Iterator[Degrees]:
    """Those that the recipe's engine has; pipelines beside the plainest of its recipes, since each layout takes its time."""
    for one in degrees(base, fixed):
        if one.pp > 1 and not _plain(recipe, fixed):
            continue
        if one == WHOLE or recipe.engine in SPLITTING:
            yield one


def scheduled(recipe: RecipeSpec, split: Degrees, fixed: Fixed) -> Iterator[RecipeSpec]:
    """The recipe with every schedule of a pipeline that is tried: one stage on each rank, several that take turns, split backwards.

    What no schedule that splits backwards is modelled with has none of them. Megatron's tensor-parallel ranks split the sequence,
    too: it takes less memory and as long.
    """
    if recipe.engine == "megatron" and split.tp > 1:
        recipe = replace(recipe, sequence_parallel=True)
    if split.pp == 1:
        yield recipe
        return
    for schedule in SCHEDULES if fixed.pipeline_schedule is None else (fixed.pipeline_schedule,):
        if schedule in SPLIT and schedule != fixed.pipeline_schedule and not _may_split(recipe, split):
            continue
        yield replace(recipe, pipeline_schedule=schedule, pipeline_stages_per_rank=fixed.pipeline_stages_per_rank)


def _may_split(recipe: RecipeSpec, split: Degrees) -> bool:
    """Whether backwards may be split, as far as can be seen here: whole stages, nothing recomputed, nor sharded between passes."""
    plain = recipe.engine == "fsdp2" and recipe.recompute == "none" and recipe.zero_stage == 2
    plain = plain and not (recipe.fsdp2.ends_apart or recipe.fsdp2.of_torch_2_15)
    return plain and split.tp == split.cp == split.ep == 1


def _plain(recipe: RecipeSpec, fixed: Fixed) -> bool:
    """Whether nothing is said that was not asked for and has a match that is as quick and as small, or nearly so."""
    return (
        (recipe.optimizer_impl != "foreach" or fixed.optimizer_impl is not None)
        and (recipe.loss == "full" or fixed.loss is not None)
        and (ways_of_resharding(recipe.fsdp2) is None or fixed.fsdp2 is not None)
    )


def _powers(most: int) -> Iterator[int]:
    return (1 << power for power in range(max(most, 1).bit_length()))


def _tensors(base: JobSpec) -> Iterator[int]:
    """Within a node, and so that every rank has whole heads of keys and values."""
    heads = base.model.num_key_value_heads
    return (ways for ways in _powers(gpus_per_node(base)) if heads % ways == 0)


def _contexts(base: JobSpec) -> Iterator[int]:
    """So that every rank has two even parts of a long sequence, one from its beginning and one from its end."""
    length = base.batch.seq_len
    most = max(1, length // LEAST_OF_A_SEQUENCE)
    return (ways for ways in _powers(most) if ways == 1 or length % (2 * ways) == 0)


def _pipelines(base: JobSpec) -> Iterator[int]:
    """So that every stage has as many layers."""
    layers = base.model.num_hidden_layers
    return (ways for ways in _powers(layers) if layers % ways == 0)


def _experts(base: JobSpec) -> Iterator[int]:
    """So that every rank has as many experts."""
    experts = 1 if base.model.moe is None else base.model.moe.num_experts
    return (ways for ways in _powers(experts) if experts % ways == 0)
