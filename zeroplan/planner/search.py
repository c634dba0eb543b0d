"""Computes memory and step time of every layout. The formulas run once per structure, over columns of numbers."""

import gc
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zeroplan.engines.account import Account
from zeroplan.engines.device import communicators, outside_beside, reserved_as_seen, total_band, workspace_lines
from zeroplan.engines.passes import passes
from zeroplan.engines.precisions import widths
from zeroplan.engines.reserved_shares import shares_of, with_missed
from zeroplan.errors import SpecError
from zeroplan.estimator import Needed, counted_model, engine_module, flattened_through_the_host, flattens_on_the_gpu
from zeroplan.ledger import Band, Moment, Phase, total_bytes
from zeroplan.memo import recalled, remembering
from zeroplan.numeric import Int, for_each_value, weighted
from zeroplan.planner.bounds import NEARLY, Bounds
from zeroplan.planner.degrees import degrees_of, scheduled
from zeroplan.planner.rules import Rule, Tally
from zeroplan.planner.space import WHOLE, Column, Degrees, Fixed, Grid, easy_room_of, numbers, room_of, structures
from zeroplan.progress import counted
from zeroplan.spec.batch import Numbers
from zeroplan.spec.described import JobParts
from zeroplan.spec.hardware import GpuSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.padding import is_modelled_padded
from zeroplan.spec.recipe import ADAM, RecipeSpec, ways_of_resharding
from zeroplan.spec.split import may_split, shards_of_experts_are_even, widths_of_experts
from zeroplan.steptime import step_time
from zeroplan.timeline import expected_bytes, own_pools
from zeroplan.trace import Moments, entry_of, highest_of
from zeroplan.transformer.params import parameter_count, trained_count
from zeroplan.weights import Highest

if TYPE_CHECKING:
    from zeroplan.engines.pipeline.weighed import WeighedRank, Weigher


class Found(NamedTuple):
    """One structure with the figures of all its layouts."""

    recipe: RecipeSpec
    grid: Grid
    least_bytes: Column
    """The minimum that must fit: allocated peak plus memory outside the allocator."""
    comfortable_bytes: Column
    """Expected reserved memory plus memory outside the allocator."""
    seconds: NDArray[np.float64]

    def fits(self, base: JobSpec) -> bool:
        """Whether some layout fits the GPU, at least tightly."""
        return bool((self.least_bytes <= room_of(base)).any())

    def quickest(self, base: JobSpec, fixed: Fixed) -> float:
        """Return the rate of the fastest layout that fits easily; 0 if none does. [tokens/s of a GPU]"""
        easy = self.comfortable_bytes <= easy_room_of(base, fixed)
        return float((self.grid.tokens / self.seconds)[easy].max(initial=0.0))


#: Structures that were not evaluated because their blocks keep too many activations, and a lower bound of their memory. [bytes]
Far = dict[tuple[RecipeSpec, tuple[object, ...]], Column]


class Searched(NamedTuple):
    """All evaluated structures, and the rejected layouts."""

    found: tuple[Found, ...]
    tally: Tally
    far: Far


#: Returns the setting or degrees that the requested file format cannot express, in words; empty if it can express all.
Inexpressible = Callable[[RecipeSpec, Degrees], str]


def search(
    base: JobSpec,
    fixed: Fixed,
    *,
    mfu: float | None = None,
    inexpressible: Inexpressible | None = None,
    slow_too: bool = True,
    offload_too: bool = False,
    far_too: bool = True,
) -> Searched:
    """Return the figures of every layout that some engine can start. ``base`` has the model, the GPUs and the sequence length.

    If nothing fits with the margin, the search also tries unusual degrees and smaller buckets. Offload costs time, so the search
    tries it only if nothing fits without it, on request (``offload_too``), or if GPUs are joined only by PCIe. ``slow_too``: also
    pipelines that cannot be nearly as fast as a layout that fits. ``far_too``: also layouts that need over twice the GPU's memory
    (:func:`_is_far`), which are always evaluated if nothing fits.
    """
    bounds = None if slow_too else Bounds(base, fixed, mfu)
    space = _Space(base, fixed, Tally(), mfu, inexpressible, {}, {}, bounds=bounds, far_too=far_too)
    with remembering(), without_garbage_collection():
        answer = _search(space, offload_too=offload_too)
        if far_too or any(one.fits(base) for one in answer.found):
            return answer
        return _search(space._replace(tally=Tally(), far={}, far_too=True), offload_too=offload_too)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Turn garbage collection off: a plan keeps nearly all its objects until its end."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def faster_than(
    rate: float, base: JobSpec, fixed: Fixed, *, mfu: float | None = None, inexpressible: Inexpressible | None = None
) -> tuple[Found, ...]:
    """Return layouts without offload, including all that fit easily and exceed this rate. [tokens/s of a GPU]"""
    bounds = Bounds(base, fixed, mfu)
    space = _Space(base, fixed, Tally(), mfu, inexpressible, {}, {}, bounds=bounds, quickest=NEARLY * rate)
    with remembering(), without_garbage_collection():
        return tuple(_searched(space, offload=False))


