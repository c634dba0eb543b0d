"""What do the head and the losses allocate?"""

from collections.abc import Iterator

from zeroplan.engines.formulas import sized
from zeroplan.engines.megatron.inputs import BATCH, BERT, MASK, REPORT, width_of_embedding
from zeroplan.engines.megatron.last_tokens import kept_of_last_tokens, last_tokens_backward
from zeroplan.engines.megatron.parameters import head_of, padded_vocabulary
from zeroplan.engines.megatron.rank import Rank
from zeroplan.engines.megatron.schedule import INPUT
from zeroplan.engines.megatron.verls_head import head_of_verl_backward, kept_by_verl
from zeroplan.ledger import Kind, Line
from zeroplan.numeric import ceil_div, maximum, minimum
from zeroplan.spec.described import Job
from zeroplan.transformer.families.megatron import PREDICTED
from zeroplan.transformer.megatron import UNGATED, element_of, keeps_placeholders, own_part, own_part_formula
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
    limit, e = options.wgrad_deferral_limit, element_of(recipe)
    count, counted = (minimum(limit, before), f"min({limit}, B-1)") if limit else (before, "(B-1)")
    logits = _logits(e, job, "gradients of logits of micro-batches before", DEFERRED)
    yield logits._replace(n_bytes=count * logits.n_bytes, formula=f"{counted}·{logits.formula}")
    each = own_part(e * batch.micro_batch_size * batch.seq_len * job.model.hidden_size, job)
    formula = own_part_formula("e·T·h", recipe)
    yield Line(Kind.ACTIVATIONS, count * each, "inputs of the head of micro-batches before", f"{counted}·{formula}", DEFERRED)
    earlier = maximum(0, before - 1)  # the schedule counts those of the last micro-batch
    more, counted = (minimum(limit, earlier), f"min({limit}, max(0, B-2))") if limit else (earlier, "max(0, B-2)")
    reason = "inputs of the stage and their gradients of micro-batches before, whose graph the head's inputs hold"
    yield Line(Kind.ACTIVATIONS, 2 * more * each, reason, f"2·{counted}·{formula}", INPUT)


#: At the peak of the loss: labels in the logits' order, maxima, mask and local ids of targets, their indices, and the targets'
#: logits twice. [bytes per token]
_TARGETS = 8 + 4 + 1 + 8 + 8 + 2 * 4


def each_token(rank: Rank, job: Job) -> Iterator[Line]:
    """Yield the few numbers per token beside the logits: the batch, the loss, and the final norm's statistics. [bytes]"""
    batch = job.batch
    tokens = ceil_div(batch.micro_batch_size * batch.seq_len, job.mesh.cp)
    whole = BATCH if job.recipe.megatron.pretrains == "gpt" else 4 + width_of_embedding(job)
    width = whole if rank.at else whole - width_of_embedding(job)
    yield sized(Kind.ACTIVATIONS, width, tokens, "labels and the rest of the batch", MASK, "ceil(T/C)")
    yield sized(Kind.LOGITS, _TARGETS, tokens, "what the loss has per token", TARGETS, "ceil(T/C)")
    wide, own = 8 if job.model.family in UNGATED else 4, own_part(batch.micro_batch_size * batch.seq_len, job)
    formula = f"{wide}·{own_part_formula('T', job.recipe)}"
    yield Line(Kind.ACTIVATIONS, wide * own, "statistics of the final norm", formula, REPORT)


def head_lines(job: Job) -> tuple[Line, ...]:
    """Return the inputs of the final norm and of the head, and all logits at the peak of the loss. [bytes]"""
    recipe = job.recipe
    tokens, hidden, e = job.batch.micro_batch_size * job.batch.seq_len, job.model.hidden_size, element_of(recipe)
    count, what, source = 2, "inputs of the final norm and of the head", REPORT
    if recipe.megatron.pretrains == "bert":  # BERT's head has a matrix, GELU and a norm before the vocabulary's matrix
        count, what, source = 5, "inputs of the final norm and of all parts of the head", BERT
    inputs = own_part(count * e * tokens * hidden, job)
    lines = [Line(Kind.LOGITS, inputs, what, own_part_formula(f"{count}·e·T·h", recipe), source)]
    lines += logits_of_loss(job)
    if recipe.megatron.cross_entropy_fusion_impl == "native" and recipe.megatron.last_tokens is None:
        lines.append(_logits(4, job, "a further copy in fp32, of the fused loss", FUSED))
    return tuple(lines)


def other_losses(job: Job) -> Iterator[Line]:
    """Yield what the losses of multi-token prediction keep. They run before the model's own loss, and backward after it. [bytes]"""
    recipe = job.recipe
    modules, tokens, e = recipe.megatron.mtp_num_layers, job.batch.micro_batch_size * job.batch.seq_len, element_of(recipe)
    if not modules:
        return
    inputs = own_part(3 * e * tokens * job.model.hidden_size, job)
    what = "of multi-token prediction, inputs of final norm and head, and of its hidden states' norm"
    yield sized(Kind.LOGITS, modules, inputs, what, PREDICTED, own_part_formula("3·e·T·h", recipe))
    in_place = recipe.megatron.cross_entropy_fusion_impl == "te" and recipe.megatron.transformer_engine_release != "2.18"
    kept = _logits(e if in_place else 4, job, "of multi-token prediction, logits of its loss", CROSS_ENTROPY)
    yield kept._replace(n_bytes=modules * kept.n_bytes, formula=f"{modules}·{kept.formula}")


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
    recipe, batch = job.recipe, job.batch
    e = element_of(recipe)
    if recipe.megatron.last_tokens is not None:
        yield from last_tokens_backward(job)
        return
    if recipe.megatron.cross_entropy_fusion_impl == "verl":
        yield from head_of_verl_backward(job)
        return
    yield _logits(e, job, "gradient of the logits", CROSS_ENTROPY)
    read = ceil_div(e * batch.micro_batch_size * batch.seq_len * job.model.hidden_size, job.mesh.cp)
    yield Line(Kind.ACTIVATION_GRADIENTS, read, "gradient of the head's input", "ceil(e·T·h/C)", HEAD)
    if recipe.sequence_parallel and job.mesh.tp > 1:
        part = own_part(e * batch.micro_batch_size * batch.seq_len * job.model.hidden_size, job)
        reason = "this rank's part of it, which ranks add up"
        yield Line(Kind.ACTIVATION_GRADIENTS, part, reason, own_part_formula("e·T·h", recipe), HEAD)
    if not keeps_placeholders(recipe) and not is_frozen(job.model, "head"):
        weight, formula = head_of(job)
        yield Line(Kind.TEMPORARY, e * weight, "gradient of the head's weight", f"e·{formula}", HEAD)


def _logits(width: int, job: Job, reason: str, source: str) -> Line:
    model, mesh = job.model, job.mesh
    tokens = job.batch.micro_batch_size * job.batch.seq_len
    if model.head_rows is not None:
        n_bytes = ceil_div(width * tokens * model.head_rows, mesh.cp)
        return Line(Kind.LOGITS, n_bytes, reason, f"ceil({width}·T·{model.head_rows}/C)", source)
    n_bytes = ceil_div(width * tokens * padded_vocabulary(job), mesh.cp * mesh.tp)
    return Line(Kind.LOGITS, n_bytes, reason, f"ceil({width}·T·V_p/(C·p))", source)
