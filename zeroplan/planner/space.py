"""Enumerates the layouts to choose from: Python loops over structures, and numbers are columns.

A *structure* is a recipe: engine, stage, recomputation, optimizer implementation, loss, offload. *Numbers* are replicas and
sequences per micro-batch; gradient accumulation follows from the global batch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zeroplan.errors import SpecError
from zeroplan.memo import recalled
from zeroplan.numeric import Float, Int
from zeroplan.planner.rules import NoLayoutError
from zeroplan.spec.base import Count, Range, Spec
from zeroplan.spec.batch import BatchSpec, Numbers
from zeroplan.spec.hardware import GpuSpec, node_size
from zeroplan.spec.job import ENGINE_STAGES, JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.pipeline import PipelineSchedule
from zeroplan.spec.recipe import (
    ADAM,
    SENDING,
    SMALL_BUCKET,
    DdpOptions,
    DeepSpeedOptions,
    Engine,
    Fsdp1Options,
    Fsdp2Options,
    Loss,
    MegatronOptions,
    OffloadDevice,
    OptimizerImpl,
    RecipeSpec,
    Recompute,
    Stage,
)

Column = NDArray[np.int64]

ENGINES: tuple[Engine, ...] = ("ddp", "fsdp2", "deepspeed", "megatron")
"""The engines that the search tries by default, the simplest first."""
_RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
#: Micro-batches that are tried without a global batch.
_SEQUENCES = (1, 2, 4, 8, 16, 32, 64)

#: More tokens than any GPU holds, and more sequences than any step has.
MOST_TOKENS, _MOST_OF_A_GPU = 1 << 24, 1 << 19


class Fixed(Spec):
    """Settings fixed by the user; the search chooses those that are None."""

    engine: Engine | None = None
    zero_stage: Stage | None = None
    recompute: Recompute | None = None
    recompute_layers: Count | None = None
    search_optimizer: bool = False
    """Whether to try Adam's states in 8 bits too, which changes the training."""
    search_precision: bool = False
    """Whether to try weights and states in bf16 only, which changes the training."""
    optimizer_impl: OptimizerImpl | None = None
    loss: Loss | None = None
    offload_optimizer: OffloadDevice | None = None
    offload_param: OffloadDevice | None = None
    ddp: DdpOptions | None = None
    fsdp1: Fsdp1Options | None = None
    fsdp2: Fsdp2Options | None = None
    deepspeed: DeepSpeedOptions | None = None
    megatron: MegatronOptions | None = None
    dp_replicate: Count | None = None
    tp: Count | None = None
    cp: Count | None = None
    pp: Count | None = None
    ep: Count | None = None
    pipeline_schedule: PipelineSchedule | None = None
    pipeline_stages_per_rank: Count | None = None
    micro_batch_size: Count | None = None
    grad_accum_steps: Count | None = None
    global_batch_size: Count | None = None
    pads: bool = False
    """Whether the trainer pads the sequences of a micro-batch to one length, if there are several."""
    margin: Annotated[float, Range(0, 0.9)] = 0.05
    """Share of the GPU's memory that a plan keeps free beyond the allocator's expected cache."""


