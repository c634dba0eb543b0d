"""Memory and step time of every layout: one pass of the same formulas per structure, over columns."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zeroplan.engines.account import Account
from zeroplan.engines.device import outside, reserved_as_seen, total_band, workspace_line
from zeroplan.engines.precisions import widths
from zeroplan.errors import SpecError
from zeroplan.estimator import engine_module, flattened_through_the_host, flattens_on_the_gpu
from zeroplan.ledger import Moment, Phase, peak_bytes
from zeroplan.numeric import Int, for_each_value
from zeroplan.planner.rules import Rule, Tally
from zeroplan.planner.space import Column, Fixed, Grid, numbers, structures
from zeroplan.spec.hardware import GpuSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.steptime import step_time
from zeroplan.timeline import reserved
from zeroplan.transformer.params import parameter_count


class Found(NamedTuple):
    """One structure with the figures of all its layouts."""

    recipe: RecipeSpec
    grid: Grid
    least_bytes: Column
    """Allocated peak and what is outside the allocator: what must fit."""
    comfortable_bytes: Column
    """Expected reserved and what is outside."""
    seconds: NDArray[np.float64]

    def fits(self, base: JobSpec) -> NDArray[np.bool_]:
        """Which layouts fit the GPU, comfortably or not."""
        gpu = base.cluster.gpu
        return self.least_bytes <= (0 if gpu is None else int(gpu.memory_bytes.value))


class Searched(NamedTuple):
    """Everything that was evaluated, and what fell before."""

    found: tuple[Found, ...]
    tally: Tally


#: What of a recipe the file that is asked for cannot say; empty where it can.
Unsaid = Callable[[RecipeSpec], str]


def search(base: JobSpec, fixed: Fixed, *, mfu: float | None = None, unsaid: Unsaid | None = None) -> Searched:
    """Evaluate every layout that some engine starts. ``base`` has the model, the GPUs and the sequence length.

    Offload, which costs time, is looked at where nothing fits without it, or where it is asked for.
    """
    tally = Tally()
    found = list(_searched(base, fixed, tally, offload=False, mfu=mfu, unsaid=unsaid))
    if not any(bool(one.fits(base).any()) for one in found):
        found += _searched(base, fixed, tally, offload=True, mfu=mfu, unsaid=unsaid)
    if not found and any(one.rule is Rule.WEIGHTS for one in tally.fallen):  # how far off is the closest?
        tally = Tally()
        found += _searched(base, fixed, tally, offload=False, mfu=mfu, unsaid=unsaid, whatever_weighs=True)
    return Searched(tuple(found), tally)


def _searched(
    base: JobSpec,
    fixed: Fixed,
    tally: Tally,
    *,
    offload: bool,
    mfu: float | None,
    unsaid: Unsaid | None,
    whatever_weighs: bool = False,
) -> Iterator[Found]:
    for recipe in structures(base, fixed, offload=offload):
        missing = "" if unsaid is None else unsaid(recipe)
        if missing:
            tally.cut(Rule.EMITTED, numbers(recipe, base, fixed).grid.layouts, missing)
        else:
            yield from _of_structure(base, recipe, fixed, tally, mfu=mfu, whatever_weighs=whatever_weighs)


def _of_structure(
    base: JobSpec, recipe: RecipeSpec, fixed: Fixed, tally: Tally, *, mfu: float | None, whatever_weighs: bool
) -> Iterator[Found]:
    grid, indivisible = numbers(recipe, base, fixed)
    tally.cut(Rule.DIVISIBILITY, indivisible)
    fitting = _resharded(recipe, grid)
    tally.cut(Rule.RESHARDING, grid.layouts - int(fitting.sum()))
    grid = grid.only(fitting)
    if not whatever_weighs and _weights_alone_are_too_large(base, recipe):
        tally.cut(Rule.WEIGHTS, grid.layouts)
    elif grid.layouts:
        try:
            yield evaluated(base, recipe, grid, mfu=mfu)
        except SpecError as refusal:
            tally.cut(Rule.ENGINE, grid.layouts, str(refusal))


def _weights_alone_are_too_large(base: JobSpec, recipe: RecipeSpec) -> bool:
    """Whether one copy of the weights, which every stage below 3 gathers or holds, is more than the GPU has."""
    gpu, adapter = base.cluster.gpu, base.model.adapter
    if adapter is not None and adapter.quantize != "none":
        return False
    whole = widths(recipe.precision).compute * parameter_count(base.model)
    return gpu is not None and recipe.zero_stage < 3 and whole > gpu.memory_bytes.value


def _resharded(recipe: RecipeSpec, grid: Grid) -> NDArray[np.bool_]:
    """Whether ``reshard_after_forward`` as a number makes sense: a true factor of the ranks that shard."""
    ways = recipe.fsdp2.reshard_after_forward
    if recipe.engine != "fsdp2" or ways is None or isinstance(ways, bool):
        return np.ones(grid.layouts, dtype=np.bool_)
    return np.asarray((grid.dp_shard % ways == 0) & (grid.dp_shard > ways), dtype=np.bool_)


def evaluated(base: JobSpec, recipe: RecipeSpec, grid: Grid, *, mfu: float | None = None) -> Found:
    """Figures of all layouts of one structure; raises SpecError where the engine does not take it."""
    _checked(base, recipe, grid)
    card = outside_column(grid, base.cluster.gpu)
    account = _account(base, recipe, grid, card)
    moments = tuple(Moment(name, phase, (*lines, workspace_line(base.cluster.gpu))) for name, phase, lines in account.moments)
    least = _column(peak_bytes(moments), grid) + card
    room = 0 if base.cluster.gpu is None else int(base.cluster.gpu.memory_bytes.value)
    # Where nothing fits, nobody asks how comfortably.
    comfortable = least if least.min() > room else _column(_reserved(moments, recipe, base.cluster.gpu), grid) + card
    time = step_time(account, base.model, recipe, grid, grid, base.cluster, mfu=mfu)
    return Found(recipe, grid, least, comfortable, _times(time.seconds, grid))


def _reserved(moments: tuple[Moment, ...], recipe: RecipeSpec, gpu: GpuSpec | None) -> Int:
    return reserved_as_seen(reserved(moments, engine=recipe.engine), recipe.engine, gpu).expected_bytes


def _checked(base: JobSpec, recipe: RecipeSpec, grid: Grid) -> None:
    """Ask what a single job is asked, with the first of the grid."""
    job_at(base, recipe, grid, 0)


def job_at(base: JobSpec, recipe: RecipeSpec, grid: Grid, at: int) -> JobSpec:
    """One layout as a job."""
    seq_len = grid.seq_len if isinstance(grid.seq_len, int) else int(grid.seq_len[at])
    mesh = MeshSpec(dp_replicate=int(grid.dp_replicate[at]), dp_shard=int(grid.dp_shard[at]))
    batch = replace(
        base.batch,
        micro_batch_size=int(grid.micro_batch_size[at]),
        grad_accum_steps=int(grid.grad_accum_steps[at]),
        seq_len=seq_len,
    )
    return replace(base, recipe=recipe, mesh=mesh, batch=batch)


def _account(base: JobSpec, recipe: RecipeSpec, grid: Grid, card: Column) -> Account:
    """The engine's account; DeepSpeed's construction goes through host memory where the GPU has no room, as for a single job."""
    engine, gpu = engine_module(recipe.engine), base.cluster.gpu
    account = engine.account(base.model, recipe, grid, grid)
    if gpu is None or not flattens_on_the_gpu(recipe):
        return account
    built = [_column(moment.total_bytes, grid) + card for moment in account.moments if moment.phase is Phase.INIT]
    if all(int(sizes.max()) <= gpu.memory_bytes.value for sizes in built):
        return account
    return engine.account(base.model, flattened_through_the_host(recipe), grid, grid)


def outside_column(grid: Grid, gpu: GpuSpec | None) -> Column:
    """Context and communicators, expected. [bytes]"""
    gpus = int(grid.dp_replicate[0] * grid.dp_shard[0])

    def taken(replicas: int) -> int:
        return int(total_band(outside(MeshSpec(dp_replicate=replicas, dp_shard=gpus // replicas), gpu)).expected_bytes)

    return _column(for_each_value(taken, grid.dp_replicate), grid)


def _column(value: Int, grid: Grid) -> Column:
    return np.broadcast_to(np.asarray(value, dtype=np.int64), (grid.layouts,))


def _times(value: object, grid: Grid) -> NDArray[np.float64]:
    return np.broadcast_to(np.asarray(value, dtype=np.float64), (grid.layouts,))