def _search(space: "_Space", *, offload_too: bool) -> Searched:
    base, fixed, tally = space.base, space.fixed, space.tally
    found = list(_searched(space, offload=False))
    if not any(one.quickest(base, fixed) for one in found):
        tally = Tally()  # the wider search counts the layouts of the first again
        found = list(_searched(space._replace(tally=tally, wide=True), offload=False))
    offload_too = offload_too or (space.bounds is not None and _joined_by_pcie(base))
    if offload_too or not any(one.fits(base) for one in found):
        found += _searched(space._replace(tally=tally), offload=True)
    found += _with_whole_sequences(space, found)
    if not found and any(one.rule is Rule.WEIGHTS for one in tally.fallen):  # to report the closest layouts
        tally = Tally()
        found += _searched(space._replace(tally=tally, wide=True, whatever_weighs=True), offload=False)
    return Searched(tuple(found), tally, space.far)


def _with_whole_sequences(space: "_Space", found: Sequence[Found]) -> list[Found]:
    """Return Megatron's nearly fastest structures once more, without sequence parallelism.

    That needs more memory and fewer collectives: the backward gathers nothing again. Models with experts refuse it.
    """
    quickest, made = max((one.quickest(space.base, space.fixed) for one in found), default=0.0), list[Found]()
    for one in found:
        if one.recipe.sequence_parallel and NEARLY * one.quickest(space.base, space.fixed) >= quickest > 0:
            whole = replace(one.recipe, sequence_parallel=False)
            with suppress(SpecError):
                made.append(evaluated(space.base, whole, one.grid, mfu=space.mfu, reach=True))
    return [one for one in made if one.grid.layouts]


def _joined_by_pcie(base: JobSpec) -> bool:
    """Whether GPUs are joined only by PCIe. Then offload, which uses the same links, may be faster than sharding."""
    gpu = base.cluster.gpu
    return gpu is not None and gpu.node_link.startswith("PCIe") and base.mesh.world_size > 1


def _programs(base: JobSpec, fixed: Fixed, recipe: RecipeSpec, grid: Grid) -> Iterator[tuple[RecipeSpec, Grid]]:
    """Yield the parts of a grid that one formula covers, with their recipe.

    Profiles distinguish one sequence from several. A trainer pads several sequences to one length and never one.
    """
    padded = padded_by_trainer(base, fixed, recipe, grid)
    if base.model.profile is None and padded == recipe:
        yield recipe, grid
        return
    one = np.broadcast_to(np.asarray(grid.micro_batch_size) == 1, grid.shape)
    for kept, its_recipe in ((one, recipe), (~one, padded)):
        if kept.any():
            yield its_recipe, grid.with_batches(kept)


def padded_by_trainer(base: JobSpec, fixed: Fixed, recipe: RecipeSpec, grid: Grid) -> RecipeSpec:
    """Return the recipe for several sequences, which the trainer may pad; the same recipe if padding is not modelled for it."""
    pads = fixed.pads and is_modelled_padded(base.model, recipe, grid.mesh_at(0))
    return replace(recipe, padded=True) if pads else recipe


class _Runnable(NamedTuple):
    """Layouts that divide evenly, and the numbers of those that do not, by rule."""

    grid: Grid
    cuts: tuple[tuple[Rule, int], ...]


