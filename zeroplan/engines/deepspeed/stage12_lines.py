"""Which gradients and reduce buckets do ZeRO-1 and ZeRO-2 of DeepSpeed hold, line by line?"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

from zeroplan.engines.account import Symbol
from zeroplan.engines.deepspeed.buckets import Schedule, schedule, waiting_elements
from zeroplan.engines.deepspeed.flat import (
    Row,
    embedding_elements,
    embedding_symbol,
    frozen_elements,
    has_tied_head,
    largest_slice,
    partition_elements,
    touched_elements,
    trained_row,
)
from zeroplan.engines.deepspeed.offload import offloads_optimizer, on_host
from zeroplan.engines.deepspeed.passes import (
    Passes,
    RunPass,
    around_block,
    embedding_instant,
    kept_symbols,
)
from zeroplan.engines.deepspeed.sources import STAGE12
from zeroplan.engines.formulas import product, times
from zeroplan.engines.precisions import widths
from zeroplan.engines.sources import INPUT_BUFFER
from zeroplan.ledger import Kind, Line, Moment, Phase
from zeroplan.numeric import Bool, Int, maximum, minimum, where
from zeroplan.spec.batch import Batch
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.transformer.blocks import BackwardPoint

_KEEP = f"{STAGE12}, copy_grads_in_partition"
_BUCKETS = f"{STAGE12}, setup_buckets"
_ALL_REDUCE = f"{STAGE12}, allreduce_bucket"


class Job(NamedTuple):
    """What every formula of stages 1 and 2 is made of."""

    whole: Row
    recipe: RecipeSpec
    n_ranks: Int
    accumulates: Bool
    """There is more than one micro-batch per step."""
    element: int
    """Bytes of a weight and of a gradient."""
    master: int
    """Bytes of an element of the weights that the optimizer updates."""
    partition: Int
    """Elements of one rank's share."""
    touched: Int
    """Elements of all parameters that reach into rank 0's share."""
    largest: Int
    """Elements of the largest piece of one parameter within rank 0's share."""
    buckets: Schedule


