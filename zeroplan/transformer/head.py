"""The memory outside the blocks in one pass: embedding, position tables, final norm, head and loss."""

from typing import NamedTuple

from zeroplan.expr import Values
from zeroplan.ledger import Kind, Line, Role, Tag, total_bytes
from zeroplan.memo import as_key, recalled
from zeroplan.numeric import Int, where
from zeroplan.spec.batch import Batch
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import Loss
from zeroplan.transformer.activations import block_pass
from zeroplan.transformer.blocks import Ahead, Compute, HeadPass
from zeroplan.transformer.families.definition import Around, Held, definition_of
from zeroplan.transformer.families.tags import OF_THE_BATCH, SAVED, TEMPORARY
from zeroplan.transformer.families.widths import Widths, is_masked, masks_images, values_of, widths
from zeroplan.transformer.params import is_frozen, layout
from zeroplan.transformer.symbols import T, T_p, V, V_p, b, h, r, s
from zeroplan.transformer.vision import with_images

MODEL = "transformers 5.23, models/llama/modeling_llama.py, LlamaModel.forward"
MASK = "transformers 5.23, masking_utils.py, create_causal_mask"
HEAD = "transformers 5.23, models/llama/modeling_llama.py, LlamaForCausalLM.forward"
FULL = "transformers 5.23, loss/loss_utils.py, ForCausalLMLoss"
_FP32 = 4
_IDS = Held(8 * T, "input ids, int64", HEAD, OF_THE_BATCH)
_POSITIONS = Held(8 * s, "position ids, int64", HEAD, OF_THE_BATCH)
_EMBEDDED = Held(r * T * h, "token embeddings, held by name", MODEL)
_SHARE = Held(r * T_p * h, "token embeddings, a share of the sequence, held by name", MODEL)
_LEAF = Held(r * T * h, "output of the frozen embedding, a leaf of the graph", MODEL, Tag(Role.BLOCK_INPUT))
_WIDE = Held(4 * T * V, "logits in fp32, the model's output", FULL)
_WIDE_SHARE = _WIDE._replace(size=4 * T * V_p)
_EAGER = {
    1: Held(r * b * s * s, "attention mask of eager attention", MASK),
    2: Held(2 * r * b * s * s, "masks of eager attention, local and global", MASK),
}
_WINDOW = Held(s * s, "mask of the sliding window, booleans", MASK)
_CHUNKS = Held(
    b * s * s, "mask of the chunks, booleans for each sequence", "transformers 5.23, masking_utils.py, create_chunked_causal_mask"
)  # fmt: skip
_PACKED = Held(
    b * s * s,
    "attention mask, booleans for each sequence",
    "transformers 4.57.3, masking_utils.py, packed_sequence_mask_function",
)
_PADDED = Held(
    b * s * s, "attention mask with padding, booleans for each sequence", "transformers 5.23, masking_utils.py, sdpa_mask"
)
_PADDED_KINDS = Held(
    2 * b * s * s, "attention masks with padding, local and global, booleans for each sequence",
    "transformers 5.23, masking_utils.py, sdpa_mask",
)  # fmt: skip
_IMAGES = Held(
    2 * b * s * s,
    "masks of text and images, local and global, booleans for each sequence",
    "transformers 5.23, models/gemma3/modeling_gemma3.py, Gemma3Model.forward",
)


class _Question(NamedTuple):
    """A model, its settings, and the value of every symbol."""

    model: ModelSpec
    compute: Compute
    x: Widths
    values: Values
    around: Around


def head_pass(
    model: ModelSpec,
    compute: Compute,
    batch: Batch,
    *,
    recomputed: bool = False,
    loss: Loss = "full",
    fp32_output: bool = False,
) -> HeadPass:
    """Return the memory outside the blocks, with one of the losses of ``families/ending.py``.

    ``recomputed``: the backward recomputes blocks, which need an eager attention mask until then and keep the first block's input
    themselves. ``fp32_output``: the model's output is upcast before it is returned, as accelerate does. Leaves out dropout after
    the embedding, the loss itself and the sum of label weights (4 bytes each).
    """
    numbers = batch.micro_batch_size, batch.seq_len
    return recalled(
        lambda: (head_pass, model, compute, *map(as_key, numbers), recomputed, loss, fp32_output),
        lambda: _made(model, compute, batch, loss, recomputed=recomputed, fp32_output=fp32_output),
    )