class _Space(NamedTuple):
    """A search: its job, the fixed settings, and the counts of rejected layouts."""

    base: JobSpec
    fixed: Fixed
    tally: Tally
    mfu: float | None
    inexpressible: Inexpressible | None
    known: dict[Hashable, _Runnable]
    """Runnable layouts by what they depend on. Most recipes share them."""
    far: Far
    wide: bool = False
    """Whether to try unusual degrees and smaller buckets too."""
    whatever_weighs: bool = False
    quickest: float = 0.0
    """The rate of the fastest layout that is known to fit. [tokens/s of a GPU]"""
    bounds: Bounds | None = None
    """Upper bounds of pipelines' rates; None to evaluate slow pipelines too."""
    far_too: bool = True
    """Whether to evaluate layouts that are known to need over twice the GPU's memory."""

    def runnable(self, recipe: RecipeSpec, split: Degrees) -> _Runnable:
        """Return the layouts of a recipe that divide evenly."""
        schedule = split.pp > 1 and recipe.pipeline_schedule
        key = split, recipe.engine, ways_of_resharding(recipe.fsdp2), schedule
        known = self.known.get(key)
        if known is None:
            known = self.known[key] = _runnable(self.base, recipe, self.fixed, split)
        return known


def _searched(space: _Space, *, offload: bool) -> Iterator[Found]:
    base, fixed = space.base, space.fixed
    quickest, smallest = space.quickest, sys.maxsize
    every = (
        (structure, split)
        for structure in structures(base, fixed, offload=offload, wide=space.wide)
        for split in degrees_of(structure, base, fixed, wide=space.wide)
    )
    for structure, split in counted(sorted(every, key=partial(_turn, space))):
        missing = "" if space.inexpressible is None else space.inexpressible(structure, split)
        if missing:
            space.tally.cut(Rule.EMITTED, numbers(structure, base, fixed, split).grid.layouts, missing)
            continue
        for recipe in scheduled(structure, split, fixed, base.model.num_hidden_layers):
            for found in _evaluate_structure(space, recipe, split, quickest, smallest):
                quickest = max(quickest, found.quickest(base, fixed))
                if recipe.engine == "megatron" and split.cp == 1:
                    smallest = min(smallest, int(found.least_bytes.min()))
                yield found


def _turn(space: _Space, one: tuple[RecipeSpec, Degrees]) -> tuple[bool, int]:
    """Sort key: layouts that are evaluated one by one come last, when the rate to beat is known.

    Of Megatron's layouts that all need too much memory, those that split the model most come first: one of them needs least.
    """
    recipe, split = one
    far = recipe.engine == "megatron" and _is_far(space, recipe)
    return recipe.engine != "megatron" and split.pp > 1, -split.tp * split.ep if far else 0


def _is_far(space: _Space, recipe: RecipeSpec) -> bool:
    """Whether all layouts of a recipe need over twice the memory, so that an answer names only those that need least."""
    room = room_of(space.base) if recipe.engine == "megatron" else easy_room_of(space.base, space.fixed)
    return not space.far_too and _share_of_states(space, recipe) > 2 * room


def _share_of_states(space: _Space, recipe: RecipeSpec) -> int:
    """Return a lower bound of some rank's states: its share of all weights, gradients and Adam's states. [bytes]

    The optimizer's step needs all of them, however they are split. Megatron has 16-bit weights and fp32 gradients beside the
    optimizer's twelve bytes. With offload, and with options that keep less, the bound is 0.
    """
    base, width = space.base, widths(recipe.precision)
    narrow = base.model.is_quantised or recipe.fsdp2.step_in_backward or recipe.optimizer not in ADAM
    if recipe.offloads or narrow or (recipe.engine == "megatron" and not (space.fixed.megatron is None and width.mixed)):
        return 0
    each = 18 if recipe.engine == "megatron" else 4 * width.stored
    return each * trained_count(base.model) // base.mesh.world_size


def _keeps_too_much(space: _Space, recipe: RecipeSpec, grid: Grid) -> bool:
    """Whether states and the blocks' activations need over twice the memory under DeepSpeed's stage 3.

    DeepSpeed holds its states at all times. Its evaluation takes longest.
    """
    base = space.base
    if space.far_too or recipe.recompute != "none" or (recipe.engine, recipe.zero_stage) != ("deepspeed", 3):
        return False
    job_at(base, recipe, grid, 0)  # raises SpecError as for a single job
    kinds = passes(counted_model(base.model, recipe), recipe, grid).kinds
    kept = grid.row(weighted([len(one.blocks) for one in kinds], [one.kept_bytes for one in kinds]))
    least = kept + _share_of_states(space, recipe)
    if least.min() <= 2 * easy_room_of(base, space.fixed):
        return False
    space.far[recipe, grid.key] = least
    return True


