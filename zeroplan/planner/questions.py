"""Finds the fewest GPUs, or the longest sequence, largest micro-batch or largest model with which some layout fits."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from zeroplan.errors import SpecError
from zeroplan.estimator import account_of_job
from zeroplan.ledger import Kind, bytes_by_kind
from zeroplan.memo import remembering
from zeroplan.planner.choose import layout_of, plan, ranked
from zeroplan.planner.degrees import degrees, degrees_of, with_split_sequences
from zeroplan.planner.objectives import TIE, Objective
from zeroplan.planner.result import Plan, Ranked
from zeroplan.planner.rules import NoLayoutError
from zeroplan.planner.search import Inexpressible, evaluated, faster_than, padded_by_trainer, weights_alone_are_too_large
from zeroplan.planner.space import (
    MOST_TOKENS,
    Column,
    Degrees,
    Fixed,
    easy_room_of,
    gpus_per_node,
    grid_of,
    is_cut_evenly,
    room_of,
    structures,
)
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.recipe import RecipeSpec, ways_of_resharding
from zeroplan.units import GIBIBYTES

#: The largest numbers of GPUs, sequences and tokens that are tried.
_MOST_GPUS, _MOST_SEQUENCES, _MOST_TOKENS = 4096, 4096, 1 << 20
#: Sequence lengths are multiples of this. [tokens]
SEQUENCE_STEP = 128


def fewest_gpus(
    base: JobSpec, fixed: Fixed, *, objective: Objective, mfu: float | None, inexpressible: Inexpressible | None = None
) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan on the fewest GPUs on which anything fits, and notes on the tried numbers, exceptions and offload.

    Unless requested, offload to host memory is used only if nothing fits without it.
    """

    def on_each(fixed: Fixed) -> Callable[[int], Plan | NoLayoutError]:
        return partial(_on, base=base, fixed=fixed, objective=objective, mfu=mfu, inexpressible=inexpressible)

    def fewest(fixed: Fixed, most: int = _MOST_GPUS) -> Plan:
        return _fewest_of(base, fixed, on_each(fixed), most, inexpressible)

    def noted(answer: Plan, fixed: Fixed) -> tuple[str, ...]:
        tried = f"numbers of GPUs that were tried: powers of two up to a node of {gpus_per_node(base)}, then whole nodes"
        return tried, *_exceptions(answer, base, fixed, on_each(fixed), inexpressible)

    without = _without_offload(base, fixed)
    alone = fewest(without)
    if without is not fixed and alone.best is None:
        alone = fewest(fixed)
        return alone, noted(alone, fixed)
    tried = noted(alone, without)
    if without is fixed or alone.base.mesh.world_size == 1:
        return alone, tried
    offloading = fewest(replace(fixed, offload_optimizer="cpu"), alone.base.mesh.world_size)
    fewer = offloading.base.mesh.world_size
    if offloading.best is None or fewer == alone.base.mesh.world_size:
        return alone, tried
    host = GIBIBYTES.size(offloading.best.estimate.host_bytes_per_node or 0)
    return alone, (
        *tried,
        f"with offload it fits on {fewer:,}, with {host} of host memory per node: `plan` with --offload-optimizer cpu finds it",
    )


def _without_offload(base: JobSpec, fixed: Fixed) -> Fixed:
    """Return the fixed settings with offload excluded, unless the user has decided about it; then the same object."""
    if {fixed.offload_optimizer, fixed.offload_param} != {None} or base.recipe.offloads:
        return fixed
    return replace(fixed, offload_optimizer="none", offload_param="none")


def in_room(base: JobSpec, fixed: Fixed, room: "Room") -> Fixed:
    """Return the fixed settings with offload as in this room, unless the user has decided about it."""
    without = _without_offload(base, fixed)
    if without is fixed:
        return fixed
    return replace(fixed, offload_optimizer="cpu") if room.offload else without


