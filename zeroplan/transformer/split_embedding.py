"""The memory that a vocabulary-parallel embedding's backward allocates on one tensor-parallel rank."""

from zeroplan.ledger import Kind, Line
from zeroplan.numeric import minimum
from zeroplan.spec.batch import Batch
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.blocks import AtEmbedding, Compute
from zeroplan.transformer.families.sharded import GATHER
from zeroplan.transformer.families.tags import GRADIENT, TEMPORARY
from zeroplan.transformer.families.widths import widths

EMBEDDING = "torch 2.13, torch/distributed/tensor/_ops/_embedding_ops.py, embedding_dense_backward_strategy"


def at_the_embedding(model: ModelSpec, compute: Compute, batch: Batch) -> AtEmbedding:
    """Return the tensors that the embedding's backward allocates.

    DTensor makes the gradient of the whole embedding on every rank, and then cuts the rank's shard from it.
    """
    x = widths(model, compute, batch)
    gathered = x.element * x.tokens * x.hidden
    whole = x.element * model.vocab_size * x.hidden
    return AtEmbedding(
        Line(GRADIENT, gathered, "gradient of the embedding's output, gathered along the sequence", "e·T·h", GATHER),
        Line(TEMPORARY, gathered * minimum(1, x.micro_batch - 1), "the same, rank by rank", "e·T·h·min(1, b-1)", GATHER),
        Line(Kind.UNSHARDED_GRADIENTS, whole, "gradient of the whole embedding", "e·h·V", EMBEDDING),
    )
