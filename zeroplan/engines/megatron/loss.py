"""What do the head and the losses allocate?

They are Megatron-Core's own, verl's fused head and loss, and ms-swift's losses of each sequence's last token (``embedding``
and ``generative_reranker``).
"""

from collections.abc import Iterator

from zeroplan.engines.formulas import sized
from zeroplan.engines.megatron.inputs import BATCH, BERT, MASK, REPORT, width_of_embedding
from zeroplan.engines.megatron.leftover import INPUT
from zeroplan.engines.megatron.parameters import head_of, padded_vocabulary
from zeroplan.engines.megatron.rank import Rank
from zeroplan.ledger import Kind, Line
from zeroplan.numeric import Int, ceil_div, maximum, minimum
from zeroplan.spec.described import Job
from zeroplan.transformer.families.megatron import PREDICTED
from zeroplan.transformer.megatron import (
    element_of,
    hidden_bytes,
    keeps_placeholders,
    own_part,
    own_part_formula,
    tokens_of,
)
from zeroplan.transformer.params import is_frozen

CROSS_ENTROPY = "Megatron-LM 2026-08, megatron/core/tensor_parallel/cross_entropy.py, VocabParallelCrossEntropy"
TARGETS = (
    "Megatron-LM 2026-08, megatron/core/tensor_parallel/cross_entropy.py, VocabParallelCrossEntropy.calculate_predicted_logits"
)
FUSED = "Megatron-LM 2026-08, megatron/core/fusions/fused_cross_entropy.py, calculate_predicted_logits"
FUSED_BY_TRITON = "Transformer Engine 2026-08, pytorch/triton/cross_entropy.py, cross_entropy_forward"
IN_PLACE = "Transformer Engine 2.17, pytorch/triton/cross_entropy.py, cross_entropy_forward"
DEFERRED = "Megatron-LM 2026-08, megatron/core/pipeline_parallel/schedules.py, finish_embedding_wgrad_compute"
HEAD = "Megatron-LM 2026-08, megatron/core/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication.backward"


def deferred_lines(rank: Rank, job: Job) -> Iterator[Line]:
    """Yield what ``--defer-embedding-wgrad-compute`` keeps of earlier micro-batches.

    The head postpones its weight gradient, which needs its inputs and the gradients of its logits.
    """
    recipe, batch = job.recipe, job.batch
    options, before = recipe.megatron, batch.grad_accum_steps - 1
    if not (options.defer_embedding_wgrad_compute and rank.has_head):
        return
    limit, earlier = options.wgrad_deferral_limit, maximum(0, before - 1)  # the schedule counts those of the last micro-batch
    count, counted = (minimum(limit, before), f"min({limit}, B-1)") if limit else (before, "(B-1)")
    more, counted_more = (minimum(limit, earlier), f"min({limit}, max(0, B-2))") if limit else (earlier, "max(0, B-2)")
    logits = _logits(element_of(recipe), job, "gradients of logits of micro-batches before", DEFERRED)
    inputs = _own(1, job, "inputs of the head of micro-batches before", DEFERRED, Kind.ACTIVATIONS)
    reason = "inputs of the stage and their gradients of micro-batches before, whose graph the head's inputs hold"
    yield _times(count, counted, logits)
    yield _times(count, counted, inputs)
    yield _times(2 * more, f"2·{counted_more}", inputs._replace(reason=reason, source=INPUT))


def _times(count: Int, counted: str, line: Line) -> Line:
    return line._replace(n_bytes=count * line.n_bytes, formula=f"{counted}·{line.formula}")


#: At the peak of the loss: labels in the logits' order, maxima, mask and local ids of targets, their indices, and the targets'
#: logits twice. [bytes per token]
_TARGETS = 8 + 4 + 1 + 8 + 8 + 2 * 4


def each_token(rank: Rank, job: Job) -> Iterator[Line]:
    """Yield the few numbers per token beside the logits: the batch, the loss, and the final norm's statistics. [bytes]"""
    tokens = tokens_of(job)
    whole = BATCH if job.recipe.megatron.pretrains == "gpt" else 4 + width_of_embedding(job)
    width = whole if rank.at else whole - width_of_embedding(job)
    yield sized(Kind.ACTIVATIONS, width, tokens, "labels and the rest of the batch", MASK, "ceil(T/C)")
    yield sized(Kind.LOGITS, _TARGETS, tokens, "what the loss has per token", TARGETS, "ceil(T/C)")
    wide, own = 8 if job.model.traits.layer_norms else 4, own_part(job.batch.micro_batch_size * job.batch.seq_len, job)
    formula = f"{wide}·{own_part_formula('T', job.recipe)}"
    yield Line(Kind.ACTIVATIONS, wide * own, "statistics of the final norm", formula, REPORT)