class Degrees(NamedTuple):
    """Degrees of the parallelism that splits the model or a sequence."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def model_ranks(self) -> int:
        """Ranks that work on the same sequence."""
        return self.tp * self.cp * self.pp


#: No parallelism other than data parallelism and ZeRO's sharding.
WHOLE = Degrees()


class Grid(NamedTuple):
    """The numbers of all layouts of one structure, under the names that formulas read.

    Every arrangement of the GPUs is combined with every batch. Arrangements are rows and batches columns, so that a formula
    that reads only one of them runs once per row or column and not once per pair.
    """

    dp_replicate: Column
    dp_shard: Column
    micro_batch_size: Column
    seq_len: Column | int
    grad_accum_steps: Column
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """The number of arrangements of the GPUs, and of batches."""
        return self.dp_replicate.shape[0], self.micro_batch_size.shape[1]

    @property
    def layouts(self) -> int:
        """The number of layouts."""
        arrangements, batches = self.shape
        return arrangements * batches

    @property
    def tokens(self) -> NDArray[np.float64]:
        """The tokens of a step on one GPU, for each layout."""
        of_the_group = 1.0 * self.micro_batch_size * self.grad_accum_steps * self.seq_len
        return self.times(of_the_group / (self.tp * self.cp * self.pp))

    @property
    def degrees(self) -> Degrees:
        """The degrees of parallelism, which all layouts share."""
        return Degrees(self.tp, self.cp, self.pp, self.ep)

    @property
    def key(self) -> tuple[object, ...]:
        """The layouts as a key; a pipeline has one grid per number of micro-batches."""
        return self.degrees, *(np.asarray(numbers).tobytes() for numbers in self[:5])

    def row(self, value: Int) -> Column:
        """Return one figure per layout in one row, broadcast from a number, a row or a column."""
        return np.broadcast_to(np.asarray(value, dtype=np.int64), self.shape).reshape(-1)

    def times(self, value: Float) -> NDArray[np.float64]:
        """Return one time or rate per layout in one row, broadcast like :meth:`row`."""
        return np.broadcast_to(np.asarray(value, dtype=np.float64), self.shape).reshape(-1)

    def only(self, kept: NDArray[np.bool_]) -> "Grid":
        """Return the grid with the kept arrangements; ``kept``: a column of booleans."""
        if kept.all():
            return self
        return self._replace(dp_replicate=self.dp_replicate[kept[:, 0]], dp_shard=self.dp_shard[kept[:, 0]])

    def with_batches(self, kept: NDArray[np.bool_]) -> "Grid":
        """Return the grid with the kept batches; ``kept``: a row of booleans."""
        if kept.all():
            return self
        seq_len = self.seq_len if isinstance(self.seq_len, int) else self.seq_len[:, kept[0]]
        sizes, steps = self.micro_batch_size[:, kept[0]], self.grad_accum_steps[:, kept[0]]
        return self._replace(micro_batch_size=sizes, grad_accum_steps=steps, seq_len=seq_len)

    def mesh_at(self, at: int) -> MeshSpec:
        """Return the arrangement of the GPUs in one layout."""
        row = at // self.shape[1]
        return _mesh(int(self.dp_replicate[row, 0]), int(self.dp_shard[row, 0]), self.degrees)

    def numbers_at(self, at: int) -> Numbers:
        """Return the batch of one layout, without checks, for formulas."""
        column = at % self.shape[1]
        length = self.seq_len if isinstance(self.seq_len, int) else int(self.seq_len[0, column])
        return Numbers(int(self.micro_batch_size[0, column]), length, int(self.grad_accum_steps[0, column]))

    def batch_at(self, at: int, base: BatchSpec) -> BatchSpec:
        """Return the batch of one layout; ``base`` has its other fields."""
        return _batch(base, *self.numbers_at(at))


@lru_cache(maxsize=4096)
def _mesh(replicas: int, shards: int, degrees: Degrees) -> MeshSpec:
    return MeshSpec(dp_replicate=replicas, dp_shard=shards, **degrees._asdict())


@lru_cache(maxsize=4096)
def _batch(base: BatchSpec, micro_batch_size: int, seq_len: int, grad_accum_steps: int) -> BatchSpec:
    return replace(base, micro_batch_size=micro_batch_size, seq_len=seq_len, grad_accum_steps=grad_accum_steps)


def grid_of(
    replicas: Column,
    gpus: int,
    *,
    micro_batch_size: Column,
    grad_accum_steps: Column,
    seq_len: Column | int,
    degrees: Degrees = WHOLE,
) -> Grid:
    """Return the grid of every number of replicas with every batch; one sequence length per batch, or one for all."""
    over = replicas[:, None]
    length = seq_len if isinstance(seq_len, int) else seq_len[None, :]
    shards = gpus // degrees.model_ranks // over
    return Grid(over, shards, micro_batch_size[None, :], length, grad_accum_steps[None, :], *degrees)


def structures(base: JobSpec, fixed: Fixed, *, offload: bool, wide: bool = False) -> Iterator[RecipeSpec]:
    """Yield every recipe that the search tries, with or without offload. Engines may refuse some of them later.

    The user's choice about offload applies in both cases. ``wide``: also DeepSpeed's smaller buckets, which save memory but no
    time; with ``engine="deepspeed"`` they are always tried.
    """
    if base.recipe.fsdp2.are_torchtitans:
        raise SpecError("--modules torchtitan is not searched: its layouts are few; use `zeroplan estimate`, or leave it out")
    if SENDING & set(base.recipe.fused_parts):
        raise SpecError("kernels that send tokens to experts are not searched; use `zeroplan estimate`, or leave them out")
    decided = (fixed.offload_optimizer, fixed.offload_param)
    if (
        decided != (None, None)
        or base.recipe.offloads_states
        or base.recipe.fsdp2.cpu_offload
        or base.recipe.deepspeed.offloads
    ):
        if offload:
            return
    elif not offload:
        fixed = replace(fixed, offload_optimizer="none", offload_param="none")
    buckets, found = wide or offload or fixed.engine == "deepspeed", False
    for asked in _optimizers_and_precisions(base.recipe, fixed):
        for recipe in _of_engines(replace(base, recipe=asked), fixed, smaller_buckets=buckets):
            if recipe.offloads_states or not offload:
                found = True
                yield recipe
    if base.recipe.fused_parts and not (found or offload):
        raise SpecError(f"no engine runs --fused-kernels {base.recipe.fused_kernels} as asked; leave them out")


def _optimizers_and_precisions(recipe: RecipeSpec, fixed: Fixed) -> Iterator[RecipeSpec]:
    """Yield the recipe with each optimizer and precision to try: the user's, and narrower ones on request."""
    for precision in dict.fromkeys((recipe.precision, *(("bf16",) if fixed.search_precision else ()))):
        for optimizer in dict.fromkeys((recipe.optimizer, *(("adamw-8bit",) if fixed.search_optimizer else ()))):
            yield replace(recipe, precision=precision, optimizer=optimizer)