def _ruled_out(space: _Space, recipe: RecipeSpec, grid: Grid, smallest: int) -> Rule | None:
    """Return the rule that rejects a whole structure before any of it is evaluated."""
    base = space.base
    if not space.whatever_weighs and weights_alone_are_too_large(base, recipe, grid.degrees):
        return Rule.WEIGHTS
    if _is_far(space, recipe) and not _may_need_least(base, recipe, grid, smallest):
        return Rule.MEMORY
    if grid.pp > 1 and recipe.engine == "fsdp2" and space.fixed.pp is None and _share_of_states(space, recipe) > room_of(base):
        return Rule.MEMORY  # as in _with_room, before anything is made
    engine_refuses = space.tally.has(Rule.ENGINE) and not may_split(base.model, recipe.engine, grid)
    return Rule.ENGINE if engine_refuses else None  # the message of the first refusal is known


def _may_need_least(base: JobSpec, recipe: RecipeSpec, grid: Grid, smallest: int) -> bool:
    """Whether a layout may need least of those that an answer names even if they do not fit. ``smallest``: Megatron's so far."""
    if recipe.engine != "megatron":
        return recipe.engine == "fsdp2" and grid.degrees == WHOLE
    if grid.pp > 1 or grid.cp > 1:
        return False
    from zeroplan.engines.megatron import states_of_rank  # noqa: PLC0415  only this engine needs it

    return bool(np.min(total_bytes(states_of_rank(0, JobParts(base.model, recipe, grid, grid)))) <= smallest)


def _evaluate_structure(
    space: _Space, recipe: RecipeSpec, split: Degrees, quickest: float, smallest: int
) -> Iterator[Found]:  # fmt: skip
    base, fixed, tally = space.base, space.fixed, space.tally
    grid, cuts = space.runnable(recipe, split)
    for rule, layouts in cuts:
        tally.cut(rule, layouts)
    if space.bounds is not None and quickest and grid.layouts and (split.pp > 1 or space.quickest):
        grid = _near(space.bounds, space, recipe, grid, quickest)
    ruled_out = _ruled_out(space, recipe, grid, smallest)
    if ruled_out is not None:
        tally.cut(ruled_out, grid.layouts)
    elif grid.layouts:
        try:
            ranks = _pipelines(base, recipe, grid) if split.pp > 1 and recipe.engine != "megatron" else None
            if ranks is not None and fixed.pp is None:
                grid = _with_room(base, recipe, grid, tally, ranks)
            for program, part in _programs(base, fixed, recipe, grid) if grid.layouts else ():
                if _keeps_too_much(space, program, part):
                    tally.cut(Rule.MEMORY, part.layouts)
                    continue
                one = _once(space, program, part, ranks)
                tally.cut(Rule.MEMORY, part.layouts - one.grid.layouts)
                if one.grid.layouts:
                    yield one
        except SpecError as refusal:
            tally.cut(Rule.ENGINE, grid.layouts, str(refusal))


def _once(space: _Space, recipe: RecipeSpec, grid: Grid, ranks: "Weigher | None") -> Found:
    """Return a structure's figures. A wide search meets those of the narrow one again."""
    reach = not space.whatever_weighs
    return recalled(
        lambda: (evaluated, space.base, recipe, grid.key, space.mfu, reach),
        lambda: evaluated(space.base, recipe, grid, mfu=space.mfu, ranks=ranks, reach=reach),
    )


def _near(bounds: Bounds, space: _Space, recipe: RecipeSpec, grid: Grid, quickest: float) -> Grid:
    """Return the batches that may be nearly as fast as this rate, in any arrangement of the GPUs. [tokens/s of a GPU]"""
    first = grid.only(np.arange(grid.shape[0])[:, None] == 0)  # the computation is the same in every arrangement
    kept = grid.with_batches(bounds.is_near(recipe, first, quickest, partly=not space.quickest)[None, :])
    space.tally.cut(Rule.SLOW, grid.layouts - kept.layouts)
    return kept


