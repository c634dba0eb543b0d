"""What a pipeline's rank has of sequences that context-parallel ranks share, cut all at once for a whole step.

torchtitan of 2025 (``train.py``, ``forward_backward_step``) puts one ``context_parallel`` around the schedule's step. It cuts token
ids or labels, and what says positions, of which every stage needs its own: in place, which gives no memory back.
"""

from zeroplan.engines.formulas import several
from zeroplan.ledger import Kind, Line
from zeroplan.numeric import Int
from zeroplan.spec.batch import Batch
from zeroplan.transformer.context import BUFFERS


def cut_for_a_step(batch: Batch, ranks: int, *, sequences: Int) -> tuple[Line, Line]:
    """What there is beside so many ``sequences`` of ids or labels, and positions, as long as passes are taken. [bytes]

    Copies to be restored, and the shares; the last of those, of the positions, has two names. ``batch`` is one rank's.
    """
    rows, length = sequences + 1, 8 * batch.seq_len
    copies = several((rows, length * ranks))
    return (
        Line(Kind.ACTIVATIONS, rows * length * ranks, "copies of whole sequences, to be restored", copies, BUFFERS),
        Line(Kind.ACTIVATIONS, (rows + 1) * length, "this rank's shares of them", several((rows + 1, length)), BUFFERS),
    )