def _of_engines(base: JobSpec, fixed: Fixed, *, smaller_buckets: bool) -> Iterator[RecipeSpec]:
    for engine in ENGINES if fixed.engine is None else (fixed.engine,):
        stages = (_STAGES.get(engine) or ENGINE_STAGES[engine]) if fixed.zero_stage is None else (fixed.zero_stage,)
        for stage in stages:
            if stage in ENGINE_STAGES[engine] and (fixed.engine is not None or (engine, stage) not in _IF_NAMED):
                for recipe in _of_stage(base, fixed, engine, stage):
                    if smaller_buckets or recipe.deepspeed.reduce_bucket_size >= base.recipe.deepspeed.reduce_bucket_size:
                        yield recipe


#: Megatron-FSDP, whose step time is not modelled.
_IF_NAMED = (("megatron", 2), ("megatron", 3))
#: Stages to try instead of all: Megatron's distributed optimizer (stage 1) saves memory and costs no time.
_STAGES: Mapping[Engine, tuple[Stage, ...]] = {"megatron": (1,)}


def _of_stage(base: JobSpec, fixed: Fixed, engine: Engine, stage: Stage) -> Iterator[RecipeSpec]:
    recipe = base.recipe
    chunks = (engine == "fsdp2" or (engine == "ddp" and base.mesh.world_size == 1)) and not recipe.keep_logits
    losses: tuple[Loss, ...] = ("full", "chunked") if chunks else ("full",)
    # Adam's fused kernel has no temporaries and less memory traffic, so foreach never wins.
    step: OptimizerImpl | None = "fused" if recipe.optimizer in ADAM and engine not in _OWN_STEP else None
    again = _RECOMPUTE if fixed.recompute_layers is None else _RECOMPUTE[1:]
    if engine == "megatron" and fixed.megatron is None and recipe.attention != "eager":
        again = tuple(
            one for one in again if one != "selective"
        )  # it recomputes only attention, which saves little with a fused kernel
    for recompute in again if fixed.recompute is None else (fixed.recompute,):
        for loss in losses if fixed.loss is None else (fixed.loss,):
            settings = {"engine": engine, "zero_stage": stage, "recompute": recompute, "loss": loss,
                    "optimizer_impl": fixed.optimizer_impl or step, "recompute_layers": fixed.recompute_layers}  # fmt: skip
            for options in _options(base, fixed, engine, stage):
                yield from _if_kernels_run(recipe, {**settings, **options})