def _fewest_of(
    base: JobSpec, fixed: Fixed, on: Callable[[int], Plan | NoLayoutError], most: int, inexpressible: Inexpressible | None
) -> Plan:  # fmt: skip
    """Return the plan on the fewest GPUs, at most ``most``.

    It doubles the number until something fits, then bisects: with more GPUs no GPU needs more memory. Numbers on which not even the
    states fit are skipped.
    """
    counts = _tried(base, fixed, most)
    counts = counts[
        min(bisect_left(counts, True, key=lambda gpus: not _states_are_too_large(gpus, base, fixed)), len(counts) - 1) :
    ]
    if not counts:
        raise SpecError(
            f"model and batch divide no number of GPUs that is tried (whole nodes of {gpus_per_node(base)}, up to {_MOST_GPUS:,}); "
            "use other degrees, or another batch"
        )

    def tried(gpus: int) -> Plan | NoLayoutError | None:
        return on(gpus) if gpus == counts[-1] or _may_fit(gpus, base, fixed, inexpressible) else None

    answers: list[Plan | NoLayoutError] = []
    below = 0
    for gpus in _doubling(counts):
        answer = tried(gpus)
        if isinstance(answer, Plan) and answer.best is not None:
            return _fewest(tried, [one for one in counts if below < one < gpus]) or answer
        below = below if isinstance(answer, NoLayoutError) else gpus
        answers += [] if answer is None else [answer]
    return _plans(answers)[-1]


def _tried(base: JobSpec, fixed: Fixed, most: int = _MOST_GPUS) -> list[int]:
    """Return the numbers of GPUs to try, the smallest first."""
    per_node = gpus_per_node(base)
    every = (*_parts_of_a_node(per_node), *range(per_node, most + 1, per_node))
    return [gpus for gpus in every if gpus <= most and _divides(gpus, base, fixed)]


#: How many larger numbers of GPUs are also tried: on some nothing fits, because degrees or shards divide less evenly.
_LATER = 4


def _exceptions(
    answer: Plan, base: JobSpec, fixed: Fixed, on: Callable[[int], Plan | NoLayoutError], inexpressible: Inexpressible | None
) -> Iterator[str]:
    """Yield a note that names the next larger numbers of GPUs on which nothing fits, if there are any."""
    later = [gpus for gpus in _tried(base, fixed) if gpus > answer.base.mesh.world_size][:_LATER]
    if answer.best is None or not later:
        return

    def fits(gpus: int) -> bool:
        if _fits(replace(base, mesh=MeshSpec(dp_shard=gpus)), fixed, inexpressible):
            return True
        found = on(gpus)
        return isinstance(found, Plan) and found.best is not None

    fewer = [f"{gpus:,}" for gpus in later if not fits(gpus)]
    if fewer:
        yield f"of the next numbers of GPUs, up to {later[-1]:,}, nothing fits on {' and '.join(fewer)}"


def _states_are_too_large(gpus: int, base: JobSpec, fixed: Fixed) -> bool:
    """Whether fully sharded parameters and optimizer states exceed a GPU's memory; no layout needs less.

    FSDP2 shards by rows, so its largest shard is up to 2 % larger than the mean.
    """
    open_ = fixed.search_optimizer or fixed.search_precision or _without_offload(base, fixed) is not fixed
    if open_ or base.recipe.offloads or {fixed.offload_optimizer, fixed.offload_param} - {None, "none"}:
        return False
    shared = replace(base.recipe, engine="fsdp2", zero_stage=3, recompute="full")
    try:
        account = account_of_job(replace(base, recipe=shared, mesh=MeshSpec(dp_shard=gpus)))
    except SpecError:
        return False
    kinds = bytes_by_kind(account.states)
    held = int(kinds.get(Kind.PARAMETERS, 0)) + int(kinds.get(Kind.OPTIMIZER_STATE, 0))
    return held * 0.98 > room_of(base)


def _may_fit(gpus: int, base: JobSpec, fixed: Fixed, inexpressible: Inexpressible | None) -> bool:
    """Whether one of the smallest layouts fits, at least tightly. Unlike a plan, this computes no times."""
    there, offload = replace(base, mesh=MeshSpec(dp_shard=gpus)), _without_offload(base, fixed) is not fixed
    rooms = (Room(tight=True), Room(offload=True, tight=True)) if offload else (Room(tight=True),)
    with remembering():
        return any(_fits(there, fixed, inexpressible, room, wide=True) for room in rooms)


def _on(
    gpus: int, base: JobSpec, fixed: Fixed, *, objective: Objective, mfu: float | None, inexpressible: Inexpressible | None
) -> Plan | NoLayoutError:  # fmt: skip
    """Return the plan on this number of GPUs, or the error if no layout can be tried; another number may have an answer."""
    try:
        return plan(
            replace(base, mesh=MeshSpec(dp_shard=gpus)), fixed, objective=objective, mfu=mfu, inexpressible=inexpressible
        )
    except NoLayoutError as refusal:
        return refusal


