"""What do the parts outside the blocks cost in one pass: embedding, position tables, final norm, head and loss?"""

from zeroplan.ledger import Kind, Line, Role, Tag
from zeroplan.numeric import Int, where
from zeroplan.spec.batch import Batch
from zeroplan.spec.family import GLOBAL_LAYERS
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import Loss
from zeroplan.transformer.blocks import Compute, HeadPass
from zeroplan.transformer.families.definition import definition_of
from zeroplan.transformer.families.norms import LAYER_NORM, STATISTICS, FinalNorm
from zeroplan.transformer.families.parts import SAVED, TEMPORARY
from zeroplan.transformer.families.widths import Widths, beyond_the_window, quantities, widths
from zeroplan.transformer.losses import (
    FULL,
    HEAD,
    LossPass,
    capped,
    chunked_loss,
    frozen_head,
    full_loss,
    fused_loss,
    head_in_32_bits,
)
from zeroplan.transformer.params import is_frozen

MODEL = "transformers 5.23, models/llama/modeling_llama.py, LlamaModel.forward"
GPT2 = "transformers 5.23, models/gpt2/modeling_gpt2.py, GPT2Model.forward"
MASK = "transformers 5.23, masking_utils.py, create_causal_mask"
OPT = "transformers 5.23, models/opt/modeling_opt.py, OPTDecoder.forward"
BLOOM = "transformers 5.23, models/bloom/modeling_bloom.py, BloomModel.forward"
LOGITS = Kind.LOGITS
_FP32 = 4
#: Ids and positions, which context-parallel ranks share out.
OF_THE_BATCH = Tag(Role.BATCH)

#: Families that bend the logits through ``tanh`` before the loss.
CAPPED = ("gemma2",)

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
    accelerate does. Leaves out: dropout after the embedding, the loss itself and the sum of label
    weights (4 bytes each).
    """
    if model.profile is not None:
        from zeroplan.transformer.profiled import profile_of, profiled_head  # noqa: PLC0415  only a profile pays for it

        return profiled_head(profile_of(model), compute, batch)
    if compute.tp > 1:
        from zeroplan.transformer.split_head import split_head  # noqa: PLC0415  the others' answers need not wait for it

        return split_head(model, compute, batch, recomputed=recomputed, fp32_output=fp32_output)
    x = widths(model, compute, batch)
    norm = _final_norm(model, x)
    way = _way_to_the_loss(model, x, norm.saved, loss, keeps_inputs=compute.keeps_inputs)
    (named, first_input), mask = _embedding_by_name(model, x, input_away=compute.offloaded), _mask(model, x)
    matrix = 0 if is_frozen(model, "head") else x.hidden * model.vocab_size
    at_norm = tuple(point._replace(gradients=matrix + point.gradients) for point in norm.points)
    masks = tuple([line._replace(kind=SAVED) for line in mask if recomputed])
    (tables, left), leaf = _tables(model, x), _leaf(model, x, input_away=compute.offloaded)
    return HeadPass(
        (*_shared(model, x), *tables, *leaf, *masks),
        (*norm.saved, *way.saved),
        way.forward,
        _wide(x, model.vocab_size) if fp32_output and way.output else way.output,
        x.residual * x.tokens * x.hidden,
        (*named, *left, *(() if recomputed else mask)),
        () if leaf or (recomputed and not compute.offloaded) else first_input,
        way.kept,
        (*way.points, *at_norm),
        with_blocks=(*tables, *leaf, *masks),
    )


def _way_to_the_loss(
    model: ModelSpec, x: Widths, norm_saved: tuple[Line, ...], loss: Loss, *, keeps_inputs: bool
) -> LossPass:  # fmt: skip
    """The head's multiplication and the loss; of a frozen head, and of logits that are bent, what is otherwise."""
    frozen, vocab = is_frozen(model, "head"), model.vocab_size
    way = _LOSSES[loss](x._replace(autocast=False) if frozen else x, vocab, norm_saved)
    if frozen:
        way = frozen_head(way, keeps_input=keeps_inputs)
    if frozen and x.element != x.residual:
        way = head_in_32_bits(way, x, vocab, norm_saved)
    return capped(way, x, vocab, loss) if model.family in CAPPED else way


def _final_norm(model: ModelSpec, x: Widths) -> FinalNorm:
    from zeroplan.transformer.families.traced import final_norm  # noqa: PLC0415  a profile's answers need not wait for it

    return final_norm(model, x, frozen=is_frozen(model, "norm"))


def _wide(x: Widths, vocab: int) -> tuple[Line, ...]:
    return (Line(LOGITS, 4 * x.tokens * vocab, "logits in fp32, the model's output", "4·T·V", FULL),)


