"""The gradients and reduce buckets of DeepSpeed's ZeRO-1 and ZeRO-2, line by line."""

from functools import lru_cache
from typing import NamedTuple

from zeroplan.engines.account import Symbol
from zeroplan.engines.deepspeed.buckets import Schedule, schedule, waiting_elements
from zeroplan.engines.deepspeed.gradients import sums_in_fp32
from zeroplan.engines.deepspeed.muon import SHARES, row_of_muon, symbols_of_muon
from zeroplan.engines.deepspeed.offload import offloads_optimizer, on_host
from zeroplan.engines.deepspeed.sources import SHARE, STAGE12
from zeroplan.engines.formulas import sized
from zeroplan.engines.frozen import frozen_lines, frozen_symbols
from zeroplan.engines.passes import Passes, kept_symbols
from zeroplan.engines.precisions import widths
from zeroplan.engines.rows import Row, largest_slice, partition_elements, touched_elements, trained_row
from zeroplan.ledger import Kind, Line
from zeroplan.numeric import Int, where
from zeroplan.spec.batch import Batch
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec

_KEEP = f"{STAGE12}, copy_grads_in_partition"


class Job(NamedTuple):
    """The quantities in the formulas of stages 1 and 2."""

    whole: Row
    recipe: RecipeSpec
    n_ranks: Int
    micro_batches: Int
    """Micro-batches per step."""
    element: int
    """Bytes of a weight and of a gradient."""
    master: int
    """Bytes of an element of the optimizer's weights."""
    partition: Int
    """Elements of one rank's shard."""
    touched: Int
    """Elements of all parameters that overlap rank 0's shard."""
    largest: Int
    """Elements of the largest piece of one parameter within rank 0's shard."""
    buckets: Schedule

    @property
    def share(self) -> str:
        """One rank's shard in formulas."""
        return SHARES if self.by_muon else SHARE

    @property
    def by_muon(self) -> bool:
        """Whether DeepSpeed's Muon steps the first of two parameter groups."""
        return len(self.whole.groups) > 1


def job_of(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Job:
    """Return the quantities of a job."""
    width = widths(recipe.precision)
    whole = row_of_muon(model) if recipe.optimizer == "muon" else trained_row(model)
    partition = partition_elements(whole, mesh.dp_shard)
    return Job(
        whole,
        recipe,
        mesh.dp_shard,
        batch.grad_accum_steps,
        width.compute,
        width.stored,
        partition,
        touched_elements(whole, mesh.dp_shard),
        largest_slice(whole, mesh.dp_shard),
        schedule(whole, recipe.deepspeed.reduce_bucket_size),
    )


def symbols(job: Job, these: Passes) -> tuple[Symbol, ...]:
    """Return the symbols in the formulas of stages 1 and 2 that the model's legend lacks."""
    return (
        *frozen_symbols(job.whole.model),
        Symbol("M", where(job.micro_batches > 1, 1, 0), "1 where the step has more than one micro-batch, else 0"),
        Symbol("B", job.recipe.deepspeed.reduce_bucket_size, "reduce_bucket_size"),
        Symbol("G_p", job.touched, "elements of every parameter that reaches into this rank's share, each counted whole"),
        Symbol("G_max", job.largest, "elements of the largest piece of one parameter in this rank's share"),
        *(symbols_of_muon(job) if job.by_muon else ()),
        *kept_symbols(these),
    )


def frozen_weights(job: Job) -> tuple[Line, ...]:
    """Return the frozen weights: in no parameter group of the optimizer, whole on every rank."""
    return frozen_lines(job.whole.model, job.element, job.element, "weights", STAGE12)


def own_gradients(job: Job) -> Line:
    """Return the reduced gradients that this rank keeps for the step."""
    if sums_in_fp32(job.recipe):
        return Line(Kind.GRADIENTS, 4 * job.partition, "fp32 gradients of this rank's share", "8·ceil(Ψ/(2·N))", STAGE12)
    reason = "gradients of every parameter that reaches into this rank's share, each whole"
    line = sized(Kind.GRADIENTS, job.element, job.touched, reason, _KEEP, "G_p")
    return on_host(line) if offloads_optimizer(job.recipe) else line


def gradient_line(job: Job, elements: Int, reason: str, symbol: str = "") -> Line:
    """Return whole gradients of ``elements`` elements, with ``symbol`` in the formula if given. [bytes]"""
    kind = Kind.UNSHARDED_GRADIENTS if job.recipe.zero_stage else Kind.GRADIENTS  # at stage 0 the optimizer reads them directly
    return sized(kind, job.element, elements, reason, STAGE12, symbol)


@lru_cache(maxsize=4096)
def waiting(buckets: Schedule, element: int, block: int, gradients: int, current: int) -> Line:
    """Return the gradient being made, and one too large for the bucket that waits for the next arrival. [bytes]"""
    latest, before = waiting_elements(buckets, block, gradients)
    elements = current + before if current else latest
    reason = "gradient just made, and one that waits outside the bucket"
    return sized(Kind.UNSHARDED_GRADIENTS, element, elements, reason, STAGE12)