def _made(
    model: ModelSpec, compute: Compute, batch: Batch, loss: Loss, *, recomputed: bool, fp32_output: bool
) -> HeadPass:  # fmt: skip
    if model.profile is not None:
        from zeroplan.transformer.profiled import profile_of, profiled_head  # noqa: PLC0415  keeps start-up fast

        return profiled_head(profile_of(model), compute, batch)
    from zeroplan.transformer.families.ending import ending_pass  # noqa: PLC0415  keeps start-up fast

    question = _question(model, compute, batch)
    text = (_whole if compute.tp == 1 else _of_a_rank)(question, recomputed=recomputed)
    if model.per_layer is not None:
        text = _with_all_layers(text, question, batch, recomputed=recomputed)
    around = with_images(text, model, compute, batch, recomputed=recomputed)
    beside = sum(line.n_bytes for line in (*around.forward, *around.first_input))
    ending = ending_pass(model, compute, question.x, question.values, loss, beside=beside)
    wide = _WIDE if compute.tp == 1 else _WIDE_SHARE
    ahead = Ahead()
    if model.predictions:
        from zeroplan.transformer.predictions import ahead_of  # noqa: PLC0415  few models have them

        ahead = ahead_of(model, compute, question.values, ending.saved, cut=loss != "full")
    return around._replace(
        ahead=ahead,
        saved=ending.saved,
        loss_forward=(*ending.forward, *around.loss_forward),
        output=(wide.line(Kind.LOGITS, question.values),) if fp32_output and ending.output else ending.output,
        loss=ending.kept,
        points=ending.points,
        norm_forward=ending.norm,
    )


def scored_forward(model: ModelSpec, compute: Compute, batch: Batch) -> tuple[Line, ...]:
    """Return the tensors of final norm, TRL's head, ids and position tables in a forward without gradients. [bytes]"""
    from zeroplan.transformer.families.ending import ending_of, unsaved  # noqa: PLC0415  keeps start-up fast

    question = _question(model, compute, batch)
    around = _whole(question, recomputed=True)
    return (*around.shared, *unsaved(ending_of(model, compute, question.x, "log-probs"), question.values))


def named_embeddings(model: ModelSpec, compute: Compute, batch: Batch) -> tuple[Line, ...]:
    """Return the token embeddings if a variable of the model's forward holds them until its last block; else nothing. [bytes]"""
    question = _question(model, compute, batch)
    return (_EMBEDDED.line(TEMPORARY, question.values),) if question.around.names_input else ()


def output_bytes(model: ModelSpec, compute: Compute, batch: Batch, *, fp32_output: bool) -> Int:
    """Return the size of the model's output under the loss over all tokens at once, as in :func:`head_pass`. [bytes]"""
    if model.profile is not None:
        return total_bytes(head_pass(model, compute, batch, fp32_output=fp32_output).output)
    from zeroplan.transformer.families import ending  # noqa: PLC0415  keeps start-up fast

    question = _question(model, compute, batch)
    own = ending.output_bytes(ending.ending_of(model, compute, question.x, "full"), question.values)
    if not fp32_output or (isinstance(own, int) and not own):
        return own
    return (_WIDE if compute.tp == 1 else _WIDE_SHARE).size.value(question.values)


def _question(model: ModelSpec, compute: Compute, batch: Batch) -> _Question:
    x = widths(model, compute, batch)
    values = {**values_of(model, x, compute.tp), "i": compute.prompt_len}
    return _Question(model, compute, x, values, definition_of(model.family).around)


def _whole(question: _Question, *, recomputed: bool) -> HeadPass:
    """Return the tensors that live before the blocks and during them."""
    model, compute, x, values, around = question
    masks, offloads = _masks(question), compute.offloaded
    kept = tuple([line._replace(kind=SAVED) for line in masks if recomputed])
    (tables, left) = _tables(question, recomputed=recomputed)
    leaf = (_LEAF.line(SAVED, values),) if is_frozen(model, "embedding") and _is_leaf_apart(question, recomputed) else ()
    named = (
        around.names_input
        and not (leaf and offloads)
        and (offloads or not recomputed)
        and (offloads or not _first_saves_it(question))
    )
    return HeadPass(
        (*(one.line(SAVED, values) for one in (_IDS, *_given(compute), *around.kept)), *tables, *leaf, *kept),
        (),
        (),
        (),
        x.residual * x.tokens * x.hidden,
        (*(one.line(TEMPORARY, values) for one in around.named), *left, *(() if recomputed else masks)),
        (_EMBEDDED.line(TEMPORARY, values),) if named else (),
        with_blocks=(*tables, *leaf, *kept),
    )


