"""What do the parts outside the blocks cost in one pass: embedding, position tables, final norm, head and loss?"""

from zeroplan.ledger import Kind, Line
from zeroplan.numeric import maximum
from zeroplan.spec.batch import Batch
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.blocks import BackwardPoint, Compute, HeadPass
from zeroplan.transformer.families.norms import FINAL, LAYER_FINAL, layer_norm, rms_norm
from zeroplan.transformer.families.parts import GRADIENT, SAVED, TEMPORARY, Part
from zeroplan.transformer.families.widths import Widths, widths

HEAD = "transformers 5.23, models/llama/modeling_llama.py, LlamaForCausalLM.forward"
MODEL = "transformers 5.23, models/llama/modeling_llama.py, LlamaModel.forward"
GPT2 = "transformers 5.23, models/gpt2/modeling_gpt2.py, GPT2Model.forward"
MASK = "transformers 5.23, masking_utils.py, create_causal_mask"
ROTARY = "transformers 5.23, models/llama/modeling_llama.py, LlamaRotaryEmbedding.forward"
LOSS = "transformers 5.23, loss/loss_utils.py, ForCausalLMLoss"
LOGITS = Kind.LOGITS


def head_pass(model: ModelSpec, compute: Compute, batch: Batch, *, recomputed: bool = False) -> HeadPass:
    """Return what the model holds outside its blocks, with the causal-LM loss that transformers computes.

    ``recomputed`` says that blocks are recomputed in backward: they need an eager attention mask until the end, and keep the
    first block's input themselves. The logits are upcast to fp32 and the labels shifted by padding. Leaves out: a chunked or
    fused loss, dropout after the embedding, the loss itself and the sum of label weights (4 bytes each).
    """
    x = widths(model, compute, batch)
    norm = layer_norm(x, LAYER_FINAL) if x.fused_projection else rms_norm(x, FINAL)
    head_input = Line(SAVED, x.element * x.tokens * x.hidden, "input of the head", "e·T·h", HEAD)
    saved = (*norm.saved, head_input)
    output = Line(LOGITS, x.element * x.tokens * model.vocab_size, "logits", "e·T·V", HEAD)
    kept = _kept_by_the_loss(x, model.vocab_size)
    gradients = Line(LOGITS, 8 * x.tokens * model.vocab_size, "gradients of log-softmax and of the fp32 logits", "8·T·V", LOSS)
    loss_backward = (kept[0], gradients)
    (named, first_input), mask = _embedding_by_name(x), _mask(x)
    return HeadPass(
        (*_shared(model, x), *(mask if recomputed else ())),
        saved,
        (output, *kept, *_loss_temporaries(x, model.vocab_size)),
        loss_backward,
        _norm_backward(x, norm),
        (output,),
        x.residual * x.tokens * x.hidden,
        (*named, *(() if recomputed else mask)),
        () if recomputed else first_input,
        kept,
        _points(x, model.vocab_size, saved=saved, loss=loss_backward, norm=norm),
    )


def _shared(model: ModelSpec, x: Widths) -> tuple[Line, ...]:
    ids = Line(SAVED, 8 * x.tokens, "input ids, int64", "8·T", HEAD)
    if model.positions:
        return ids, Line(SAVED, 8 * x.seq_len, "position ids, int64", "8·s", GPT2)
    return ids, Line(SAVED, 2 * x.residual * x.seq_len * x.head_dim, "rotary cos and sin", "2·r·s·d", ROTARY)


def _embedding_by_name(x: Widths) -> tuple[tuple[Line, ...], tuple[Line, ...]]:
    """What the model's forward holds by name of the embedding: tensors of their own, and the one that is block 0's input.

    Learned positions are added to the token embeddings, so that block 0's input is another tensor; where block 0's first norm
    saves its input as it is, it counts there.
    """
    embedded = Line(TEMPORARY, x.residual * x.tokens * x.hidden, "token embeddings, held by name", "r·T·h", MODEL)
    if x.fused_projection:
        positions = Line(TEMPORARY, x.residual * x.seq_len * x.hidden, "position embeddings, held by name", "r·s·h", GPT2)
        return (embedded, positions), ()
    return (), () if x.residual == 4 else (embedded,)


def _mask(x: Widths) -> tuple[Line, ...]:
    if x.attention != "eager":
        return ()
    n_bytes = x.residual * x.micro_batch * x.seq_len * x.seq_len
    return (Line(TEMPORARY, n_bytes, "attention mask of eager attention", "r·b·s²", MASK),)


def _kept_by_the_loss(x: Widths, vocab: int) -> tuple[Line, Line]:
    return (
        Line(LOGITS, 4 * x.tokens * vocab, "log-softmax of the logits, fp32", "4·T·V", LOSS),
        # With one sequence the shifted labels are a view of the padded ones, which are one longer.
        Line(LOGITS, 8 * x.tokens + 8 * maximum(0, 2 - x.micro_batch), "labels, shifted", "8·T + 8·max(0, 2-b)", LOSS),
    )


def _loss_temporaries(x: Widths, vocab: int) -> tuple[Line, ...]:
    lines: tuple[Line, ...] = ()
    if x.element != 4:
        lines = (Line(LOGITS, 4 * x.tokens * vocab, "logits in fp32", "4·T·V", LOSS),)
    if x.autocast:
        wide = Line(TEMPORARY, 4 * x.tokens * x.hidden, "final norm's output in fp32, held by name", "4·T·h", HEAD)
        lines = (*lines, wide)
    padded = 8 * (x.tokens + x.micro_batch) - 8 * (x.tokens + 1) * maximum(0, 2 - x.micro_batch)
    return (*lines, Line(LOGITS, padded, "labels, padded", "8·(T+b) - 8·(T+1)·max(0, 2-b)", LOSS))


def _norm_backward(x: Widths, norm: Part) -> tuple[Line, ...]:
    """List the final norm's backward: no residual gradient exists yet that the direct one could be added to."""
    lines = norm.points[0].lines
    if x.fused_projection or x.residual != 4:
        return lines
    return (*lines, Line(TEMPORARY, 4 * x.tokens * x.hidden, "gradient of the input beside its square, fp32", "4·T·h", MODEL))


def _points(x: Widths, vocab: int, *, saved: tuple[Line, ...], loss: tuple[Line, ...], norm: Part) -> tuple[BackwardPoint, ...]:
    matrix = x.hidden * vocab
    logits = Line(LOGITS, x.element * x.tokens * vocab, "gradient of the logits", "e·T·V", LOSS)
    through = Line(GRADIENT, x.element * x.tokens * x.hidden, "gradient of the head's input", "e·T·h", HEAD)
    product = (*saved, logits, through)
    casts = matrix if x.autocast else 0
    at_loss = BackwardPoint("loss", saved + loss, 0, 0, casts)
    at_norm = BackwardPoint("final norm", _norm_backward(x, norm), matrix + norm.weights, 0, 0)
    if not x.autocast:
        return at_loss, BackwardPoint("head", product, matrix, matrix, 0), at_norm
    uncast = Line(TEMPORARY, x.element * matrix, "gradient of the head's weight before it is cast", "e·h·V", HEAD)
    wide = Line(GRADIENT, 4 * x.tokens * x.hidden, "gradient of the head's input, fp32", "4·T·h", HEAD)
    return (
        at_loss,
        BackwardPoint("head", (*product, uncast), 0, 0, casts),
        BackwardPoint("head: cast of the weight gradient", (*norm.saved, wide, uncast), matrix, matrix, 0),
        at_norm,
    )