def _runnable(base: JobSpec, recipe: RecipeSpec, fixed: Fixed, split: Degrees) -> "_Runnable":
    """Return the layouts that divide evenly and fill a pipeline, and how many others each rule rejects."""
    tally = Tally()
    grid, indivisible = numbers(recipe, base, fixed, split)
    tally.cut(Rule.DIVISIBILITY, indivisible)
    if recipe.engine == "fsdp2":
        grid = _sharded_evenly(base, recipe, grid, tally)
    if split.pp > 1:
        grid = _runnable_batches(grid, recipe, fixed, tally)
    return _Runnable(grid, tuple((one.rule, one.layouts) for one in tally.fallen))


def _runnable_batches(grid: Grid, recipe: RecipeSpec, fixed: Fixed, tally: Tally) -> Grid:
    """Return the batches that a pipeline can run; unrequested interleaving only if one stage per rank would idle long."""
    steps = grid.grad_accum_steps
    if recipe.pipeline_schedule not in (None, "1f1b"):
        filling = grid.with_batches(steps % grid.pp == 0)
    else:  # Megatron's 1F1B also runs fewer micro-batches than ranks
        filling = grid if recipe.engine == "megatron" else grid.with_batches(steps >= grid.pp)
    tally.cut(Rule.PIPELINE, grid.layouts - filling.layouts)
    if recipe.pipeline_schedule is None or fixed.pipeline_schedule is not None:
        return filling
    waiting = filling.with_batches(filling.grad_accum_steps < FULL_ENOUGH * filling.pp)
    tally.cut(Rule.BUBBLE, filling.layouts - waiting.layouts)
    return waiting


#: Micro-batches per rank with which a pipeline idles for a sixteenth of its step.
FULL_ENOUGH = 16


def _pipelines(base: JobSpec, recipe: RecipeSpec, grid: Grid) -> "Weigher":
    """Return an object that computes the memory of a pipeline's ranks."""
    from zeroplan.engines.pipeline.weighed import Weigher  # noqa: PLC0415  keeps start-up fast

    job = job_at(base, recipe, grid, 0)  # raises SpecError as for a single job
    return Weigher(job.model, job.recipe, job.mesh, own_pools(recipe))


def _with_room(base: JobSpec, recipe: RecipeSpec, grid: Grid, tally: Tally, ranks: "Weigher") -> Grid:
    """Return the batches with which the first and the last rank of a pipeline fit the GPU.

    The number of micro-batches in flight does not depend on their size, so if some size does not fit, larger ones do not either.
    """
    gpu = base.cluster.gpu
    beside = _workspaces(base, recipe)
    room = 0 if gpu is None else int(gpu.memory_bytes.value - beside - outside_column(grid, gpu).min())
    fits, ends = np.ones((1, grid.layouts), dtype=np.bool_), (0, grid.pp - 1)
    none = any(ranks.least_bytes(number) > room for number in ends)
    for at in np.argsort(grid.row(grid.micro_batch_size), kind="stable").tolist():
        batch = grid.numbers_at(at)
        if none or _exceeds(ranks, ends, batch, room):
            fits[0] = grid.row(grid.micro_batch_size) < batch.micro_batch_size
            break
    tally.cut(Rule.MEMORY, int((~fits).sum()))
    return grid.with_batches(fits)


def _exceeds(ranks: "Weigher", numbers: Iterable[int], batch: Numbers, room: int) -> bool:
    """Whether some of a pipeline's ranks needs more than ``room``. The bytes that wait on a rank often decide this. [bytes]"""
    seen = list["WeighedRank"]()
    for number in numbers:
        rank = ranks.rank(number, batch)
        if rank.waits_for_more(room):
            return True
        seen.append(rank)
    return any(rank.exceeds(room) for rank in seen)


