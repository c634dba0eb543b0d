"""Which layouts are there to choose from? Structures are looped over in Python, numbers are columns.

A *structure* is a recipe: engine, stage, recomputation, optimizer implementation, loss, offload. *Numbers* are how many replicas
there are and how many sequences go through a GPU at once; accumulation follows from the global batch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zeroplan.errors import SpecError
from zeroplan.numeric import Float, Int
from zeroplan.planner.rules import NoLayoutError
from zeroplan.spec.base import Count, Spec
from zeroplan.spec.batch import BatchSpec, Numbers
from zeroplan.spec.hardware import GpuSpec, node_size
from zeroplan.spec.job import ENGINE_STAGES, JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.pipeline import PipelineSchedule
from zeroplan.spec.recipe import (
    ADAM,
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

ENGINES: tuple[Engine, ...] = ("ddp", "fsdp2", "deepspeed")
"""Those that are tried where none is asked for: Megatron-LM is another training program, whose memory is a closed form."""
_RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
_IMPLEMENTATIONS: tuple[OptimizerImpl, ...] = ("foreach", "fused")
#: Micro-batches that are tried where no global batch is asked for.
_SEQUENCES = (1, 2, 4, 8, 16, 32, 64)

#: More tokens than any GPU holds at once, and more sequences than any step has.
MOST_TOKENS, _MOST_OF_A_GPU = 1 << 24, 1 << 19


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed(Spec):
    """What a user has decided; None leaves it to the search."""

    engine: Engine | None = None
    zero_stage: Stage | None = None
    recompute: Recompute | None = None
    recompute_layers: Count | None = None
    search_optimizer: bool = False
    """Adam's states in 8 bits are tried, too, which trains otherwise."""
    search_precision: bool = False
    """Weights and states in bf16 alone are tried, too, which trains otherwise."""
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


class Degrees(NamedTuple):
    """One way of splitting the model, beside its data."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def model_ranks(self) -> int:
        """Ranks that work on one and the same sequence."""
        return self.tp * self.cp * self.pp


#: The model whole on every rank, but for what a ZeRO stage shards.
WHOLE = Degrees()


class Grid(NamedTuple):
    """The numbers of all layouts of one structure, under the names that formulas ask for.

    Every arrangement of the GPUs meets every batch. Arrangements stand one below the other and batches side by side, so that a
    formula that asks for one of the two is worked out once for each and not for each pair.
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
        """Arrangements of the GPUs, and batches."""
        return self.dp_replicate.shape[0], self.micro_batch_size.shape[1]

    @property
    def layouts(self) -> int:
        """How many there are."""
        arrangements, batches = self.shape
        return arrangements * batches

    @property
    def degrees(self) -> Degrees:
        """How the model is split in all of them."""
        return Degrees(self.tp, self.cp, self.pp, self.ep)

    def row(self, value: Int) -> Column:
        """Stand a figure of each layout in one row; one that all share, or all of an arrangement or batch, as often as it holds."""
        return np.broadcast_to(np.asarray(value, dtype=np.int64), self.shape).reshape(-1)

    def times(self, value: Float) -> NDArray[np.float64]:
        """The same for a time or a rate."""
        return np.broadcast_to(np.asarray(value, dtype=np.float64), self.shape).reshape(-1)

    def only(self, kept: NDArray[np.bool_]) -> "Grid":
        """The arrangements that are kept, one answer of a column below the other."""
        return self._replace(dp_replicate=self.dp_replicate[kept[:, 0]], dp_shard=self.dp_shard[kept[:, 0]])

    def with_batches(self, kept: NDArray[np.bool_]) -> "Grid":
        """The batches that are kept, one answer of a row beside the other."""
        seq_len = self.seq_len if isinstance(self.seq_len, int) else self.seq_len[:, kept[0]]
        sizes, steps = self.micro_batch_size[:, kept[0]], self.grad_accum_steps[:, kept[0]]
        return self._replace(micro_batch_size=sizes, grad_accum_steps=steps, seq_len=seq_len)

    def mesh_at(self, at: int) -> MeshSpec:
        """How the GPUs are arranged in one layout."""
        row = at // self.shape[1]
        replicas, shards = int(self.dp_replicate[row, 0]), int(self.dp_shard[row, 0])
        return MeshSpec(dp_replicate=replicas, dp_shard=shards, tp=self.tp, cp=self.cp, pp=self.pp, ep=self.ep)

    def numbers_at(self, at: int) -> Numbers:
        """The same of a batch, unchecked, as formulas take it."""
        column = at % self.shape[1]
        length = self.seq_len if isinstance(self.seq_len, int) else int(self.seq_len[0, column])
        return Numbers(int(self.micro_batch_size[0, column]), length, int(self.grad_accum_steps[0, column]))

    def batch_at(self, at: int, base: BatchSpec) -> BatchSpec:
        """The batch of one layout; ``base`` says what is no number of the grid."""
        column = at % self.shape[1]
        return replace(
            base,
            micro_batch_size=int(self.micro_batch_size[0, column]),
            grad_accum_steps=int(self.grad_accum_steps[0, column]),
            seq_len=self.seq_len if isinstance(self.seq_len, int) else int(self.seq_len[0, column]),
        )


