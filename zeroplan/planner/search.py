"""Memory and step time of every layout: one pass of the same formulas per structure, over columns."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zeroplan.engines.account import Account
from zeroplan.engines.device import communicators, outside_beside, reserved_as_seen, total_band, workspace_lines
from zeroplan.engines.precisions import widths
from zeroplan.engines.reserved_shares import shares_of
from zeroplan.errors import SpecError
from zeroplan.estimator import Needed, engine_module, flattened_through_the_host, flattens_on_the_gpu
from zeroplan.ledger import Band, Phase, total_bytes
from zeroplan.memo import remembering
from zeroplan.numeric import Int, for_each_value
from zeroplan.planner.columns import highest
from zeroplan.planner.degrees import degrees_of, scheduled
from zeroplan.planner.fused import Told, lists_of, of_fused, of_lists
from zeroplan.planner.rules import Rule, Tally
from zeroplan.planner.space import WHOLE, Column, Degrees, Fixed, Grid, numbers, room_of, structures
from zeroplan.spec.hardware import GpuSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.recipe import RecipeSpec, ways_of_resharding
from zeroplan.spec.split import shards_of_experts_are_even, widths_of_experts
from zeroplan.steptime import StepTime, step_time
from zeroplan.timeline import expected_bytes, own_pools
from zeroplan.transformer.params import parameter_count
from zeroplan.weights import Highest

if TYPE_CHECKING:
    from zeroplan.engines.pipeline.weighed import Weigher


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
        return self.least_bytes <= room_of(base)


class Searched(NamedTuple):
    """Everything that was evaluated, and what fell before."""

    found: tuple[Found, ...]
    tally: Tally


#: What of a recipe, or of a way to split the model, the file that is asked for cannot say; empty where it can.
Unsaid = Callable[[RecipeSpec, Degrees], str]


def search(base: JobSpec, fixed: Fixed, *, mfu: float | None = None, unsaid: Unsaid | None = None) -> Searched:
    """Evaluate every layout that some engine starts. ``base`` has the model, the GPUs and the sequence length.

    Offload, which costs time, is looked at where nothing fits without it, or where it is asked for.
    """
    with remembering(), _nothing_collected():
        return _search(base, fixed, mfu, unsaid)


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Look for no garbage meanwhile: nearly all that a search makes is remembered until it ends."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _search(base: JobSpec, fixed: Fixed, mfu: float | None, unsaid: Unsaid | None) -> Searched:
    tally = Tally()
    space = _Space(base, fixed, tally, mfu, unsaid, {})
    found = list(_searched(space, offload=False))
    if not any(bool(one.fits(base).any()) for one in found):
        found += _searched(space, offload=True)
    if not found and any(one.rule is Rule.WEIGHTS for one in tally.fallen):  # how far off is the closest?
        tally = Tally()
        found += _searched(space._replace(tally=tally, whatever_weighs=True), offload=False)
    return Searched(tuple(found), tally)


def _programs(base: JobSpec, grid: Grid) -> Iterator[Grid]:
    """The parts of a grid that are one program: a profile tells one sequence from several."""
    if base.model.profile is None:
        if grid.layouts:
            yield grid
        return
    one = np.broadcast_to(np.asarray(grid.micro_batch_size) == 1, grid.shape)
    for kept in (one, ~one):
        if kept.any():
            yield grid.with_batches(kept)


#: What structures have told of others: by recipe, and by how the model is split.
Known = dict[tuple[RecipeSpec, Degrees], Told]


class _Space(NamedTuple):
    """What is searched, how, and who counts what falls."""

    base: JobSpec
    fixed: Fixed
    tally: Tally
    mfu: float | None
    unsaid: Unsaid | None
    known: Known
    whatever_weighs: bool = False


def _searched(space: _Space, *, offload: bool) -> Iterator[Found]:
    base, fixed = space.base, space.fixed
    for structure in structures(base, fixed, offload=offload):
        for split in degrees_of(structure, base, fixed):
            missing = "" if space.unsaid is None else space.unsaid(structure, split)
            if missing:
                space.tally.cut(Rule.EMITTED, numbers(structure, base, fixed, split).grid.layouts, missing)
                continue
            for recipe in scheduled(structure, split, fixed):
                yield from _of_structure(space, recipe, split)


def _of_structure(space: _Space, recipe: RecipeSpec, split: Degrees) -> Iterator[Found]:
    base, fixed, tally = space.base, space.fixed, space.tally
    grid, indivisible = numbers(recipe, base, fixed, split)
    tally.cut(Rule.DIVISIBILITY, indivisible)
    fitting = _resharded(recipe, grid)
    tally.cut(Rule.RESHARDING, grid.layouts - grid.only(fitting).layouts)
    grid = grid.only(fitting)
    if split.ep > 1 and base.model.moe is not None and recipe.engine == "fsdp2":
        sharing, widths_along = grid.dp_shard * (grid.cp * grid.tp), widths_of_experts(base.model)
        even = np.asarray(shards_of_experts_are_even(base.model.moe.num_experts, widths_along, sharing, grid.ep))
        tally.cut(Rule.EXPERTS, grid.layouts - grid.only(even).layouts)
        grid = grid.only(even)
    if split.pp > 1:
        grid = _filling(grid, recipe, fixed, tally)
    if not space.whatever_weighs and weights_alone_are_too_large(base, recipe, split):
        tally.cut(Rule.WEIGHTS, grid.layouts)
    elif grid.layouts:
        try:
            ranks = _pipelines(base, recipe, grid) if split.pp > 1 and recipe.engine != "megatron" else None
            if ranks is not None and fixed.pp is None:
                grid = _with_room(base, recipe, grid, tally, ranks)
            for part in _programs(base, grid):
                known = space.known if base.model.profile is None else {}
                yield evaluated(base, recipe, part, mfu=space.mfu, known=known, ranks=ranks)
        except SpecError as refusal:
            tally.cut(Rule.ENGINE, grid.layouts, str(refusal))


def _filling(grid: Grid, recipe: RecipeSpec, fixed: Fixed, tally: Tally) -> Grid:
    """The batches with which a pipeline runs; interleaved unasked only where one stage on each rank would wait for long."""
    filling = grid.with_batches(grid.grad_accum_steps % grid.pp == 0)
    tally.cut(Rule.PIPELINE, grid.layouts - filling.layouts)
    if recipe.pipeline_schedule is None or fixed.pipeline_schedule is not None:
        return filling
    waiting = filling.with_batches(filling.grad_accum_steps < FULL_ENOUGH * filling.pp)
    tally.cut(Rule.BUBBLE, filling.layouts - waiting.layouts)
    return waiting


#: With so many micro-batches per rank a pipeline waits for a sixteenth of its step.
FULL_ENOUGH = 16


def _pipelines(base: JobSpec, recipe: RecipeSpec, grid: Grid) -> "Weigher":
    """The ranks of a pipeline, each weighed once: what is weighed first is asked about again."""
    from zeroplan.engines.pipeline.weighed import Weigher  # noqa: PLC0415  only pipelines need it

    job = job_at(base, recipe, grid, 0)  # is asked what a single job is asked
    return Weigher(job.model, job.recipe, job.mesh, own_pools(recipe))


def _with_room(base: JobSpec, recipe: RecipeSpec, grid: Grid, tally: Tally, ranks: "Weigher") -> Grid:
    """The batches with which the first and the last rank of a pipeline fit the GPU; the others need no closer look.

    As many micro-batches are in flight with each of them, so that what does not fit with some sequences at once does not with more.
    """
    gpu = base.cluster.gpu
    beside = _workspaces(base, recipe)
    room = 0 if gpu is None else int(gpu.memory_bytes.value - beside - outside_column(grid, gpu).min())
    fits = np.ones((1, grid.layouts), dtype=np.bool_)
    for at in np.argsort(grid.row(grid.micro_batch_size), kind="stable").tolist():
        batch = grid.numbers_at(at)
        if any(ranks.rank(rank, batch).exceeds(room) for rank in (0, grid.pp - 1)):
            fits[0] = grid.row(grid.micro_batch_size) < batch.micro_batch_size
            break
    tally.cut(Rule.MEMORY, int((~fits).sum()))
    return grid.with_batches(fits)


def weights_alone_are_too_large(base: JobSpec, recipe: RecipeSpec, split: Degrees = WHOLE) -> bool:
    """Whether a rank's part of the weights, which every stage below 3 gathers or holds, is more than the GPU has."""
    gpu = base.cluster.gpu
    if base.model.is_quantised:
        return False
    whole = widths(recipe.precision).compute * parameter_count(base.model) // (split.tp * split.pp * split.ep)
    return gpu is not None and recipe.zero_stage < 3 and whole > gpu.memory_bytes.value