def _if_kernels_run(recipe: RecipeSpec, settings: Mapping[str, object]) -> Iterator[RecipeSpec]:
    """Yield the recipe with other settings, unless the fused kernels that the user asks for do not run with them."""
    try:
        yield replace(recipe, **settings)  # type: ignore[arg-type]  # checked there
    except SpecError:
        if not recipe.fused_parts:
            raise


#: Engines with their own optimizer kernels.
_OWN_STEP: tuple[Engine, ...] = ("deepspeed", "megatron")


def _options(base: JobSpec, fixed: Fixed, engine: Engine, stage: Stage) -> Iterator[Mapping[str, object]]:
    """Yield the engine's options to try, including offload."""
    recipe = base.recipe
    offload = (fixed.offload_optimizer, fixed.offload_param)
    if engine == "ddp":
        if set(offload) <= {None, "none"}:
            views = (False, True) if fixed.ddp is None else (recipe.ddp.gradient_as_bucket_view,)
            yield from ({"ddp": DdpOptions(gradient_as_bucket_view=view)} for view in views)
    elif engine == "megatron":
        if set(offload) <= {None, "none"}:
            yield {"megatron": recipe.megatron if fixed.megatron is not None else _overlapped(base.model, stage)}
    elif engine == "fsdp1":
        if set(offload) <= {None, "none"}:
            yield {"fsdp1": recipe.fsdp1}
    elif engine == "fsdp2":
        yield from ({"fsdp2": options} for options in _fsdp2(recipe.fsdp2, fixed, stage))
    else:
        yield from ({"deepspeed": options} for options in _deepspeed(base, fixed, stage))


def _overlapped(model: ModelSpec, stage: Stage) -> MegatronOptions:
    """Return Megatron's options with overlaps, which need no memory, and unsplit experts, since split ones are slower."""
    whole = None if model.moe is None else 1
    return MegatronOptions(overlap_grad_reduce=True, overlap_param_gather=stage > 0, expert_tensor_parallel_size=whole)


def _fsdp2(options: Fsdp2Options, fixed: Fixed, stage: Stage) -> Iterator[Fsdp2Options]:
    """Yield FSDP2's options to try. FSDP2 offloads parameters, gradients and optimizer together, or nothing."""
    offload = {fixed.offload_optimizer, fixed.offload_param} - {None}
    kept = fixed.fsdp2 is not None and options.cpu_offload
    reshard: tuple[bool | int | None, ...] = (
        (None, 8) if stage == 3 and fixed.fsdp2 is None else (options.reshard_after_forward,)
    )
    for on_host in (False, True):
        if offload <= {"cpu" if on_host else "none"} and (on_host or not kept):
            for ways in reshard:
                yield replace(options, reshard_after_forward=ways, cpu_offload=on_host)


def _deepspeed(base: JobSpec, fixed: Fixed, stage: Stage) -> Iterator[DeepSpeedOptions]:
    devices: tuple[OffloadDevice, ...] = ("none", "cpu")
    for options in (base.recipe.deepspeed,) if fixed.deepspeed is not None else _default_deepspeed_options(base, stage):
        for optimizer in devices if fixed.offload_optimizer is None else (fixed.offload_optimizer,):
            for weights in devices if fixed.offload_param is None else (fixed.offload_param,):
                offloads = optimizer != "none" or weights != "none"
                if _is_worth_trying(optimizer, weights, stage, fixed) and not (
                    offloads and options.zero_hpz_partition_size > 1
                ):
                    yield replace(options, offload_optimizer=optimizer, offload_param=weights)