def head_lines(job: Job) -> tuple[Line, ...]:
    """Return the inputs of the final norm and of the head, and all logits at the peak of the loss. [bytes]"""
    recipe = job.recipe
    count, what, source = 2, "inputs of the final norm and of the head", REPORT
    if recipe.megatron.pretrains == "bert":  # BERT's head has a matrix, GELU and a norm before the vocabulary's matrix
        count, what, source = 5, "inputs of the final norm and of all parts of the head", BERT
    lines = [_own(count, job, what, source), *logits_of_loss(job)]
    if recipe.megatron.cross_entropy_fusion_impl == "native" and recipe.megatron.last_tokens is None:
        lines.append(_logits(4, job, "a further copy in fp32, of the fused loss", FUSED))
    return tuple(lines)


def other_losses(job: Job) -> Iterator[Line]:
    """Yield what the losses of multi-token prediction keep. They run before the model's own loss, and backward after it. [bytes]"""
    recipe = job.recipe
    modules = recipe.megatron.mtp_num_layers
    if not modules:
        return
    what = "of multi-token prediction, inputs of final norm and head, and of its hidden states' norm"
    yield _times(modules, str(modules), _own(3, job, what, PREDICTED))
    in_place = recipe.megatron.cross_entropy_fusion_impl == "te" and recipe.megatron.transformer_engine_release != "2.18"
    width, what = element_of(recipe) if in_place else 4, "of multi-token prediction, logits of its loss"
    yield _times(modules, str(modules), _logits(width, job, what, CROSS_ENTROPY))


def logits_of_loss(job: Job) -> Iterator[Line]:
    """Yield the logits at the peak of the loss. [bytes]

    Its backward starts with as many: the fp32 tensor holds the gradient, which is cast to 16 bits.
    """
    recipe = job.recipe
    options, narrow = recipe.megatron, element_of(recipe) < 4
    if options.last_tokens is not None:
        yield from kept_of_last_tokens(job)
        return
    if options.cross_entropy_fusion_impl == "verl":
        yield from kept_by_verl(job)
        return
    fused = options.cross_entropy_fusion_impl == "te"
    if fused and options.transformer_engine_release != "2.18":
        reason = "logits, which their gradient is written over"
        yield _logits(element_of(recipe), job, reason, IN_PLACE)
        return
    source = FUSED_BY_TRITON if fused else CROSS_ENTROPY
    reason = "gradient of the logits in fp32" if fused else "logits in fp32"
    yield _logits(4, job, reason, source)
    if narrow:
        yield _logits(2, job, "logits in 16 bits, which those are made of", source)


def head_backward(job: Job) -> Iterator[Line]:
    """Yield the gradients in the head's backward: of logits and input, and of the weight unless it is fused. [bytes]"""
    recipe = job.recipe
    if recipe.megatron.last_tokens is not None:
        yield from last_tokens_backward(job)
        return
    if recipe.megatron.cross_entropy_fusion_impl == "verl":
        yield from head_of_verl_backward(job)
        return
    yield _logits(element_of(recipe), job, "gradient of the logits", CROSS_ENTROPY)
    read = ceil_div(hidden_bytes(job), job.mesh.cp)
    yield Line(Kind.ACTIVATION_GRADIENTS, read, "gradient of the head's input", "ceil(e·T·h/C)", HEAD)
    if recipe.sequence_parallel and job.mesh.tp > 1:
        yield _own(1, job, "this rank's part of it, which ranks add up", HEAD, Kind.ACTIVATION_GRADIENTS)
    if not keeps_placeholders(recipe) and not is_frozen(job.model, "head"):
        yield _of_weight(job, "gradient of the head's weight", HEAD)


def _of_weight(job: Job, reason: str, source: str) -> Line:
    elements, formula = head_of(job)
    return sized(Kind.TEMPORARY, element_of(job.recipe), elements, reason, source)._replace(formula=f"e·{formula}")


def _logits(width: int, job: Job, reason: str, source: str) -> Line:
    model, mesh = job.model, job.mesh
    tokens = job.batch.micro_batch_size * job.batch.seq_len
    if model.head_rows is not None:
        n_bytes = ceil_div(width * tokens * model.head_rows, mesh.cp)
        return Line(Kind.LOGITS, n_bytes, reason, f"ceil({width}·T·{model.head_rows}/C)", source)
    n_bytes = ceil_div(width * tokens * padded_vocabulary(job), mesh.cp * mesh.tp)
    return Line(Kind.LOGITS, n_bytes, reason, f"ceil({width}·T·V_p/(C·p))", source)


NORMALISED = "mcore-bridge 1.6.5, model/gpt_model.py, GPTModel._postprocess (read, not run)"
TWO_ROWS = "mcore-bridge 1.6.5, model/gpt_model.py, GPTModel._forward_generative_reranker (read, not run)"
_SCORES = 24
"""A token's two logits, their sum over ranks, the difference and its copy in the order of sequences. [bytes]"""


