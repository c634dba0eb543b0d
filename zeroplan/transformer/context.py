"""The memory that context parallelism changes outside the blocks: each rank's share of the batch, and labels shifted beforehand."""

from zeroplan.ledger import Kind, Line, Role
from zeroplan.spec.batch import Batch
from zeroplan.transformer.blocks import HeadPass

BUFFERS = "torch 2.13, torch/distributed/tensor/experimental/_context_parallel/_attention.py, context_parallel"


def whole_sequences(batch: Batch, ranks: int, reason: str = "ids, labels and positions of whole sequences") -> Line:
    """Return the training loop's whole batch: ids, labels, shifted labels and positions. ``batch`` is one rank's share."""
    n_bytes = 8 * ranks * batch.seq_len * (3 * batch.micro_batch_size + 1)
    return Line(Kind.ACTIVATIONS, n_bytes, reason, f"8·{ranks}·s·(3·b+1)", BUFFERS)


def with_shared_sequences(head: HeadPass, batch: Batch, ranks: int) -> HeadPass:
    """Return ``head`` for one rank's share of the sequences, ``batch``.

    ``context_parallel`` cuts the batch in place, which frees no memory, and keeps copies of the whole batch to restore it. Its
    variables hold the shares, the last share twice. The loss gets shifted labels.
    """
    others = [line for line in head.shared if line.tag.role is not Role.BATCH]
    whole = whole_sequences(batch, ranks, "copies of them, to restore them")
    n_bytes = 8 * batch.seq_len * (3 * batch.micro_batch_size + 2)
    shares = Line(Kind.ACTIVATIONS, n_bytes, "this rank's shares of them", "8·s·(3·b+2)", BUFFERS)
    points = tuple([point._replace(lines=without_labels(point.lines)) for point in head.points])
    return head._replace(
        shared=(whole, shares, *others),
        loss=without_labels(head.loss),
        loss_forward=without_labels(head.loss_forward),
        points=points,
    )


def without_labels(lines: tuple[Line, ...]) -> tuple[Line, ...]:
    """Return the lines but those of labels."""
    return tuple(line for line in lines if line.tag.role is not Role.LABELS)