def grid_of(
    replicas: Column,
    gpus: int,
    *,
    micro_batch_size: Column,
    grad_accum_steps: Column,
    seq_len: Column | int,
    degrees: Degrees = WHOLE,
) -> Grid:
    """Every one of so many replicas with every batch; a sequence length for each batch, or one for all."""
    over = replicas[:, None]
    length = seq_len if isinstance(seq_len, int) else seq_len[None, :]
    shards = gpus // degrees.model_ranks // over
    return Grid(over, shards, micro_batch_size[None, :], length, grad_accum_steps[None, :], *degrees)


def structures(base: JobSpec, fixed: Fixed, *, offload: bool) -> Iterator[RecipeSpec]:
    """Every recipe that the search tries, with or without offload; whether its engine takes it is asked later.

    What a user has decided on offload holds either way.
    """
    if base.recipe.fsdp2.modules == "torchtitan":
        raise SpecError("--modules torchtitan is not searched: its layouts are few; use `zeroplan estimate`, or leave it out")
    decided = (fixed.offload_optimizer, fixed.offload_param)
    if decided != (None, None) or base.recipe.fsdp2.cpu_offload or base.recipe.deepspeed.offloads:
        if offload:
            return
    elif not offload:
        fixed = replace(fixed, offload_optimizer="none", offload_param="none")
    for recipe in _structures(base, fixed):
        if recipe.offloads_states or not offload:
            yield recipe


def _structures(base: JobSpec, fixed: Fixed) -> Iterator[RecipeSpec]:
    for recipe in _trained_as(base.recipe, fixed):
        yield from _of_engines(replace(base, recipe=recipe), fixed)


def _trained_as(recipe: RecipeSpec, fixed: Fixed) -> Iterator[RecipeSpec]:
    """What the optimizer keeps, and in how many bits: as it is asked for, or narrower where that is to be looked for."""
    for precision in dict.fromkeys((recipe.precision, *(("bf16",) if fixed.search_precision else ()))):
        for optimizer in dict.fromkeys((recipe.optimizer, *(("adamw-8bit",) if fixed.search_optimizer else ()))):
            yield replace(recipe, precision=precision, optimizer=optimizer)


def _of_engines(base: JobSpec, fixed: Fixed) -> Iterator[RecipeSpec]:
    for engine in ENGINES if fixed.engine is None else (fixed.engine,):
        stages = tuple(ENGINE_STAGES[engine]) if fixed.zero_stage is None else (fixed.zero_stage,)
        for stage in stages:
            if stage in ENGINE_STAGES[engine]:
                yield from _of_stage(base, fixed, engine, stage)


def _of_stage(base: JobSpec, fixed: Fixed, engine: Engine, stage: Stage) -> Iterator[RecipeSpec]:
    recipe = base.recipe
    losses: tuple[Loss, ...] = ("full", "chunked") if engine == "fsdp2" and not recipe.keep_logits else ("full",)
    both = recipe.optimizer in ADAM and engine not in _OWN_STEP
    steps: tuple[OptimizerImpl | None, ...] = _IMPLEMENTATIONS if both else (None,)
    again = _RECOMPUTE if fixed.recompute_layers is None else _RECOMPUTE[1:]
    for recompute in again if fixed.recompute is None else (fixed.recompute,):
        for loss in losses if fixed.loss is None else (fixed.loss,):
            for impl in steps if fixed.optimizer_impl is None else (fixed.optimizer_impl,):
                said = {"engine": engine, "zero_stage": stage, "recompute": recompute, "loss": loss, "optimizer_impl": impl,
                        "recompute_layers": fixed.recompute_layers}  # fmt: skip
                for options in _options(base, fixed, engine, stage):
                    yield replace(recipe, **said, **options)  # type: ignore[arg-type]  # checked there


