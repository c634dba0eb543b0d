"""Orders layouts by the objective. Layouts that the model cannot distinguish are ordered by the simplicity of their recipes."""

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

#: Rates that differ by less count as equal, since step times are not more accurate.
TIE = 0.02


class Field(NamedTuple):
    """All layouts of all structures, one column per figure."""

    structure: Column
    at: Column
    least_bytes: Column
    comfortable_bytes: Column
    seconds: NDArray[np.float64]
    tokens_per_s: NDArray[np.float64]
    """Tokens per second of one GPU."""
    complexity: Column

    @property
    def layouts(self) -> int:
        """The number of layouts."""
        return len(self.at)


def field(found: Sequence[Found]) -> Field:
    """Return the figures of all structures in one set of columns."""
    return Field(
        np.concatenate([np.full(one.grid.layouts, index, dtype=np.int64) for index, one in enumerate(found)]),
        np.concatenate([np.arange(one.grid.layouts, dtype=np.int64) for one in found]),
        np.concatenate([one.least_bytes for one in found]),
        np.concatenate([one.comfortable_bytes for one in found]),
        np.concatenate([one.seconds for one in found]),
        np.concatenate([one.grid.tokens / one.seconds for one in found]),
        np.concatenate([_complexities(one) for one in found]),
    )


def _complexities(one: Found) -> Column:
    grid = one.grid
    return grid.row(_with_degrees(complexity(one.recipe) + _arranged(grid), grid))


def complexity_of(job: JobSpec) -> int:
    """Return the complexity of a whole layout: of its recipe, replicas and degrees of parallelism."""
    return int(_with_degrees(complexity(job.recipe) + _arranged(job.mesh), job.mesh))


def _with_degrees(plain: Int, mesh: Grid | MeshSpec) -> Int:
    """Add the degrees: among equally complex layouts, the one that splits the model over fewer ranks is simpler."""
    return 64 * plain + int(mesh.tp * mesh.cp * mesh.pp * mesh.ep).bit_length()


def _arranged(mesh: Grid | MeshSpec) -> Int:
    split = sum(degree > 1 for degree in (mesh.tp, mesh.cp, mesh.pp, mesh.ep))
    return 2 * len(_ENGINES) * ((mesh.dp_replicate > 1) + 2 * split)


_ENGINES = (*ENGINES, "fsdp1")


def complexity(recipe: RecipeSpec) -> int:
    """Return the complexity of a recipe: the settings beyond the plainest run, then the engine.

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
    """Return indexes of layouts, the best first. On a given number of GPUs the fastest layout is also the cheapest.

    ``quickest``: the fastest rate; layouts are grouped by how many multiples of ``TIE`` they are slower. [tokens/s]
    """
    rates = np.floor(np.log(quickest / layouts.tokens_per_s) / TIE)
    if objective == "headroom":
        return np.lexsort((layouts.complexity, rates, layouts.least_bytes))
    return np.lexsort((layouts.least_bytes, layouts.complexity, rates))


def pareto(layouts: Field, kept: NDArray[np.bool_]) -> Column:
    """Return indexes of the layouts that no other beats in both tokens/s and memory, the fastest first."""
    order = np.lexsort((layouts.least_bytes, -layouts.tokens_per_s))
    order = order[kept[order]]
    memory = layouts.least_bytes[order]
    before = np.concatenate(([np.iinfo(np.int64).max], np.minimum.accumulate(memory)[:-1])) if len(memory) else memory
    return order[memory < before]
