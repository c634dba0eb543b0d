"""What do the parts outside the blocks cost in one pass: embedding, position tables, final norm, head and loss?"""

from typing import NamedTuple

from zeroplan.expr import Values
from zeroplan.ledger import Kind, Line, Role, Tag, total_bytes
from zeroplan.memo import as_key, recalled
from zeroplan.numeric import Int, where
from zeroplan.spec.batch import Batch
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import Loss
from zeroplan.transformer.blocks import Compute, HeadPass
from zeroplan.transformer.families.definition import Around, Held, definition_of
from zeroplan.transformer.families.tags import OF_THE_BATCH, SAVED, TEMPORARY
from zeroplan.transformer.families.widths import Widths, beyond_the_window, values_of, widths
from zeroplan.transformer.params import is_frozen, layout
from zeroplan.transformer.symbols import T, T_p, V, V_p, b, h, r, s

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


class _Asked(NamedTuple):
    """A model, how it runs, and the value of every symbol."""

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
    """Return what the model holds outside its blocks, with one of the losses of ``families/ending.py``.

    ``recomputed`` says that blocks are recomputed in backward: they need an eager attention mask until the end, and keep the
    first block's input themselves. ``fp32_output`` says that the model's output is upcast before it is handed on, as
    accelerate does. Leaves out: dropout after the embedding, the loss itself and the sum of label
    weights (4 bytes each).
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
        from zeroplan.transformer.profiled import profile_of, profiled_head  # noqa: PLC0415  only a profile pays for it

        return profiled_head(profile_of(model), compute, batch)
    from zeroplan.transformer.families.ending import ending_pass  # noqa: PLC0415  a profile's answers need not wait for it

    asked = _asked(model, compute, batch)
    around = (_whole if compute.tp == 1 else _of_a_rank)(asked, recomputed=recomputed)
    beside = sum(line.n_bytes for line in (*around.forward, *around.first_input))
    ending = ending_pass(model, compute, asked.x, asked.values, loss, beside=beside)
    wide = _WIDE if compute.tp == 1 else _WIDE_SHARE
    return around._replace(
        saved=ending.saved,
        loss_forward=ending.forward,
        output=(wide.line(Kind.LOGITS, asked.values),) if fp32_output and ending.output else ending.output,
        loss=ending.kept,
        points=ending.points,
        norm_forward=ending.norm,
    )


def output_bytes(model: ModelSpec, compute: Compute, batch: Batch, *, fp32_output: bool) -> Int:
    """What the model's output takes, with a loss that is not split, as :func:`head_pass` has it. [bytes]"""
    if model.profile is not None:
        return total_bytes(head_pass(model, compute, batch, fp32_output=fp32_output).output)
    from zeroplan.transformer.families import ending  # noqa: PLC0415  a profile's answers need not wait for it

    asked = _asked(model, compute, batch)
    own = ending.output_bytes(ending.ending_of(model, compute, asked.x, "full"), asked.values)
    if not fp32_output or (isinstance(own, int) and not own):
        return own
    return (_WIDE if compute.tp == 1 else _WIDE_SHARE).size.value(asked.values)


def _asked(model: ModelSpec, compute: Compute, batch: Batch) -> _Asked:
    x = widths(model, compute, batch)
    return _Asked(model, compute, x, values_of(model, x, compute.tp), definition_of(model.family).around)


def _whole(asked: _Asked, *, recomputed: bool) -> HeadPass:
    """What is before the blocks and beside them."""
    model, compute, x, values, around = asked
    masks, away = _masks(asked), compute.offloaded
    kept = tuple([line._replace(kind=SAVED) for line in masks if recomputed])
    (tables, left) = _tables(asked, recomputed=recomputed)
    leaf = (_LEAF.line(SAVED, values),) if is_frozen(model, "embedding") and _is_leaf_apart(asked, recomputed) else ()
    named = around.names_input and not (leaf and away) and (away or not recomputed) and (away or not _first_saves_it(asked))
    return HeadPass(
        (*(one.line(SAVED, values) for one in (_IDS, *around.kept)), *tables, *leaf, *kept),
        (),
        (),
        (),
        x.residual * x.tokens * x.hidden,
        (*(one.line(TEMPORARY, values) for one in around.named), *left, *(() if recomputed else masks)),
        (_EMBEDDED.line(TEMPORARY, values),) if named else (),
        with_blocks=(*tables, *leaf, *kept),
    )


def _is_leaf_apart(asked: _Asked, recomputed: bool) -> bool:  # noqa: FBT001  it is all that is asked
    """Whether the output of a frozen embedding, which autograd follows where blocks are recomputed, is no block's input there.

    The graph holds it, since it is where the graph ends (``AccumulateGrad``).
    """
    return asked.compute.offloaded or (recomputed and asked.around.scales_embeddings)


def _first_saves_it(asked: _Asked) -> bool:
    """Whether block 0 saves its input as it is, where it counts then."""
    from zeroplan.transformer.families.traced import saves_its_input  # noqa: PLC0415  a profile's answers need not wait for it

    return saves_its_input(asked.model, layout(asked.model).runs[0].kind, asked.compute, asked.x)


def _of_a_rank(asked: _Asked, *, recomputed: bool) -> HeadPass:
    """The same on a tensor-parallel rank, which has a share of the sequence between the blocks' matrices."""
    values, (tables, _) = asked.values, _tables(asked, recomputed=recomputed)
    named = not recomputed and not _first_saves_it(asked)
    return HeadPass(
        (*(one.line(SAVED, values) for one in (_IDS, *asked.around.kept, _POSITIONS)), *tables),
        (),
        (),
        (),
        _SHARE.size.value(values),
        first_input=(_SHARE.line(TEMPORARY, values),) if named else (),
        hidden_formula=_SHARE.size.text,
        with_blocks=tables,
    )


def _tables(asked: _Asked, *, recomputed: bool) -> tuple[tuple[Line, ...], tuple[Line, ...]]:
    """The tables of positions that all layers share, and in their place those that go with the model's forward.

    Where every block has a copy of them, nothing of theirs is needed after it.
    """
    of_the_family = definition_of(asked.model.family).tables
    if of_the_family is None:
        return (), ()
    size, reason, source, in_32_bits, copied = of_the_family(asked.model)
    lines = (Held(size, reason, source).line(SAVED, asked.values),)
    cast = in_32_bits and asked.x.casts_inputs and asked.x.element != _FP32
    return ((), lines) if cast or (copied and not recomputed) else (lines, ())


def _masks(asked: _Asked) -> tuple[Line, ...]:
    """Masks that the model's forward makes; booleans where a sequence is at least as long as a sliding window."""
    if asked.x.attention == "flash":
        return ()
    if asked.x.attention == "eager":
        return (_EAGER[asked.around.masks].line(TEMPORARY, asked.values),)
    is_masked = beyond_the_window(asked.model, asked.x)
    if is_masked is False:
        return ()
    mask = _WINDOW.line(TEMPORARY, asked.values)
    return (mask._replace(n_bytes=where(is_masked, mask.n_bytes, 0)),)