def kept_of_last_tokens(job: Job) -> Iterator[Line]:
    """Yield what the loss has of all tokens: normalised hidden states, or scores of two words. [bytes]

    A sequence-parallel rank gathers the tokens of all ranks. The embedding is then copied in the order of sequences.
    """
    if job.recipe.megatron.last_tokens == "reranker":
        yield sized(Kind.LOGITS, _SCORES, tokens_of(job), "scores of two words for all tokens", TWO_ROWS, "ceil(T/C)")
        yield from _gathered(job, TWO_ROWS)
        return
    yield _own(1, job, "normalised hidden states", NORMALISED)
    reason = "embeddings of all tokens, gathered and copied" if _gathers(job) else "embeddings of all tokens, copied"
    yield _whole(2 if _gathers(job) else 1, job, reason, NORMALISED)


def _gathers(job: Job) -> bool:
    """Whether a rank has only a part of the tokens beside the head's weight."""
    return job.recipe.sequence_parallel and bool(job.mesh.tp > 1)


def _gathered(job: Job, source: str) -> Iterator[Line]:
    if _gathers(job):
        yield _whole(1, job, "input of the head, gathered and kept", source)


def last_tokens_backward(job: Job) -> Iterator[Line]:
    """Yield what the backward makes of the last tokens' gradients, which it first puts among zeros for all tokens. [bytes]"""
    if job.recipe.megatron.last_tokens == "reranker":
        yield from kept_of_last_tokens(job)
        yield _whole(1, job, "gradient of the head's input", TWO_ROWS, Kind.ACTIVATION_GRADIENTS)
        yield _own(1, job, "this rank's part of it", TWO_ROWS, Kind.ACTIVATION_GRADIENTS)
        yield _of_weight(job, "gradient of the head's weight, of two rows among zeros", TWO_ROWS)
        return
    yield _whole(2, job, "embeddings of all tokens and their gradient", NORMALISED, Kind.ACTIVATION_GRADIENTS)
    yield _own(5, job, "gradients of hidden states before they are normalised", NORMALISED, Kind.ACTIVATION_GRADIENTS)


def _whole(count: int, job: Job, reason: str, source: str, kind: Kind = Kind.LOGITS) -> Line:
    """Return some tensors with the hidden states of all tokens of this context-parallel rank."""
    n_bytes = count * element_of(job.recipe) * tokens_of(job) * job.model.hidden_size
    return Line(kind, n_bytes, reason, f"{count}·e·ceil(T/C)·h", source)


def _own(count: int, job: Job, reason: str, source: str, kind: Kind = Kind.LOGITS) -> Line:
    """Return some tensors with the hidden states of this rank's tokens."""
    return Line(kind, own_part(count * hidden_bytes(job), job), reason, own_part_formula(f"{count}·e·T·h", job.recipe), source)


VERLS_HEAD = "verl b178a3cd, utils/kernel/linear_cross_entropy.py, LinearCrossEntropy, and models/mcore/model_forward_fused.py"
#: Columns of the vocabulary that verl's kernels take at a time in the forward and in the backward (utils/kernel/kernels.py).
_COLUMNS, _COLUMNS_BACKWARD = 1024, 9504


def kept_by_verl(job: Job) -> Iterator[Line]:
    """Yield what verl's fused head and loss keep beside the head's input, and the forward's sums. [bytes]

    With sequence parallelism the input is gathered and kept. The sums are three numbers for each piece of 1,024 columns and five
    results, for each token in fp32.
    """
    pieces = ceil_div(ceil_div(padded_vocabulary(job), job.mesh.tp), _COLUMNS)
    formula = f"4·(3·ceil(ceil(V_p/p)/{_COLUMNS}) + 5)·ceil(T/C)"
    reason = "sums of the loss for pieces of the vocabulary"
    yield Line(Kind.LOGITS, 4 * (3 * pieces + 5) * tokens_of(job), reason, formula, VERLS_HEAD)
    yield from _gathered(job, VERLS_HEAD)


def head_of_verl_backward(job: Job) -> Iterator[Line]:
    """Yield the backward of verl's fused head: a piece of the logits' gradient, and the gradients of input and weight. [bytes]

    A piece's product with the weight is added to the gradient of the input; the last piece is copied without its padding. Both at
    once are counted, which is at most one of them too much.
    """
    yield from _gathered(job, VERLS_HEAD)
    width = 2 * element_of(job.recipe) * _COLUMNS_BACKWARD
    yield sized(Kind.LOGITS, width, tokens_of(job), "two pieces of the gradient of the logits", VERLS_HEAD, "ceil(T/C)")
    reason = "gradient of the head's input, and a piece's part of it"
    yield _whole(2, job, reason, VERLS_HEAD, Kind.ACTIVATION_GRADIENTS)
    yield _of_weight(job, "gradient of the head's weight", VERLS_HEAD)