def job_of(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Job:
    """Collect what the formulas need."""
    width = widths(recipe.precision)
    whole = trained_row(model)
    partition = partition_elements(whole, mesh.dp_shard)
    return Job(
        whole,
        recipe,
        mesh.dp_shard,
        batch.grad_accum_steps > 1,
        width.compute,
        width.stored,
        partition,
        touched_elements(whole, partition),
        largest_slice(whole, partition),
        schedule(whole, recipe.deepspeed.reduce_bucket_size),
    )


def symbols(job: Job, these: Passes) -> tuple[Symbol, ...]:
    """Return what the formulas of stages 1 and 2 count beyond the model's own symbols."""
    return (
        *_of_frozen(job),
        Symbol("M", where(job.accumulates, 1, 0), "1 where the step has more than one micro-batch, else 0"),
        Symbol("B", job.recipe.deepspeed.reduce_bucket_size, "reduce_bucket_size"),
        Symbol("G_p", job.touched, "elements of every parameter that reaches into this rank's share, each counted whole"),
        Symbol("G_max", job.largest, "elements of the largest piece of one parameter in this rank's share"),
        *kept_symbols(these),
    )


def _of_frozen(job: Job) -> tuple[Symbol, ...]:
    if job.whole.model.adapter is None:
        return ()
    return (
        Symbol("Ψ", job.whole.n_elements, "parameters that are trained"),
        Symbol("Ψ_frozen", frozen_elements(job.whole.model), "parameters that are frozen"),
    )


def frozen_weights(job: Job) -> tuple[Line, ...]:
    """Weights that get no gradient: in no group of the optimizer's, whole on every rank."""
    if job.whole.model.adapter is None:
        return ()
    n_bytes, formula = job.element * frozen_elements(job.whole.model), times(job.element, "Ψ_frozen")
    return (Line(Kind.PARAMETERS, n_bytes, "frozen weights, whole on every rank", formula, STAGE12),)


def starts_with(job: Job, block: int) -> bool:
    """Whether the first gradient of all is made in this block: head and final norm are frozen."""
    return job.whole.executed[-1].block == block


def keeps_partition(job: Job) -> bool:
    """Whether reduced gradients are added up in an fp32 tensor of exactly the share (``grad_accum_dtype`` fp32)."""
    return job.recipe.deepspeed.grad_accum_dtype == "fp32" and job.element == 2


def reduces_in_backward(recipe: RecipeSpec) -> bool:
    """Whether buckets are reduced as they fill: at stage 2, and at stage 1 where communication overlaps."""
    return recipe.zero_stage == 2 or bool(recipe.deepspeed.overlap_comm)


def has_buckets(job: Job) -> bool:
    """Whether there is a reduce bucket: not at stage 0, nor where all gradients are added up in fp32 at stage 1."""
    return job.recipe.zero_stage == 2 or (job.recipe.zero_stage == 1 and not keeps_partition(job))


def own_gradients(job: Job) -> Line:
    """Return the reduced gradients that this rank keeps for the step."""
    if keeps_partition(job):
        return Line(Kind.GRADIENTS, 4 * job.partition, "fp32 gradients of this rank's share", "8·ceil(Ψ/(2·N))", STAGE12)
    reason = "gradients of every parameter that reaches into this rank's share, each whole"
    line = Line(Kind.GRADIENTS, job.element * job.touched, reason, times(job.element, "G_p"), _KEEP)
    return on_host(line) if offloads_optimizer(job.recipe) else line


def window(job: Job) -> tuple[Line, ...]:
    """Return what earlier micro-batches of the step left behind, during the forward."""
    return (earlier_gradients(job), *kept_buckets(job))


def earlier_gradients(job: Job) -> Line:
    """Gradients of the micro-batches before: this rank's own at stage 2, all of them at stage 1."""
    held = own_gradients(job) if job.recipe.zero_stage == 2 else _every_gradient(job)
    n_bytes = where(job.accumulates, held.n_bytes, 0)
    return Line(held.kind, n_bytes, "gradients of the micro-batches before", _if_several(held.formula), held.source)


def _every_gradient(job: Job) -> Line:
    return Line(whole_gradients(job), job.element * job.whole.n_elements, "all gradients", times(job.element, "Ψ"), STAGE12)


@lru_cache(maxsize=256)
def _if_several(formula: str) -> str:
    return f"M·{formula}"


def bucket_lines(job: Job) -> tuple[Line, ...]:
    """Return the reduce buckets: two where communication overlaps, none without contiguous gradients."""
    options = job.recipe.deepspeed
    if not options.contiguous_gradients or not has_buckets(job):
        return ()
    count = 2 if options.overlap_comm else 1
    n_bytes = count * job.element * options.reduce_bucket_size
    reason = "two reduce buckets, reduce_bucket_size each" if options.overlap_comm else "reduce bucket, reduce_bucket_size"
    return (Line(Kind.REDUCE, n_bytes, reason, times(count * job.element, "B"), _BUCKETS),)


def kept_buckets(job: Job) -> tuple[Line, ...]:
    """Return the bucket before the first gradient of a micro-batch: at stage 1 it stays until the last one is reduced."""
    if job.recipe.zero_stage == 2:
        return ()
    reason = "reduce bucket, kept between micro-batches"
    buckets = bucket_lines(job)
    if not buckets:
        return (Line(Kind.REDUCE, 0, reason, "0", _BUCKETS),)
    n_bytes = where(job.accumulates, buckets[0].n_bytes, 0)
    return (Line(Kind.REDUCE, n_bytes, reason, _if_several(buckets[0].formula), _BUCKETS),)


def gradient_line(job: Job, elements: Int, reason: str, symbol: str = "") -> Line:
    """Return whole gradients of ``elements`` elements, which ``symbol`` stands for if given. [bytes]"""
    formula = times(job.element, symbol) if symbol else product(job.element, elements)
    return Line(whole_gradients(job), job.element * elements, reason, formula, STAGE12)


def whole_gradients(job: Job) -> Kind:
    """Return what whole gradients are: at stage 0 the optimizer takes them, at others a share."""
    return Kind.UNSHARDED_GRADIENTS if job.recipe.zero_stage else Kind.GRADIENTS


def embedding_gradient(job: Job) -> Line:
    """Return the whole gradient of the token embedding. [bytes]"""
    elements = embedding_elements(job.whole)
    return gradient_line(job, elements, "gradient of the embedding", embedding_symbol(job.whole) if elements else "")


def copy_line(job: Job, elements: Int) -> Line:
    """Return the copy in which a bucket of ``elements`` elements is all-reduced. [bytes]"""
    formula = product(job.element, elements)
    return Line(Kind.REDUCE, job.element * elements, "copy of the bucket that is all-reduced", formula, _ALL_REDUCE)


def tied_head(job: Job) -> tuple[Line, ...]:
    """With a tied head, its gradient waits for the embedding's before either reaches the bucket."""
    if not has_tied_head(job.whole):
        return ()
    elements = embedding_elements(job.whole)
    return (
        gradient_line(job, elements, "gradient of the tied head, waiting for the embedding's", embedding_symbol(job.whole)),
    )


def at_the_embedding(job: Job, these: Passes, beside: tuple[Line, ...]) -> Iterator[Moment]:
    """Return the moments of the embedding's gradient, with what an engine has ``beside`` activations and a tied head's gradient.

    With a tied head both gradients are added up in a third tensor: autograd adds in place only to what nothing else refers to,
    and the head's is a transposed view, which refers to what it is a view of.
    """
    at, both = embedding_instant(these), (*beside, *tied_head(job))
    yield Moment(at.name, at.phase, (*at.lines, *both))
    if has_tied_head(job.whole) and job.recipe.loss == "full":
        elements = embedding_elements(job.whole)
        reason, formula = "sum of the embedding's and the tied head's", times(job.element, embedding_symbol(job.whole))
        total = Line(whole_gradients(job), job.element * elements, reason, formula, INPUT_BUFFER)
        lines = (*these.head.at_embedding, *these.output, *both, total)
        yield Moment("sum of the embedding's and the tied head's gradient", at.phase, lines)


def block_moments(
    these: Passes, run: RunPass, block: Int, name: str, extra: Callable[[BackwardPoint], tuple[Line, ...]]
) -> Iterator[Moment]:
    """Return the moments at each point in the backward of a block, with an engine's ``extra`` lines."""
    around = around_block(these, run, block)
    for point in run.block.points:
        yield Moment(f"{name}: {point.name}", Phase.BACKWARD, (*around, *point.lines, *extra(point)))


def oversize_copy(job: Job, low: Int, fill: Int) -> Int:
    """Return the elements copied for a gradient above the bucket: slices of ranks, until they are more than a bucket. [elements]

    The first slices begin within a rank's share, later ones are whole shares. A slice alone is reduced where it is. Source:
    ``allreduce_and_scatter``.
    """
    share, size = job.partition, job.buckets.size
    first = minimum(fill, share - low % share)
    begun = minimum(fill, first + where(first > size, 0, (size - first) // share + 1) * share)
    later = minimum(fill - begun, (size // share + 1) * share)
    return maximum(where(begun > first, begun, 0), where(later > share, later, 0))


@lru_cache(maxsize=4096)
def waiting(buckets: Schedule, element: int, block: int, gradients: int, current: int) -> Line:
    """Return the gradient being made, and one that is too large for the bucket and waits for the next to arrive. [bytes]"""
    latest, before = waiting_elements(buckets, block, gradients)
    elements = current + before if current else latest
    reason = "gradient just made, and one that waits outside the bucket"
    return Line(Kind.UNSHARDED_GRADIENTS, element * elements, reason, product(element, elements), STAGE12)