def _resharded(recipe: RecipeSpec, grid: Grid) -> NDArray[np.bool_]:
    """Whether ``reshard_after_forward`` as a number makes sense: a true factor of the ranks that shard."""
    ways = ways_of_resharding(recipe.fsdp2)
    if recipe.engine != "fsdp2" or ways is None:
        return np.ones_like(grid.dp_shard, dtype=np.bool_)
    return np.asarray((grid.dp_shard % ways == 0) & (grid.dp_shard > ways), dtype=np.bool_)


def evaluated(
    base: JobSpec, recipe: RecipeSpec, grid: Grid, *,
    mfu: float | None = None, known: Known | None = None, ranks: "Weigher | None" = None,
) -> Found:  # fmt: skip
    """Figures of all layouts of one structure; raises SpecError where the engine does not take it.

    ``known`` is what structures with the same grid have told of others, and takes up what this one tells; ``ranks`` has
    pipeline ranks that were weighed before.
    """
    if grid.pp > 1 and recipe.engine != "megatron":
        return _one_by_one(base, recipe, grid, mfu=mfu, ranks=ranks or _pipelines(base, recipe, grid))
    job_at(base, recipe, grid, 0)  # is asked what a single job is asked
    card = outside_column(grid, base.cluster.gpu)
    if grid.pp > 1:
        needs, time = _of_megatron(base, recipe, grid, mfu)
    else:
        found, time = _told(base, recipe, grid, card, mfu, {} if known is None else known)
        needs = _needed(found, recipe, base)
    least = grid.row(needs.least_bytes + card)
    # Where nothing fits, nobody asks how comfortably.
    comfortable = grid.row(needs.comfortable_bytes + card) if least.min() <= room_of(base) else least
    return Found(recipe, grid, least, comfortable, grid.times(time.seconds))


