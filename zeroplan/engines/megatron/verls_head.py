"""What does verl's fused head and loss allocate?"""

from collections.abc import Iterator

from zeroplan.engines.megatron.parameters import head_of, padded_vocabulary
from zeroplan.ledger import Kind, Line
from zeroplan.numeric import ceil_div
from zeroplan.spec.described import Job
from zeroplan.transformer.megatron import element_of

VERLS_HEAD = "verl b178a3cd, utils/kernel/linear_cross_entropy.py, LinearCrossEntropy, and models/mcore/model_forward_fused.py"
#: Columns of the vocabulary that verl's kernels take at a time in the forward and in the backward (utils/kernel/kernels.py).
_COLUMNS, _COLUMNS_BACKWARD = 1024, 9504


def kept_by_verl(job: Job) -> Iterator[Line]:
    """Yield what verl's fused head and loss keep beside the head's input, and the forward's sums. [bytes]

    With sequence parallelism the input is gathered and kept. The sums are three numbers for each piece of 1,024 columns and five
    results, for each token in fp32.
    """
    pieces = ceil_div(ceil_div(padded_vocabulary(job), job.mesh.tp), _COLUMNS)
    tokens = ceil_div(job.batch.micro_batch_size * job.batch.seq_len, job.mesh.cp)
    formula = f"4·(3·ceil(ceil(V_p/p)/{_COLUMNS}) + 5)·ceil(T/C)"
    reason = "sums of the loss for pieces of the vocabulary"
    yield Line(Kind.LOGITS, 4 * (3 * pieces + 5) * tokens, reason, formula, VERLS_HEAD)
    yield from _gathered(job)


def _gathered(job: Job) -> Iterator[Line]:
    if job.recipe.sequence_parallel and job.mesh.tp > 1:
        tokens, e = ceil_div(job.batch.micro_batch_size * job.batch.seq_len, job.mesh.cp), element_of(job.recipe)
        n_bytes = e * tokens * job.model.hidden_size
        yield Line(Kind.LOGITS, n_bytes, "input of the head, gathered and kept", "e·ceil(T/C)·h", VERLS_HEAD)


def head_of_verl_backward(job: Job) -> Iterator[Line]:
    """Yield the backward of verl's fused head: a piece of the logits' gradient, and the gradients of input and weight. [bytes]

    A piece's product with the weight is added to the gradient of the input; the last piece is copied without its padding. Both at
    once are counted, which is at most one of them too much.
    """
    e, tokens = element_of(job.recipe), ceil_div(job.batch.micro_batch_size * job.batch.seq_len, job.mesh.cp)
    yield from _gathered(job)
    reason = "two pieces of the gradient of the logits"
    yield Line(Kind.LOGITS, 2 * e * _COLUMNS_BACKWARD * tokens, reason, f"2·e·{_COLUMNS_BACKWARD}·ceil(T/C)", VERLS_HEAD)
    read = 2 * e * tokens * job.model.hidden_size
    reason = "gradient of the head's input, and a piece's part of it"
    yield Line(Kind.ACTIVATION_GRADIENTS, read, reason, "2·e·ceil(T/C)·h", VERLS_HEAD)
    weight, formula = head_of(job)
    yield Line(Kind.TEMPORARY, e * weight, "gradient of the head's weight", f"e·{formula}", VERLS_HEAD)