def _plans(answers: Sequence[Plan | NoLayoutError]) -> list[Plan]:
    """Return the plans among the answers; raises the first error if there are none."""
    plans = [answer for answer in answers if isinstance(answer, Plan)]
    if not plans:
        raise next(answer for answer in answers if isinstance(answer, NoLayoutError))
    return plans


def _divides(gpus: int, base: JobSpec, fixed: Fixed) -> bool:
    """Whether this number of GPUs is divisible by some combination of degrees, and divides the batch."""
    if gpus % (fixed.dp_replicate or 1):
        return False
    total, there = fixed.global_batch_size, replace(base, mesh=MeshSpec(dp_shard=gpus))
    ways = degrees(there, fixed)
    return any(total is None or is_cut_evenly(total, gpus, one, fixed) for one in ways)


def _doubling(counts: list[int]) -> Iterator[int]:
    """Yield rising counts that are at least twice the one before, and the last count.

    >>> list(_doubling([1, 2, 4, 8, 16, 24, 32, 40])), list(_doubling([24, 40, 48, 72, 80, 88]))
    ([1, 2, 4, 8, 16, 32, 40], [24, 48, 88])
    """
    least = 0
    for count in counts:
        if count >= least or count == counts[-1]:
            yield count
            least = 2 * count


def _counts(per_node: int, most: int) -> list[int]:
    """Return powers of two up to a node, then numbers of nodes in powers of two."""
    nodes = [per_node << doublings for doublings in range(13)]
    return [gpus for gpus in (*_parts_of_a_node(per_node), *nodes) if gpus <= most]


def _parts_of_a_node(per_node: int) -> list[int]:
    return [gpus for gpus in (1, 2, 4, 8, 16) if gpus < per_node]


def cheapest(base: JobSpec, fixed: Fixed, *, mfu: float | None, inexpressible: Inexpressible | None = None) -> Plan:
    """Return the plan with the most tokens/s per GPU, on at most the given GPUs; among equal ones, the one with most GPUs.

    Unless requested, offload is used only if nothing fits without it. It skips numbers of GPUs on which no layout can be tried,
    and raises the error of the largest if there are no others.
    """
    most = base.mesh.world_size
    fewer = [gpus for gpus in reversed(_counts(gpus_per_node(base), most - 1)) if _divides(gpus, base, fixed)]

    def on_each(fixed: Fixed) -> list[Plan | NoLayoutError]:
        return [_on(gpus, base, fixed, objective="cost", mfu=mfu, inexpressible=inexpressible) for gpus in (most, *fewer)]

    alone = on_each(_without_offload(base, fixed))
    some = any(isinstance(one, Plan) and one.best is not None for one in alone)
    answers = _plans(alone if some else on_each(fixed))
    fitting = [answer for answer in answers if answer.best is not None and not answer.best.tight] or answers
    rates = [0.0 if answer.best is None else answer.best.layout.tokens_per_s for answer in fitting]
    return next(answer for answer, rate in zip(fitting, rates, strict=True) if rate * math.exp(TIE) >= max(rates))


