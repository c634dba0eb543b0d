"""Which layout is better? Order by what is asked for; what the model cannot tell apart goes to the simpler recipe."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from zeroplan.numeric import Int
from zeroplan.planner.search import Found
from zeroplan.planner.space import ENGINES, Column, Grid
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.recipe import SMALL_BUCKET, RecipeSpec, ways_of_resharding

Objective = Literal["throughput", "headroom", "cost"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)

#: Rates that differ by less count as equal: a step's time is not known any better.
TIE = 0.005


class Field(NamedTuple):
    """All layouts of all structures side by side, a column each."""

    structure: Column
    at: Column
    least_bytes: Column
    comfortable_bytes: Column
    seconds: NDArray[np.float64]
    tokens_per_s: NDArray[np.float64]
    """Of one GPU."""
    complexity: Column

    @property
    def layouts(self) -> int:
        """How many there are."""
        return len(self.at)


def field(found: Sequence[Found]) -> Field:
    """Put what was found side by side."""
    return Field(
        np.concatenate([np.full(one.grid.layouts, index, dtype=np.int64) for index, one in enumerate(found)]),
        np.concatenate([np.arange(one.grid.layouts, dtype=np.int64) for one in found]),
        np.concatenate([one.least_bytes for one in found]),
        np.concatenate([one.comfortable_bytes for one in found]),
        np.concatenate([one.seconds for one in found]),
        np.concatenate([tokens(one) / one.seconds for one in found]),
        np.concatenate([_complexities(one) for one in found]),
    )


def tokens(one: Found) -> NDArray[np.float64]:
    """Tokens of a step on one GPU, layout by layout."""
    grid = one.grid
    of_the_group = 1.0 * grid.micro_batch_size * grid.grad_accum_steps * grid.seq_len
    return grid.times(of_the_group / (grid.tp * grid.cp * grid.pp))


def _complexities(one: Found) -> Column:
    grid = one.grid
    return grid.row(complexity(one.recipe) + _arranged(grid))


def complexity_of(job: JobSpec) -> int:
    """How much a whole layout asks of a user: its recipe, replicas, and every way in which the model is split."""
    return complexity(job.recipe) + int(_arranged(job.mesh))


def _arranged(mesh: Grid | MeshSpec) -> Int:
    split = sum(degree > 1 for degree in (mesh.tp, mesh.cp, mesh.pp, mesh.ep))
    return 2 * len(_ENGINES) * ((mesh.dp_replicate > 1) + 2 * split)


_ENGINES = (*ENGINES, "megatron", "fsdp1")


def complexity(recipe: RecipeSpec) -> int:
    """How much a recipe asks of a user: what it sets beyond the plainest run, then the engine.

    >>> complexity(RecipeSpec(engine="ddp", zero_stage=0)) < complexity(RecipeSpec()) < complexity(RecipeSpec(recompute="full"))
    True
    """
    set_beyond = (
        4 * recipe.offloads,
        4 * (recipe.optimizer == "adamw-8bit"),
        4 * (recipe.precision == "bf16"),
        3 * (recipe.loss != "full"),
        2 * (ways_of_resharding(recipe.fsdp2) is not None),
        2 * (recipe.engine == "deepspeed" and recipe.deepspeed.zero_hpz_partition_size > 1),
        recipe.engine == "deepspeed" and recipe.deepspeed.reduce_bucket_size == SMALL_BUCKET,
        recipe.engine == "deepspeed" and recipe.deepspeed.stage3_prefetch_bucket_size == 0,
        recipe.recompute != "none",
        recipe.recompute_layers is not None,
        recipe.ddp.gradient_as_bucket_view,
    )
    return len(_ENGINES) * sum(int(one) for one in set_beyond) + _ENGINES.index(recipe.engine)


def ordered(layouts: Field, objective: Objective, quickest: float) -> Column:
    """Positions, the best first. On a number of GPUs that is given, what is quickest costs least.

    ``quickest`` is the rate from which ties are counted: what is at most a tie slower is as quick. [tokens/s]
    """
    rates = np.floor(np.log(quickest / layouts.tokens_per_s) / TIE)
    if objective == "headroom":
        return np.lexsort((layouts.complexity, rates, layouts.least_bytes))
    return np.lexsort((layouts.least_bytes, layouts.complexity, rates))


def pareto(layouts: Field, kept: NDArray[np.bool_]) -> Column:
    """Positions of the layouts that nothing else beats in both tokens/s and memory, the quickest first."""
    order = np.lexsort((layouts.least_bytes, -layouts.tokens_per_s))
    order = order[kept[order]]
    memory = layouts.least_bytes[order]
    before = np.concatenate(([np.iinfo(np.int64).max], np.minimum.accumulate(memory)[:-1])) if len(memory) else memory
    return order[memory < before]