#: Engines with an optimizer's kernel of their own.
_OWN_STEP: tuple[Engine, ...] = ("deepspeed", "megatron")


def _options(base: JobSpec, fixed: Fixed, engine: Engine, stage: Stage) -> Iterator[Mapping[str, object]]:
    """The engine's own options, offload among them."""
    recipe = base.recipe
    asked = (fixed.offload_optimizer, fixed.offload_param)
    if engine == "ddp":
        if set(asked) <= {None, "none"}:
            views = (False, True) if fixed.ddp is None else (recipe.ddp.gradient_as_bucket_view,)
            yield from ({"ddp": DdpOptions(gradient_as_bucket_view=view)} for view in views)
    elif engine == "megatron":
        if set(asked) <= {None, "none"}:
            yield {"megatron": recipe.megatron if fixed.megatron is not None else _overlapped(stage)}
    elif engine == "fsdp1":
        if set(asked) <= {None, "none"}:
            yield {"fsdp1": recipe.fsdp1}
    elif engine == "fsdp2":
        yield from ({"fsdp2": options} for options in _fsdp2(recipe.fsdp2, fixed, stage))
    else:
        yield from ({"deepspeed": options} for options in _deepspeed(base, fixed, stage))


def _overlapped(stage: Stage) -> MegatronOptions:
    """Megatron's overlaps, which cost no memory."""
    return MegatronOptions(overlap_grad_reduce=True, overlap_param_gather=stage > 0)


def _fsdp2(options: Fsdp2Options, fixed: Fixed, stage: Stage) -> Iterator[Fsdp2Options]:
    """FSDP2 takes parameters, gradients and optimizer to the host together, or leaves all of them on the GPU."""
    asked = {fixed.offload_optimizer, fixed.offload_param} - {None}
    kept = fixed.fsdp2 is not None and options.cpu_offload
    reshard: tuple[bool | int | None, ...] = (
        (None, 8) if stage == 3 and fixed.fsdp2 is None else (options.reshard_after_forward,)
    )
    for away in (False, True):
        if asked <= {"cpu" if away else "none"} and (away or not kept):
            for ways in reshard:
                yield replace(options, reshard_after_forward=ways, cpu_offload=away)


def _deepspeed(base: JobSpec, fixed: Fixed, stage: Stage) -> Iterator[DeepSpeedOptions]:
    devices: tuple[OffloadDevice, ...] = ("none", "cpu")
    for options in (base.recipe.deepspeed,) if fixed.deepspeed is not None else _unsaid_of_deepspeed(base, stage):
        for optimizer in devices if fixed.offload_optimizer is None else (fixed.offload_optimizer,):
            for weights in devices if fixed.offload_param is None else (fixed.offload_param,):
                away = optimizer != "none" or weights != "none"
                if _sensible(optimizer, weights, stage, fixed) and not (away and options.zero_hpz_partition_size > 1):
                    yield replace(options, offload_optimizer=optimizer, offload_param=weights)


def _unsaid_of_deepspeed(base: JobSpec, stage: Stage) -> Iterator[DeepSpeedOptions]:
    """Reductions beside the backward, buckets as they come or a tenth, a second copy of the weights in each node (hpZ) or none.

    At stage 3 smaller buckets with and without gathering ahead.
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
    """GPUs that share a node; eight where it is not known."""
    return node_size(base.cluster) or 8


def gpu_of(base: JobSpec) -> GpuSpec:
    """The GPU that a plan is for; raises SpecError where none is named."""
    if base.cluster.gpu is None:
        raise SpecError("a plan needs a GPU to fit; add --gpu NAME (`zeroplan gpus` lists them)")
    return base.cluster.gpu


def room_of(base: JobSpec) -> int:
    """What the GPU has; 0 where none is named. [bytes]"""
    gpu = base.cluster.gpu
    return 0 if gpu is None else int(gpu.memory_bytes.value)


def _sensible(optimizer: OffloadDevice, weights: OffloadDevice, stage: Stage, fixed: Fixed) -> bool:
    """Whether a combination is worth the search's time: what was asked for always is, an engine that refuses it says so."""
    if (fixed.offload_optimizer or "none", fixed.offload_param or "none") != ("none", "none"):
        return True
    return (stage > 0 or optimizer == "none") and (weights == "none" or (stage == 3 and optimizer != "none"))