def weights_alone_are_too_large(base: JobSpec, recipe: RecipeSpec, split: Degrees = WHOLE) -> bool:
    """Whether a rank's unsharded weights, which every stage below 3 holds, exceed the GPU's memory.

    Megatron also holds unsharded main gradients. DDP and stage 0 hold gradients whole, too: those that need over twice
    the GPU's memory are left out, like Megatron's pipelines (``reach``). At stage 3 only a second partition (hpZ) counts, which
    the ranks of a group share.
    """
    gpu = base.cluster.gpu
    if base.model.is_quantised:
        return False
    width = widths(recipe.precision).compute
    if recipe.engine == "megatron":
        options = recipe.megatron
        narrow = options.grad_reduce_in_bf16 or options.main_grads_dtype == "bf16" or not options.main_weights
        width += 2 if narrow else 4
    whole = width * parameter_count(base.model) // (split.tp * split.pp * split.ep)
    if gpu is None:
        return False
    if recipe.zero_stage == 3:
        ways = recipe.deepspeed.zero_hpz_partition_size if recipe.engine == "deepspeed" else 1
        return ways > 1 and whole // ways > gpu.memory_bytes.value
    keeps_all = (recipe.zero_stage == 0 or recipe.engine == "ddp") and not recipe.offloads
    stepped = (width + widths(recipe.precision).stored) * trained_count(base.model) if keeps_all else 0
    return whole > gpu.memory_bytes.value or stepped > 2 * gpu.memory_bytes.value


def _sharded_evenly(base: JobSpec, recipe: RecipeSpec, grid: Grid, tally: Tally) -> Grid:
    """Return FSDP2's arrangements in which ``reshard_after_forward`` as a number, and the shards of experts, come out even."""
    ways, moe, before = ways_of_resharding(recipe.fsdp2), base.model.moe, grid.layouts
    if ways is not None:
        grid = grid.only(np.asarray((grid.dp_shard % ways == 0) & (grid.dp_shard > ways), dtype=np.bool_))
        tally.cut(Rule.RESHARDING, before - grid.layouts)
    if moe is not None and grid.ep > 1:
        sharing, before = grid.dp_shard * (grid.cp * grid.tp), grid.layouts
        even = shards_of_experts_are_even(moe.num_experts, widths_of_experts(base.model), sharing, grid.ep)
        grid = grid.only(np.asarray(even, dtype=np.bool_))
        tally.cut(Rule.EXPERTS, before - grid.layouts)
    return grid


def evaluated(
    base: JobSpec,
    recipe: RecipeSpec,
    grid: Grid,
    *,
    mfu: float | None = None,
    ranks: "Weigher | None" = None,
    reach: bool = False,
    timed: bool = True,
) -> Found:
    """Return the figures of all layouts of one structure; raises SpecError if the engine refuses it.

    ``timed``: with step times. ``ranks``: computes pipeline ranks. ``reach``: without Megatron's pipelines that need over twice
    the GPU's memory, which no larger GPU would help.
    """
    if grid.pp > 1 and recipe.engine != "megatron":
        return _layout_by_layout(base, recipe, grid, mfu=mfu, ranks=ranks or _pipelines(base, recipe, grid))
    job_at(base, recipe, grid, 0)  # raises SpecError as for a single job
    card = outside_column(grid, base.cluster.gpu)
    if grid.pp > 1:
        return _megatron_pipeline(base, recipe, grid, mfu, reach=reach)
    account = _account(base, recipe, grid, card)
    time = step_time(account, base.model, recipe, grid, grid, base.cluster, mfu=mfu).seconds if timed else 0.0
    needs = _needed(highest(account.moments, recipe), recipe, base)
    least = grid.row(needs.least_bytes + card)
    # If nothing fits, the comfortable figure is not needed.
    comfortable = grid.row(needs.comfortable_bytes + card) if least.min() <= room_of(base) else least
    return Found(recipe, grid, least, comfortable, grid.times(time))