def _told(
    base: JobSpec, recipe: RecipeSpec, grid: Grid, card: Column, mfu: float | None, known: Known
) -> tuple[Highest, StepTime]:  # fmt: skip
    """Highest moments and time; of a fused Adam from what the one in lists has told."""
    split, lists = grid.degrees, lists_of(recipe)
    before = None if lists is None else known.pop((lists, split), None)
    if before is not None:
        return of_fused(before, base.model, recipe, base.cluster)
    account = _account(base, recipe, grid, card)
    time = step_time(account, base.model, recipe, grid, grid, base.cluster, mfu=mfu)
    if recipe.optimizer_impl != "foreach" or lists_of(replace(recipe, optimizer_impl="fused")) is None:
        return highest(account.moments, recipe), time
    found, known[recipe, split] = of_lists(account, time, recipe)
    return found, time


def _of_megatron(base: JobSpec, recipe: RecipeSpec, grid: Grid, mfu: float | None) -> tuple[Needed, StepTime]:
    """Of a pipeline in closed form what its fullest rank needs (the first, the second or the last), and its time."""
    from zeroplan.engines.megatron import account_of_rank  # noqa: PLC0415  only this engine needs it

    ranks = [account_of_rank(at, base.model, recipe, grid, grid) for at in sorted({0, 1, grid.pp - 1})]
    needs = [_needed(highest(one.moments, recipe), recipe, base) for one in ranks]
    least = np.array([grid.row(need.least_bytes) for need in needs])
    comfortable = np.array([grid.row(need.comfortable_bytes) for need in needs])
    fullest = least.argmax(axis=0)[None, :]
    shaped = (np.take_along_axis(each, fullest, axis=0).reshape(grid.shape) for each in (least, comfortable))
    return Needed(*shaped), step_time(ranks[0], base.model, recipe, grid, grid, base.cluster, mfu=mfu)