def _with_all_layers(text: HeadPass, question: _Question, batch: Batch, *, recomputed: bool) -> HeadPass:
    """Return the same with the embeddings of all layers, and with shared keys that variables hold.

    The projection to all layers saves the first block's input, which counts there if that block keeps it, too.
    """
    from zeroplan.transformer.families.all_layers import before_blocks  # noqa: PLC0415  few models have them

    model, compute, x, values, _ = question
    made = before_blocks(model, compute, x, values)
    apart = () if recomputed or _first_saves_it(question) else made.given
    kinds = [run.kind for run in layout(model).runs if run.kind.endswith("stored")]
    stored = [line for kind in kinds for line in block_pass(model, kind, compute, batch).named] if not recomputed else []
    with_blocks = (*apart, *made.kept, *made.made, *text.with_blocks)
    return text._replace(
        shared=(*text.at_embedding, *with_blocks),
        with_blocks=with_blocks,
        before=(*made.given, *made.kept),
        forward=(*text.forward, *stored),
        first_input=() if apart else text.first_input,
        looked_up=made.looked_up,
        below=made.points,
        handed_below=made.handed,
    )


def _is_leaf_apart(question: _Question, recomputed: bool) -> bool:  # noqa: FBT001  one of two arguments
    """Whether a frozen embedding's output is alive as a tensor apart from block 0's input.

    With recomputation autograd follows that output, and the graph holds it as a leaf (``AccumulateGrad``). It does not where a
    loop wraps blocks in checkpoints itself, as prime-rl's does.
    """
    adapter = question.model.adapter
    followed = recomputed and (adapter is None or not adapter.runs)
    return followed and (question.compute.offloaded or question.around.scales_embeddings)


def _first_saves_it(question: _Question) -> bool:
    """Whether block 0 saves its input itself, so that the input counts there."""
    from zeroplan.transformer.families.traced import saves_its_input  # noqa: PLC0415  keeps start-up fast

    return saves_its_input(question.model, layout(question.model).runs[0].kind, question.compute, question.x)


def _of_a_rank(question: _Question, *, recomputed: bool) -> HeadPass:
    """Return the same as ``_whole`` for a tensor-parallel rank, whose residual stream is split along the sequence, or whole."""
    values, (tables, _) = question.values, _tables(question, recomputed=recomputed)
    named = not recomputed and not _first_saves_it(question)
    share = _EMBEDDED if question.compute.whole_sequences else _SHARE
    return HeadPass(
        (*(one.line(SAVED, values) for one in (_IDS, *question.around.kept, _POSITIONS)), *tables),
        (),
        (),
        (),
        share.size.value(values),
        first_input=(share.line(TEMPORARY, values),) if named else (),
        hidden_formula=share.size.text,
        with_blocks=tables,
    )


def _tables(question: _Question, *, recomputed: bool) -> tuple[tuple[Line, ...], tuple[Line, ...]]:
    """Return the position tables that all layers share: those kept for the backward, and those freed when the forward ends.

    Where every block copies them, nothing needs the tables after the forward.
    """
    tables = definition_of(question.model.family).tables_of(question.model)
    if tables is None:
        return (), ()
    size, reason, source, in_32_bits, copied = tables
    if question.model.vision is not None and question.model.vision.turns_text:
        size = size * b  # each sequence has positions of its own
    lines = (Held(size, reason, source).line(SAVED, question.values),)
    cast = in_32_bits and question.compute.casts_inputs and question.x.element != _FP32
    is_freed = (copied or question.compute.offloaded) and not recomputed
    return ((), lines) if cast or is_freed else (lines, ())


def _given(compute: Compute) -> tuple[Held, ...]:
    """Return what the batch has beside token ids: with padding, a mask of whole numbers."""
    return (Held(8 * T, "attention mask of the batch, int64", HEAD, OF_THE_BATCH),) if compute.padded else ()


def _mask_of_all_layers(question: _Question) -> Held | None:
    if question.compute.release.masks_all:
        return _PACKED
    if masks_images(question.model):
        return _IMAGES
    if not question.compute.padded:
        return None
    return _PADDED_KINDS if _masks_built(question) > 1 else _PADDED


def _masks_built(question: _Question) -> int:
    """Return how many masks the model's forward builds if each layer needs one, whichever kinds of layers the model has."""
    return question.around.masks if question.model.sliding_window is not None else 1


def _masks(question: _Question) -> tuple[Line, ...]:
    """Return the masks that the model's forward builds: a boolean mask only if a sequence is as long as a sliding window."""
    if question.x.attention == "flash":
        return ()
    if question.x.attention == "eager":
        return (_EAGER[_masks_built(question)].line(TEMPORARY, question.values),)
    of_all = _mask_of_all_layers(question)
    if of_all is not None:
        return (of_all.line(TEMPORARY, question.values),)
    masked = is_masked(question.model, question.x)
    if masked is False:
        return ()
    mask = (_CHUNKS if question.around.chunks else _WINDOW).line(TEMPORARY, question.values)
    return (mask._replace(n_bytes=where(masked, mask.n_bytes, 0)),)