def _default_deepspeed_options(base: JobSpec, stage: Stage) -> Iterator[DeepSpeedOptions]:
    """Yield DeepSpeed's options to try: overlapped reductions, default or small buckets, with and without hpZ.

    hpZ is a second copy of the weights in each node. Stage 3 also tries small buckets without prefetching.
    """
    options, per_node = base.recipe.deepspeed, gpus_per_node(base)
    if stage in (1, 2):
        options = replace(options, overlap_comm=True)
    nodes = base.mesh.world_size // per_node
    copies = (1, per_node) if stage == 3 and nodes > 1 and base.mesh.world_size % per_node == 0 else (1,)
    for copy in copies:
        for bucket in (options.reduce_bucket_size, SMALL_BUCKET) if stage else (options.reduce_bucket_size,):
            yield replace(options, reduce_bucket_size=bucket, zero_hpz_partition_size=copy)
        if stage == 3:
            smaller = replace(options, reduce_bucket_size=SMALL_BUCKET, stage3_prefetch_bucket_size=0)
            yield replace(smaller, zero_hpz_partition_size=copy)


def gpus_per_node(base: JobSpec) -> int:
    """Return the GPUs per node; 8 if unknown."""
    return node_size(base.cluster) or 8


def gpu_of(base: JobSpec) -> GpuSpec:
    """Return the GPU of a plan; raises SpecError without one."""
    if base.cluster.gpu is None:
        raise SpecError("a plan needs a GPU to fit; add --gpu NAME (`zeroplan gpus` lists them)")
    return base.cluster.gpu


def room_of(base: JobSpec) -> int:
    """Return the memory of the GPU; 0 without one. [bytes]"""
    gpu = base.cluster.gpu
    return 0 if gpu is None else int(gpu.memory_bytes.value)


def easy_room_of(base: JobSpec, fixed: Fixed) -> int:
    """Return the memory of the GPU without the margin that a plan keeps free. [bytes]"""
    return int(room_of(base) * (1 - fixed.margin))


def _is_worth_trying(optimizer: OffloadDevice, weights: OffloadDevice, stage: Stage, fixed: Fixed) -> bool:
    """Whether to try a combination of offloads. Requested ones are always tried, and the engine may then refuse them."""
    if (fixed.offload_optimizer or "none", fixed.offload_param or "none") != ("none", "none"):
        return True
    return (stage > 0 or optimizer == "none") and (weights == "none" or (stage == 3 and optimizer != "none"))


class GridAndRejected(NamedTuple):
    """The grid of one structure, and the layouts that divisibility rejects."""

    grid: Grid
    indivisible: int


def numbers(recipe: RecipeSpec, base: JobSpec, fixed: Fixed, degrees: Degrees = WHOLE) -> GridAndRejected:
    """Return every arrangement of the GPUs and every batch for this recipe and these degrees."""
    several = recipe.engine == "fsdp2" and degrees.pp == 1
    key = numbers, several, base.mesh.world_size, base.batch.seq_len, fixed, degrees
    return recalled(lambda: key, lambda: _numbers(base, fixed, degrees, several=several))


def _numbers(base: JobSpec, fixed: Fixed, degrees: Degrees, *, several: bool) -> GridAndRejected:
    gpus = base.mesh.world_size
    sharing = gpus // degrees.model_ranks
    replicas = _replicas(sharing, fixed, several=several)
    sequences, steps, indivisible = batches(base, fixed, sharing)
    grid = grid_of(
        replicas, gpus, micro_batch_size=sequences, grad_accum_steps=steps, seq_len=base.batch.seq_len, degrees=degrees
    )
    among = grid.dp_shard * (degrees.cp * degrees.tp)
    return GridAndRejected(grid.only(among % degrees.ep == 0), indivisible * len(replicas))