def cheaper(answer: Plan, fixed: Fixed, *, mfu: float | None, inexpressible: Inexpressible | None = None) -> Ranked | None:
    """Return a layout with clearly more tokens/s per GPU on a half, a quarter or an eighth of the plan's GPUs; None if none.

    It searches the engine, stage and degrees of the plan's best layout.
    """
    if answer.best is None or answer.best.tight:
        return None
    layout, base = answer.best.layout, answer.base
    recipe, mesh = layout.job.recipe, layout.job.mesh
    fixed = replace(
        fixed, engine=recipe.engine, zero_stage=recipe.zero_stage, tp=mesh.tp, cp=mesh.cp, pp=mesh.pp, ep=mesh.ep
    )  # fmt: skip
    rate, best = layout.tokens_per_s * math.exp(TIE), None
    for gpus in (base.mesh.world_size // parts for parts in (2, 4, 8)):
        there = replace(base, mesh=MeshSpec(dp_shard=max(1, gpus)))
        if not gpus or not _divides(gpus, base, fixed):
            continue
        for one in faster_than(rate, there, fixed, mfu=mfu, inexpressible=inexpressible):
            easy = one.comfortable_bytes <= easy_room_of(base, fixed)
            rates = np.where(easy, one.grid.tokens / one.seconds, 0.0)
            at = int(rates.argmax())
            if rates[at] > rate:
                rate, best = float(rates[at]), layout_of(one, there, at)
    return None if best is None else ranked(f"cheapest, on {best.job.mesh.world_size:,} GPUs", best, room_of(base))


def _fewest(on: Callable[[int], Plan | NoLayoutError | None], counts: list[int]) -> Plan | None:
    """Return the plan on the smallest of ascending counts on which anything fits, by bisection; None if nothing fits."""
    answer = None
    while counts:
        middle = len(counts) // 2
        found = on(counts[middle])
        if isinstance(found, NoLayoutError):
            counts = counts[:middle] + counts[middle + 1 :]
        elif found is None or found.best is None:
            counts = counts[middle + 1 :]
        else:
            answer, counts = found, counts[:middle]
    return answer


class Room(NamedTuple):
    """The room for the search of a largest number: with or without offload, and with or without the allocator's cache."""

    offload: bool = False
    tight: bool = False

    @property
    def words(self) -> str:
        """Words for the answer; empty for the default room."""
        return "with offload to host memory" if self.offload else "tightly" if self.tight else ""


ROOMS = (Room(), Room(offload=True), Room(tight=True))
"""The order of trying: offload is slow, and a tight layout may run out of memory."""


@remembering()
def longest_sequence(base: JobSpec, fixed: Fixed, inexpressible: Inexpressible | None = None, room: Room = ROOMS[0]) -> int:
    """Return the longest sequence with which some layout fits, one sequence per micro-batch; 0 if none does. [tokens]"""
    most = base.model.max_position_embeddings if base.model.positions else _MOST_TOKENS
    units = np.unique(np.geomspace(1, most // SEQUENCE_STEP, 48).astype(np.int64))
    coarse = _most(base, fixed, units * SEQUENCE_STEP, room, tokens=True, inexpressible=inexpressible)
    finer = coarse // SEQUENCE_STEP + np.arange(0, 1 + max(1, coarse // SEQUENCE_STEP // 4), dtype=np.int64)
    fine = finer[finer * SEQUENCE_STEP <= most] * SEQUENCE_STEP
    return max(coarse, _most(base, fixed, fine[fine > 0], room, tokens=True, inexpressible=inexpressible))


@remembering()
def largest_batch(base: JobSpec, fixed: Fixed, inexpressible: Inexpressible | None = None, room: Room = ROOMS[0]) -> int:
    """Return the largest micro-batch with which some layout fits; 0 if none does. [sequences per data-parallel rank]"""
    most = max(1, min(_MOST_SEQUENCES, MOST_TOKENS // base.batch.seq_len))
    sizes = np.unique(np.geomspace(1, most, 64).astype(np.int64))
    coarse = _most(base, fixed, sizes, room, tokens=False, inexpressible=inexpressible)
    finer = coarse + np.arange(0, 1 + max(1, coarse // 4), dtype=np.int64)
    return max(
        coarse, _most(base, fixed, finer[(finer > 0) & (finer <= most)], room, tokens=False, inexpressible=inexpressible)
    )


def largest_model(at: Callable[[int], JobSpec], fixed: Fixed, inexpressible: Inexpressible | None = None) -> int:
    """Return the largest number of parameters, in two digits, with which some layout fits one sequence; 0 if none does.

    ``at`` returns the job for a number of parameters, with a shape as for ``--params``. Blocks are recomputed, which needs the
    least memory, unless the user has decided otherwise. The search bisects, and then tries the next few counts: a slightly larger
    model may need less memory if its shape follows another published model.
    """
    base = at(LEAST_PARAMETERS)
    fixed = replace(fixed, recompute=fixed.recompute or "full")
    counts = _two_digits(room_of(base) * base.mesh.world_size)
    below, above = -1, len(counts)
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (middle, above) if _fits(at(counts[middle]), fixed, inexpressible) else (below, middle)
    further = (count for count in reversed(counts[above + 1 : above + 1 + _BEYOND]) if _fits(at(count), fixed, inexpressible))
    return next(further, counts[below] if below >= 0 else 0)


def _two_digits(most: int) -> list[int]:
    """Return all counts with two significant digits, up to ``most``."""
    decades = range(len(str(LEAST_PARAMETERS)) - 2, len(str(most)) - 1)
    counts = (digits * 10**decade for decade in decades for digits in range(10, 100))
    return [count for count in counts if LEAST_PARAMETERS <= count <= most]


@remembering()
def _fits(
    base: JobSpec, fixed: Fixed, inexpressible: Inexpressible | None, room: Room = ROOMS[0], *, wide: bool = False
) -> bool:  # fmt: skip
    """Whether some structure fits in this kind of room, with the requested micro-batch or one sequence."""
    size = np.full(1, fixed.micro_batch_size or 1, dtype=np.int64)
    for recipe, split in _smallest_structures(base, fixed, inexpressible, offload=room.offload, wide=wide):
        sharing = base.mesh.world_size // split.model_ranks
        steps = fixed.grad_accum_steps or max(1, (fixed.global_batch_size or sharing) // (sharing * int(size[0])))
        is_small = not weights_alone_are_too_large(base, recipe, split)
        if is_small and _fitting(base, fixed, recipe, split, size, steps=steps, tight=room.tight).size:
            return True
    return False


def _fitting(
    base: JobSpec,
    fixed: Fixed,
    recipe: RecipeSpec,
    split: Degrees,
    values: Column,
    *,
    steps: int,
    tokens: bool = False,
    tight: bool = False,
) -> Column:
    """Return the values with which one structure fits: sequence lengths if ``tokens``, else micro-batches."""
    ones = np.ones(len(values), dtype=np.int64)
    grid = grid_of(
        ones[:1] * (fixed.dp_replicate or 1), base.mesh.world_size, micro_batch_size=ones if tokens else values,
        grad_accum_steps=ones * steps, seq_len=values if tokens else base.batch.seq_len, degrees=split,
    )  # fmt: skip
    several = int(values.max()) > 1 and not tokens
    try:
        found = evaluated(base, padded_by_trainer(base, fixed, recipe, grid) if several else recipe, grid, timed=False)
    except SpecError:
        return values[:0]
    return values[found.least_bytes <= room_of(base) if tight else found.comfortable_bytes <= easy_room_of(base, fixed)]


def _smallest_structures(
    base: JobSpec, fixed: Fixed, inexpressible: Inexpressible | None, *, offload: bool = False, wide: bool = False
) -> Iterator[tuple[RecipeSpec, Degrees]]:
    """Yield the structures with the least memory: full resharding after the forward, offload only on request.

    ``wide``: also Megatron's with unusual degrees.
    """
    for recipe in structures(base, fixed, offload=offload, wide=True):
        if recipe.engine == "fsdp2" and ways_of_resharding(recipe.fsdp2) is not None:
            continue
        megatron = recipe.engine == "megatron"
        if megatron and fixed.recompute is None and recipe.recompute != "full":
            continue
        for split in degrees_of(recipe, base, fixed, wide=wide or not megatron):
            if inexpressible is None or not inexpressible(recipe, split):
                yield with_split_sequences(recipe, split), split


#: The smallest transformer that is tried, and the number of counts to try above the first that does not fit.
LEAST_PARAMETERS, _BEYOND = 50_000_000, 3


def _most(base: JobSpec, fixed: Fixed, values: Column, room: Room, *, tokens: bool, inexpressible: Inexpressible | None) -> int:
    """Return the largest value with which some structure fits, fully sharded."""
    longest = replace(base, batch=replace(base.batch, seq_len=int(values.max()))) if tokens and len(values) else base
    most, steps = 0, fixed.grad_accum_steps or 1
    for recipe, split in _smallest_structures(longest, fixed, inexpressible, offload=room.offload):
        modelled = _modelled(values, base, split) if tokens else values
        modelled = modelled[modelled > most]  # smaller values are known to fit
        if modelled.size:
            whole = replace(fixed, dp_replicate=None)
            fitting = _fitting(base, whole, recipe, split, modelled, steps=steps, tokens=tokens, tight=room.tight)
            most = max(most, int(fitting.max(initial=0)))
    return most


def _modelled(lengths: Column, base: JobSpec, split: Degrees) -> Column:
    """Return the lengths that are modelled: with tensor or context parallelism, those within the sliding window."""
    window = base.model.sliding_window
    return lengths if window is None or split.tp * split.cp == 1 else lengths[lengths < window]