def _shared(model: ModelSpec, x: Widths) -> tuple[Line, ...]:
    ids = Line(SAVED, 8 * x.tokens, "input ids, int64", "8·T", HEAD, OF_THE_BATCH)
    if model.family == "bloom":
        return ids, *_embedding_norm(x), Line(SAVED, x.residual * x.seq_len * x.heads * x.micro_batch, "ALiBi", "r·a·T", BLOOM)
    if model.family == "opt":
        held = Line(SAVED, 12 * x.tokens, "position ids and a mask of ones, held by name", "12·T", OPT)
        return ids, Line(SAVED, 8 * x.tokens, "position ids with their offset, int64", "8·T", OPT), held
    if model.positions:
        return ids, Line(SAVED, 8 * x.seq_len, "position ids, int64", "8·s", GPT2, OF_THE_BATCH)
    return (ids,)


def _tables(model: ModelSpec, x: Widths) -> tuple[tuple[Line, ...], tuple[Line, ...]]:
    """The tables of positions that all layers share, and in their place those that go with the model's forward.

    Where every block is given a copy in another dtype, nothing of theirs is needed after it.
    """
    of_the_family = definition_of(model.family).tables
    if of_the_family is None:
        return (), ()
    size, reason, source, in_32_bits = of_the_family(model)
    n_bytes = size.value(quantities(x, model.intermediate_size, model.moe, model.mla))
    lines = (Line(SAVED, n_bytes, reason, size.text, source),)
    return ((), lines) if in_32_bits and x.casts_inputs and x.element != _FP32 else (lines, ())


def _embedding_norm(x: Widths) -> tuple[Line, ...]:
    """BLOOM's norm of the embeddings; its backward comes last."""
    name, size = "norm after the embedding", x.residual * x.tokens * x.hidden
    return (
        Line(SAVED, size, f"{name}: its input", "r·T·h", LAYER_NORM),
        Line(SAVED, 8 * x.tokens, f"{name}: mean and reciprocal standard deviation", "8·T", LAYER_NORM, STATISTICS),
    )


def _embedding_by_name(model: ModelSpec, x: Widths, *, input_away: bool) -> tuple[tuple[Line, ...], tuple[Line, ...]]:
    """What the model's forward holds by name of the embedding: tensors of their own, and the one that is block 0's input.

    Learned positions are added to the token embeddings, so that block 0's input is another tensor; where block 0's first norm
    saves its input as it is, it counts there, unless block inputs are offloaded (``input_away``). Before the first adapter nothing
    is saved.
    """
    embedded = Line(TEMPORARY, x.residual * x.tokens * x.hidden, "token embeddings, held by name", "r·T·h", MODEL)
    if model.family == "bloom":
        return (), ()
    if model.family == "opt":
        return (
            embedded,
            Line(TEMPORARY, x.residual * x.tokens * x.hidden, "position embeddings, held by name", "r·T·h", OPT),
        ), ()
    if model.family == "gpt2":
        positions = Line(TEMPORARY, x.residual * x.seq_len * x.hidden, "position embeddings, held by name", "r·s·h", GPT2)
        return (embedded, positions), ()
    saved = not is_frozen(model, "embedding") and (x.residual == 4 or model.family == "gpt_neox") and not input_away
    return (), () if saved else (embedded,)


def _leaf(model: ModelSpec, x: Widths, *, input_away: bool) -> tuple[Line, ...]:
    """A frozen embedding's output, which is made to require a gradient: a leaf, which stays on the GPU though blocks' inputs go.

    Source: transformers 5.23, modeling_utils.py, ``enable_input_require_grads``.
    """
    if not (input_away and is_frozen(model, "embedding")):
        return ()
    size = x.residual * x.tokens * x.hidden
    return (Line(SAVED, size, "output of the frozen embedding, a leaf of the graph", "r·T·h", MODEL),)


def _mask(model: ModelSpec, x: Widths) -> tuple[Line, ...]:
    if x.attention == "flash":
        return ()
    square = x.seq_len * x.seq_len
    if x.attention == "sdpa":
        return _window_mask(model, x, square)
    n_bytes = x.residual * x.micro_batch * square
    if (model.family in GLOBAL_LAYERS and model.linear is None) or model.family == "gpt_oss":
        return (Line(TEMPORARY, 2 * n_bytes, "masks of eager attention, local and global", "2·r·b·s²", MASK),)
    return (Line(TEMPORARY, n_bytes, "attention mask of eager attention", "r·b·s²", MASK),)


def _window_mask(model: ModelSpec, x: Widths, square: Int) -> tuple[Line, ...]:
    """Booleans that say what a sliding window sees, made once, where a sequence is at least as long as the window."""
    is_masked = beyond_the_window(model, x)
    if is_masked is False:
        return ()
    return (Line(TEMPORARY, where(is_masked, square, 0), "mask of the sliding window, booleans", "s²", MASK),)