def _replicas(gpus: int, fixed: Fixed, *, several: bool) -> Column:
    """Return numbers of replicas that divide the GPUs and leave at least two sharding ranks; 1 unless there may be ``several``."""
    if fixed.dp_replicate is not None:
        return np.array([fixed.dp_replicate], dtype=np.int64)
    return _divisors(gpus, gpus // 2) if several else np.ones(1, dtype=np.int64)


@lru_cache(maxsize=256)
def _divisors(number: int, most: int) -> Column:
    """Return every divisor up to ``most``, and 1. The result is cached: do not modify it."""
    tried: Column = np.arange(1, max(1, most) + 1, dtype=np.int64)
    divides: NDArray[np.bool_] = number % tried == 0
    return tried[divides]


def batches(base: JobSpec, fixed: Fixed, sharing: int) -> tuple[Column, Column, int]:
    """Return micro-batch sizes, micro-batches per step, and the number of sizes that do not divide a rank's batch.

    ``sharing``: data-parallel ranks.
    """
    total, size, steps = fixed.global_batch_size, fixed.micro_batch_size, fixed.grad_accum_steps
    most = max(1, MOST_TOKENS // base.batch.seq_len)
    if total is None:
        sizes = [one for one in _SEQUENCES if one <= most] if size is None else [size]
        return np.array(sizes, dtype=np.int64), np.full(len(sizes), steps or 1, dtype=np.int64), 0
    of_gpu = total // sharing
    if total % sharing or of_gpu % (steps or 1) or (steps is not None and size not in (None, of_gpu // steps)):
        return np.array([], dtype=np.int64), np.array([], dtype=np.int64), 1
    if steps is not None:
        size = of_gpu // steps
    if size is not None:
        fitting = np.array([size] if of_gpu % size == 0 else [], dtype=np.int64)
        return fitting, of_gpu // fitting, 1 - len(fitting)
    most = min(of_gpu, most)
    fitting = _divisors(of_gpu, most)
    return fitting, of_gpu // fitting, most - len(fitting)


def check_batch(base: JobSpec, fixed: Fixed, splits: Sequence[Degrees]) -> None:
    """Raise SpecError for a contradictory batch, or one so large that columns, exact up to 2^63, may overflow.

    ``splits``: all combinations of degrees that are tried.
    """
    ranks = base.mesh.world_size // min(one.model_ranks for one in splits)
    tokens = base.batch.seq_len * (fixed.micro_batch_size or 1)
    if tokens > MOST_TOKENS:
        raise SpecError(
            f"{tokens:,} tokens on a GPU at once are more than the {MOST_TOKENS:,} that a plan goes up to; use fewer"
        )
    if (fixed.global_batch_size or 1) // ranks > _MOST_OF_A_GPU or (fixed.grad_accum_steps or 1) > _MOST_OF_A_GPU:
        raise SpecError(
            f"a step of more than {_MOST_OF_A_GPU:,} sequences per data-parallel rank is beyond what a plan goes up to; use fewer"
        )
    total = fixed.global_batch_size
    if total is not None and not any(is_cut_evenly(total, base.mesh.world_size, one, fixed) for one in splits):
        raise NoLayoutError(_uneven_sizes(base.mesh.world_size, min(splits, key=attrgetter("model_ranks")), fixed, total))


def is_cut_evenly(total: int, gpus: int, split: Degrees, fixed: Fixed) -> bool:
    """Whether the batch divides over the GPUs with these degrees.

    >>> is_cut_evenly(500, 64, Degrees(tp=8), Fixed()), is_cut_evenly(500, 64, Degrees(tp=8, cp=2), Fixed())
    (False, True)
    """
    size, steps, sharing = fixed.micro_batch_size, fixed.grad_accum_steps, gpus // split.model_ranks
    each = total // sharing
    if total % sharing or each % (size or 1) or each % (steps or 1):
        return False
    return size is None or steps is None or size * steps == each


def _uneven_sizes(gpus: int, split: Degrees, fixed: Fixed, total: int) -> str:
    size, steps = fixed.micro_batch_size, fixed.grad_accum_steps
    sharing = gpus // split.model_ranks
    if total % sharing:
        even = sharing * max(1, total // sharing)
        return f"--global-batch {total:,} sequences are not divisible by {sharing:,} GPUs; use {even:,}, say"
    if size is not None and steps is not None and total != size * steps * sharing:
        return (
            f"--global-batch {total:,} is not --micro-batch {size:,} x --grad-accum {steps:,} x {sharing:,} GPUs; leave one out"
        )
    flag, number = ("--micro-batch", size) if size is not None else ("--grad-accum", steps or 1)
    return f"{flag} {number:,} does not divide the {total // sharing:,} sequences of a GPU in --global-batch {total:,}"