def _megatron_pipeline(base: JobSpec, recipe: RecipeSpec, grid: Grid, mfu: float | None, *, reach: bool) -> Found:
    """Return the figures of the fullest rank of Megatron's pipelines."""
    from zeroplan.engines.megatron import memory_of_rank, states_of_rank  # noqa: PLC0415  only this engine needs it
    from zeroplan.engines.megatron.chunks import ranks_in_question  # noqa: PLC0415  as above

    ranks, needs, card = list[Account](), list[Needed](), grid.row(outside_column(grid, base.cluster.gpu))
    most = 2 * room_of(base) - card
    job = JobParts(base.model, recipe, grid, grid)
    for at in ranks_in_question(job):
        if reach and (grid.row(total_bytes(states_of_rank(at, job))) > most).all():  # often, before any layer is counted
            return _none_of(recipe, grid)
        ranks.append(memory_of_rank(at, job))
        needs.append(_needed(highest(ranks[-1].moments, recipe), recipe, base))
        if reach and (grid.row(needs[-1].least_bytes) > most).all():
            return _none_of(recipe, grid)
    least = np.array([grid.row(need.least_bytes) for need in needs])
    comfortable = np.array([grid.row(need.comfortable_bytes) for need in needs])
    fullest = least.argmax(axis=0)[None, :]
    least, comfortable = (np.take_along_axis(each, fullest, axis=0)[0] + card for each in (least, comfortable))
    if reach:
        kept = least <= 2 * room_of(base)
        grid, least, comfortable = grid.with_batches(kept[None, :]), least[kept], comfortable[kept]
    if not grid.layouts:
        return Found(recipe, grid, least, comfortable, np.zeros(0))
    time = step_time(ranks[0], base.model, recipe, grid, grid, base.cluster, mfu=mfu)
    return Found(recipe, grid, least, comfortable, grid.times(time.seconds))


def _none_of(recipe: RecipeSpec, grid: Grid) -> Found:
    nothing: Column = np.zeros(0, np.int64)
    return Found(recipe, grid.with_batches(np.zeros((1, grid.layouts), np.bool_)), nothing, nothing, np.zeros(0))


def highest(moments: Iterable[Moment], recipe: RecipeSpec) -> Highest:
    """Return the peak, and the highest total of each pool of the allocator; ints or columns. [bytes]"""
    entries = moments.entries if isinstance(moments, Moments) else tuple(map(entry_of, moments))
    return highest_of(entries, own_pools(recipe))


def _workspaces(base: JobSpec, recipe: RecipeSpec) -> Int:
    return total_bytes(workspace_lines(recipe, base.cluster.gpu, experts=base.model.has_experts))


def _needed(found: Highest, recipe: RecipeSpec, base: JobSpec) -> Needed:
    """Return the memory of tensors and workspaces, and the expected reserved memory. [bytes]"""
    gpu, workspaces = base.cluster.gpu, _workspaces(base, recipe)
    peak = found.peak_bytes + workspaces
    held = expected_bytes(peak, found.streams_bytes + workspaces, shares_of(recipe, "default"))
    expected = reserved_as_seen(Band(peak, held, held), recipe.engine, gpu).expected_bytes
    return Needed(peak, with_missed(expected, peak, base.model, recipe))


def _layout_by_layout(base: JobSpec, recipe: RecipeSpec, grid: Grid, *, mfu: float | None, ranks: "Weigher") -> Found:
    """Return the figures layout by layout, since the order of a pipeline's schedule depends on the numbers."""
    from zeroplan.engines.pipeline import ranks_in_question  # noqa: PLC0415  keeps start-up fast
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
    """Return one layout as a job."""
    return replace(base, recipe=recipe, mesh=grid.mesh_at(at), batch=grid.batch_at(at, base.batch))


def _account(base: JobSpec, recipe: RecipeSpec, grid: Grid, card: Column) -> Account:
    """Return the engine's account; DeepSpeed flattens in host memory if the GPU lacks room, as for a single job."""
    if recipe.engine == "megatron":  # its step time counts the traffic itself
        from zeroplan.engines.megatron import memory_of_rank  # noqa: PLC0415  only this engine needs it

        return memory_of_rank(0, JobParts(counted_model(base.model, recipe), recipe, grid, grid))
    engine, gpu = engine_module(recipe.engine), base.cluster.gpu
    model = counted_model(base.model, recipe)
    account = engine.account(model, recipe, grid, grid)
    if gpu is None or not flattens_on_the_gpu(recipe):
        return account
    built = (moment.total_bytes + card for moment in account.moments if moment.phase is Phase.INIT)
    if all(int(sizes.max()) <= gpu.memory_bytes.value for sizes in built):
        return account
    return engine.account(model, flattened_through_the_host(recipe), grid, grid)


def outside_column(grid: Grid, gpu: GpuSpec | None) -> Column:
    """Return the expected size of context and communicators. [bytes]"""
    name = "" if gpu is None else gpu.name

    def taken(groups: int) -> int:
        return int(total_band(outside_beside(groups, name)).expected_bytes)

    return np.asarray(for_each_value(taken, communicators(grid)))
