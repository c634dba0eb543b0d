"""What do the parts outside the blocks cost in one pass: embedding, position tables, final norm, head and loss?"""

from zeroplan.ledger import Kind, Line
from zeroplan.spec.batch import Batch
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import Loss
from zeroplan.transformer.blocks import BackwardPoint, Compute, HeadPass
from zeroplan.transformer.families.norms import FINAL, LAYER_FINAL, layer_norm, rms_norm
from zeroplan.transformer.families.parts import SAVED, TEMPORARY, Part
from zeroplan.transformer.families.widths import Widths, widths
from zeroplan.transformer.losses import FULL, HEAD, chunked_loss, full_loss, fused_loss

MODEL = "transformers 5.23, models/llama/modeling_llama.py, LlamaModel.forward"
GPT2 = "transformers 5.23, models/gpt2/modeling_gpt2.py, GPT2Model.forward"
MASK = "transformers 5.23, masking_utils.py, create_causal_mask"
ROTARY = "transformers 5.23, models/llama/modeling_llama.py, LlamaRotaryEmbedding.forward"
LOGITS = Kind.LOGITS


_LOSSES = {"full": full_loss, "chunked": chunked_loss, "fused": fused_loss}


def head_pass(
    model: ModelSpec,
    compute: Compute,
    batch: Batch,
    *,
    recomputed: bool = False,
    loss: Loss = "full",
    fp32_output: bool = False,
) -> HeadPass:
    """Return what the model holds outside its blocks, with one of the losses of ``losses.py``.

    ``recomputed`` says that blocks are recomputed in backward: they need an eager attention mask until the end, and keep the
    first block's input themselves. ``fp32_output`` says that the model's output is upcast before it is handed on, as
    accelerate's and torchtitan's loops do. Leaves out: dropout after the embedding, the loss itself and the sum of label
    weights (4 bytes each).
    """
    x = widths(model, compute, batch)
    norm = layer_norm(x, LAYER_FINAL) if x.fused_projection else rms_norm(x, FINAL)
    way = _LOSSES[loss](x, model.vocab_size, norm.saved)
    (named, first_input), mask = _embedding_by_name(x), _mask(x)
    at_norm = BackwardPoint("final norm", _norm_backward(x, norm), x.hidden * model.vocab_size + norm.weights, 0, 0)
    return HeadPass(
        (*_shared(model, x), *(mask if recomputed else ())),
        (*norm.saved, *way.saved),
        way.forward,
        _wide(x, model.vocab_size) if fp32_output and way.output else way.output,
        x.residual * x.tokens * x.hidden,
        (*named, *(() if recomputed else mask)),
        () if recomputed else first_input,
        way.kept,
        (*way.points, at_norm),
    )


def _wide(x: Widths, vocab: int) -> tuple[Line, ...]:
    return (Line(LOGITS, 4 * x.tokens * vocab, "logits in fp32, the model's output", "4·T·V", FULL),)


def _shared(model: ModelSpec, x: Widths) -> tuple[Line, ...]:
    ids = Line(SAVED, 8 * x.tokens, "input ids, int64", "8·T", HEAD)
    if model.positions:
        return ids, Line(SAVED, 8 * x.seq_len, "position ids, int64", "8·s", GPT2)
    return ids, _rotary(model, x)


def _rotary(model: ModelSpec, x: Widths) -> Line:
    if model.mla is not None:
        size = 2 * x.residual * x.seq_len * model.mla.qk_rope_head_dim
        return Line(SAVED, size, "rotary cos and sin", "2·r·s·o", ROTARY)
    return Line(SAVED, 2 * x.residual * x.seq_len * x.head_dim, "rotary cos and sin", "2·r·s·d", ROTARY)


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


def _norm_backward(x: Widths, norm: Part) -> tuple[Line, ...]:
    """List the final norm's backward: no residual gradient exists yet that the direct one could be added to."""
    lines = norm.points[0].lines
    if x.fused_projection or x.residual != 4:
        return lines
    return (*lines, Line(TEMPORARY, 4 * x.tokens * x.hidden, "gradient of the input beside its square, fp32", "4·T·h", MODEL))