def _workspaces(base: JobSpec, recipe: RecipeSpec) -> Int:
    return total_bytes(workspace_lines(recipe, base.cluster.gpu, experts=base.model.has_experts))


def _needed(found: Highest, recipe: RecipeSpec, base: JobSpec) -> Needed:
    """What tensors and workspaces take, and what the allocator is expected to reserve for them. [bytes]"""
    gpu, workspaces = base.cluster.gpu, _workspaces(base, recipe)
    peak = found.peak_bytes + workspaces
    held = expected_bytes(peak, found.streams_bytes + workspaces, shares_of(recipe, "default"))
    return Needed(peak, reserved_as_seen(Band(peak, held, held), recipe.engine, gpu).expected_bytes)


def _one_by_one(base: JobSpec, recipe: RecipeSpec, grid: Grid, *, mfu: float | None, ranks: "Weigher") -> Found:
    """The same, layout by layout: of a pipeline the order of a schedule depends on its numbers."""
    from zeroplan.engines.pipeline import ranks_in_question  # noqa: PLC0415  only pipelines need it
    from zeroplan.engines.pipeline.weighed import fullest  # noqa: PLC0415  as above

    least, comfortable, seconds = np.zeros(grid.layouts, np.int64), np.zeros(grid.layouts, np.int64), np.zeros(grid.layouts)
    card = outside_column(grid, base.cluster.gpu)[0, 0]
    for at in range(grid.layouts):
        batch = grid.numbers_at(at)
        rank = fullest(ranks.rank(rank, batch) for rank in ranks_in_question(recipe, grid.pp))
        needs = _needed(rank.highest, recipe, base)
        least[at], comfortable[at] = needs.least_bytes + card, needs.comfortable_bytes + card
        time = step_time(rank.account_of_time(), base.model, recipe, ranks.mesh, batch, base.cluster, mfu=mfu)
        seconds[at] = float(time.seconds)
    return Found(recipe, grid, least, comfortable, seconds)


def job_at(base: JobSpec, recipe: RecipeSpec, grid: Grid, at: int) -> JobSpec:
    """One layout as a job."""
    return replace(base, recipe=recipe, mesh=grid.mesh_at(at), batch=grid.batch_at(at, base.batch))


def _account(base: JobSpec, recipe: RecipeSpec, grid: Grid, card: Column) -> Account:
    """The engine's account; DeepSpeed's construction goes through host memory where the GPU has no room, as for a single job."""
    engine, gpu = engine_module(recipe.engine), base.cluster.gpu
    account = engine.account(base.model, recipe, grid, grid)
    if gpu is None or not flattens_on_the_gpu(recipe):
        return account
    built = (moment.total_bytes + card for moment in account.moments if moment.phase is Phase.INIT)
    if all(int(sizes.max()) <= gpu.memory_bytes.value for sizes in built):
        return account
    return engine.account(base.model, flattened_through_the_host(recipe), grid, grid)


def outside_column(grid: Grid, gpu: GpuSpec | None) -> Column:
    """Context and communicators, expected. [bytes]"""
    name = "" if gpu is None else gpu.name

    def taken(groups: int) -> int:
        return int(total_band(outside_beside(groups, name)).expected_bytes)

    return np.asarray(for_each_value(taken, communicators(grid)))