class Gridded(NamedTuple):
    """What one structure's grid was made of, and what divisibility took from it."""

    grid: Grid
    indivisible: int


def numbers(recipe: RecipeSpec, base: JobSpec, fixed: Fixed, degrees: Degrees = WHOLE) -> Gridded:
    """Every arrangement of the GPUs and of the batch under this recipe, the model split in one way."""
    gpus = base.mesh.world_size
    sharing = gpus // degrees.model_ranks
    replicas = _replicas(recipe, sharing, fixed, pipelined=degrees.pp > 1)
    sequences, steps, indivisible = _batches(base, fixed, sharing)
    grid = grid_of(
        replicas, gpus, micro_batch_size=sequences, grad_accum_steps=steps, seq_len=base.batch.seq_len, degrees=degrees
    )
    among = grid.dp_shard * (degrees.cp * degrees.tp)
    return Gridded(grid.only(among % degrees.ep == 0), indivisible * len(replicas))


def _replicas(recipe: RecipeSpec, gpus: int, fixed: Fixed, *, pipelined: bool) -> Column:
    """Replicas that divide the GPUs and leave at least two to shard over; of a pipeline none but those asked for."""
    if fixed.dp_replicate is not None:
        return np.array([fixed.dp_replicate], dtype=np.int64)
    several = recipe.engine == "fsdp2" and not pipelined
    return _divisors(gpus, gpus // 2) if several else np.ones(1, dtype=np.int64)


@lru_cache(maxsize=256)
def _divisors(number: int, most: int) -> Column:
    """Every divisor up to ``most``, and 1 in any case; not to be written to."""
    tried: Column = np.arange(1, max(1, most) + 1, dtype=np.int64)
    divides: NDArray[np.bool_] = number % tried == 0
    return tried[divides]


def _batches(base: JobSpec, fixed: Fixed, sharing: int) -> tuple[Column, Column, int]:
    """Sequences per micro-batch, how many micro-batches, and how many sizes do not divide the batch of one of ``sharing``."""
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
    """Refuse a batch that contradicts itself, or that no GPU holds: columns are exact only up to 2^63.

    ``splits`` has every way of splitting the model that is tried.
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
        raise NoLayoutError(_how_uneven(base.mesh.world_size, min(splits, key=_model_ranks), fixed, total))


def is_cut_evenly(total: int, gpus: int, split: Degrees, fixed: Fixed) -> bool:
    """Whether the batch can be cut over so many GPUs, the model split so: every pipeline takes whole rounds of micro-batches.

    >>> is_cut_evenly(500, 64, Degrees(tp=8, pp=2), Fixed()), is_cut_evenly(500, 64, Degrees(tp=8, cp=2), Fixed())
    (False, True)
    """
    size, steps, sharing = fixed.micro_batch_size, fixed.grad_accum_steps, gpus // split.model_ranks
    each = total // sharing
    if total % sharing or each % (size or 1) or each % (steps or 1):
        return False
    if size is not None and steps is not None:
        return size * steps == each and steps % split.pp == 0
    rounds = steps if steps is not None else each // (size or 1)
    return rounds % split.pp == 0


def _model_ranks(split: Degrees) -> int:
    return split.model_ranks


def _how_uneven(gpus: int, split: Degrees, fixed: Fixed, total: int) -> str:
    size, steps = fixed.micro_batch_size, fixed.grad_accum_steps
    sharing = gpus // split.model_ranks
    if total % sharing:
        even = sharing * max(1, total // sharing)
        return f"--global-batch {total:,} sequences are not divisible by {sharing:,} GPUs; use {even:,}, say"
    if size is not None and steps is not None and total != size * steps * sharing:
        return (
            f"--global-batch {total:,} is not --micro-batch {size:,} x --grad-accum {steps:,} x {sharing:,} GPUs; leave one out"
        )
    each = total // sharing
    if each % (size or 1) or each % (steps or 1):
        flag, said = ("--micro-batch", size) if size is not None else ("--grad-accum", steps or 1)
        return f"{flag} {said:,} does not divide the {each:,} sequences of a GPU in --global-batch {total:,}"
    rounds = steps if steps is not None else each // (size or 1)
    return (
        f"{rounds:,} micro-batches of --global-batch {total:,} are no multiple of the {split.pp:,} stages of a pipeline; "
        "use another --global-batch, or another --pipeline-parallel"
    )
