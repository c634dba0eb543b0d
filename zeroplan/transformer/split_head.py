"""What do embedding, final norm, head and loss cost on one tensor-parallel rank?

The embedding and the head are split by the vocabulary, the loss is made where the logits are (``loss_parallel``), and the final
norm reads a share of the sequence.
"""

from zeroplan.ledger import Kind, Line, Module, Role, Tag
from zeroplan.numeric import Int, maximum, minimum
from zeroplan.spec.batch import Batch
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.blocks import AtEmbedding, BackwardPoint, Compute, HeadPass
from zeroplan.transformer.families.definition import ROTARY
from zeroplan.transformer.families.parts import GRADIENT, SAVED, TEMPORARY
from zeroplan.transformer.families.sharded import GATHER, SCATTER
from zeroplan.transformer.families.traced import split_norm
from zeroplan.transformer.families.widths import Widths, widths
from zeroplan.transformer.head import MODEL, OF_THE_BATCH
from zeroplan.transformer.losses import AT_HEAD, AT_LOSS, FULL, HEAD, HEAD_INPUT, LABELS

LOGITS = Kind.LOGITS
LOSS = "torch 2.13, torch/distributed/tensor/parallel/loss.py, loss_parallel"
#: What the model's forward holds by name until it is over.
HELD_NORM = Tag(Role.NAMED, Module.FINAL_NORM)
EMBEDDING = "torch 2.13, torch/distributed/tensor/_ops/_embedding_ops.py, embedding_dense_backward_strategy"


def split_head(model: ModelSpec, compute: Compute, batch: Batch, *, recomputed: bool, fp32_output: bool) -> HeadPass:
    """Return what one of ``compute.tp`` ranks holds outside its blocks, all logits made at once.

    ``recomputed`` and ``fp32_output`` are as in :func:`zeroplan.transformer.head.head_pass`. Leaves out the loss itself and the
    sum of label weights (4 bytes each).
    """
    x, p = widths(model, compute, batch), compute.tp
    norm, share = split_norm(model, x, p), x.element * (x.tokens // p) * x.hidden
    logits, matrix = x.tokens * (model.vocab_size // p), x.hidden * (model.vocab_size // p)
    read = Line(
        SAVED, x.element * x.tokens * x.hidden, "input of the head, gathered along the sequence", "e·T·h", GATHER, HEAD_INPUT
    )
    kept = (Line(LOGITS, 4 * logits, "log-softmax of the logits, fp32", "4·T·V/p", LOSS), _labels(x))
    output = Line(LOGITS, x.element * logits, "logits", "e·T·V/p", HEAD)
    wide = Line(LOGITS, 4 * logits, "logits in fp32", "4·T·V/p", FULL)
    named = Line(TEMPORARY, share, "final norm's output, held by name", "e·T/p·h", HEAD, HELD_NORM)
    forward = (output, *(() if x.element == 4 else (wide,)), *kept, *_made_by_the_loss(x, logits=logits), named)
    at_norm = tuple(point._replace(gradients=matrix + point.gradients) for point in norm.points)
    saved = (*norm.saved, read)
    table = Line(SAVED, 2 * x.element * x.seq_len * x.head_dim, "rotary cos and sin", "2·e·s·d", ROTARY)
    embedded = Line(TEMPORARY, share, "token embeddings, a share of the sequence, held by name", "e·T/p·h", MODEL)
    return HeadPass(
        (
            Line(SAVED, 8 * x.tokens, "input ids, int64", "8·T", HEAD, OF_THE_BATCH),
            Line(SAVED, 8 * x.seq_len, "position ids, int64", "8·s", HEAD, OF_THE_BATCH),
            table,
        ),
        saved,
        forward,
        (wide if fp32_output else output,),
        share,
        (),
        () if recomputed or x.element == 4 else (embedded,),
        kept,
        (*_points(x, saved, kept, logits=logits, matrix=matrix, share=share), *at_norm),
        hidden_formula="e·T/p·h",
        with_blocks=(table,),
    )


def _labels(x: Widths) -> Line:
    """With one sequence the shifted labels are a view of the padded ones, which are one longer."""
    n_bytes = 8 * x.tokens + 8 * maximum(0, 2 - x.micro_batch)
    return Line(LOGITS, n_bytes, "labels, shifted", "8·T + 8·max(0, 2-b)", FULL, LABELS)


def _made_by_the_loss(x: Widths, *, logits: Int) -> tuple[Line, ...]:
    padded = 8 * (x.tokens + x.micro_batch) - 8 * (x.tokens + 1) * maximum(0, 2 - x.micro_batch)
    return (
        Line(LOGITS, padded, "labels, padded", "8·(T+b) - 8·(T+1)·max(0, 2-b)", FULL, LABELS),
        Line(LOGITS, 4 * logits, "logits less the largest of their row, fp32", "4·T·V/p", LOSS),
        Line(LOGITS, 12 * x.tokens, "largest logit, sum and logarithm of each row, fp32", "12·T", LOSS),
    )


def _points(
    x: Widths, saved: tuple[Line, ...], kept: tuple[Line, ...], *, logits: Int, matrix: int, share: Int
) -> tuple[BackwardPoint, ...]:  # fmt: skip
    """The backward of the loss, of the head's product, and of what gathered its input."""
    whole = x.element * x.tokens * x.hidden
    of_the_loss = (
        *saved,
        *kept,
        Line(LOGITS, 12 * logits, "gradients of log-softmax and of the fp32 logits, and softmax", "12·T·V/p", LOSS),
        Line(LOGITS, 33 * x.tokens, "masks, targets and weights of each token", "33·T", LOSS),
    )
    through = Line(GRADIENT, whole, "gradient of the head's input, a rank's part", "e·T·h", HEAD)
    product = (*saved, Line(LOGITS, x.element * logits, "gradient of the logits", "e·T·V/p", FULL), through)
    cut = Line(TEMPORARY, whole, "gradient of the head's input, cut by ranks", "e·T·h", SCATTER)
    made = Line(GRADIENT, share, "gradient of the final norm's output", "e·T/p·h", SCATTER)
    return (
        BackwardPoint("loss", of_the_loss, 0, 0, 0, place=AT_LOSS),
        BackwardPoint("head", product, matrix, matrix, 0, place=AT_HEAD),
        BackwardPoint("head: its input's gradient scattered", (*saved[:-1], through, cut, made), matrix, 0, 0, place=AT_HEAD),
    )


def at_the_embedding(model: ModelSpec, compute: Compute, batch: Batch) -> AtEmbedding:
    """What the embedding's backward takes beside the gradients that are there: DTensor makes that of the whole embedding.

    It takes the rank's share of it afterwards.
    """
    x = widths(model, compute, batch)
    gathered = x.element * x.tokens * x.hidden
    whole = x.element * model.vocab_size * x.hidden
    return AtEmbedding(
        Line(GRADIENT, gathered, "gradient of the embedding's output, gathered along the sequence", "e·T·h", GATHER),
        Line(TEMPORARY, gathered * minimum(1, x.micro_batch - 1), "the same, rank by rank", "e·T·h·min(1, b-1)", GATHER),
        Line(Kind.UNSHARDED_GRADIENTS, whole, "gradient of the whole embedding", "e·h·V", EMBEDDING),
    )
