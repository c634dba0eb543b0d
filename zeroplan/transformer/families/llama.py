"""Blocks of the Llama kind: Llama, Mistral, Qwen2, and Qwen3 with its norms over each head's queries and keys."""

from zeroplan.ledger import Line, Module, Role, Tag, total_bytes
from zeroplan.numeric import Int, maximum
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.blocks import BlockPass
from zeroplan.transformer.families import written_out
from zeroplan.transformer.families.attention import SDPA, grouped_query_attention, inputs
from zeroplan.transformer.families.mlp import LLAMA, gated_mlp
from zeroplan.transformer.families.norms import BEFORE_ATTENTION, BEFORE_MLP, rms_norm
from zeroplan.transformer.families.parts import LAYER, SAVED, TEMPORARY, Part, assemble
from zeroplan.transformer.families.widths import HEAD_NORMS, Widths

#: Lines that say how far an earlier moment is above the later one that the other lines describe; they have no formula.
ATTENTION_EXCESS = "attention, beyond the later peak"
SELECTIVE = "torchtitan, distributed/activation_checkpoint.py, per-operation selective checkpointing"


def llama_block(model: ModelSpec, x: Widths) -> BlockPass:
    """One dense decoder layer: norm, attention, norm, gated MLP."""
    mlp = gated_mlp(x, model.intermediate_size, bias=model.mlp_bias)
    parts = (rms_norm(x, BEFORE_ATTENTION), attention(model, x), rms_norm(x, BEFORE_MLP), mlp)
    forward = dense_forward(x)
    recompute = gated_recompute(model, x)
    forward = (*forward, *written_out_excess(x, parts, forward, head_norms=has_head_norms(model)))
    recompute = (*recompute, attention_excess(x, recompute, x.context * x.hidden + mlp.casts))
    recompute = (*recompute, *written_out.recompute_excess(x, total_bytes(recompute)))
    return assemble(
        x, parts, forward=forward, recompute=recompute, selective=_selective(model, x), input_is_saved=x.residual == 4
    )


def attention(model: ModelSpec, x: Widths) -> Part:
    """Build the family's attention. Qwen2 has biases on q, k and v only; Llama, where it has them, on the output too."""
    bias = model.attention_bias
    return grouped_query_attention(
        x,
        bias=bias,
        output_bias=bias and model.family != "qwen2",
        head_norms=has_head_norms(model),
    )


def has_head_norms(model: ModelSpec) -> bool:
    """Whether queries and keys are normalised over each head."""
    return model.family in HEAD_NORMS


def dense_forward(x: Widths) -> tuple[Line, ...]:
    """Beyond what is saved when the second residual addition ends the block; the block's input apart."""
    hidden = x.tokens * x.hidden
    branch = Line(TEMPORARY, x.element * hidden, "MLP output before the residual addition", "e·T·h", LAYER)
    output = Line(TEMPORARY, x.residual * hidden, "block output", "r·T·h", LAYER)
    return (branch, output) if x.residual == 4 else (middle(x), branch, output)


def middle(x: Widths) -> Line:
    """Describe the residual stream between the two branches."""
    return Line(TEMPORARY, x.residual * x.tokens * x.hidden, "residual stream between attention and MLP", "r·T·h", LAYER)


def norm_output(x: Widths) -> Line:
    """Describe the second norm's output, in the norm's own dtype."""
    return Line(TEMPORARY, x.residual * x.tokens * x.hidden, "output of the norm before the MLP", "r·T·h", LAYER)


def written_out_excess(
    x: Widths, parts: tuple[Part, ...], forward: tuple[Line, ...], *, head_norms: bool = False
) -> tuple[Line, ...]:
    """Return what attention that CUDA writes out in 32 bits takes beyond the end of the block."""
    return written_out.forward_excess(x, _at_end(parts, forward), inputs(x, head_norms=head_norms))


def _at_end(parts: tuple[Part, ...], forward: tuple[Line, ...]) -> Int:
    return total_bytes(parts[1].saved) + total_bytes(parts[2].saved) + total_bytes(parts[3].saved) + total_bytes(forward)


def attention_excess(x: Widths, recompute: tuple[Line, ...], later_casts: int) -> Line:
    """Return what attention takes beyond the MLP where nothing is saved: its rotary positions.

    Autocast has not copied ``later_casts`` elements of weights yet then, which the MLP's moment counts.
    """
    wide, narrow = x.residual * x.tokens, x.element * x.tokens
    rotary = wide * x.hidden + wide * max(3 * x.query, x.query + 3 * x.key)
    at_attention: Int = rotary + narrow * (x.query + x.key + x.value)
    absent = x.element * later_casts if x.autocast else 0
    return Line(TEMPORARY, maximum(0, at_attention - absent - total_bytes(recompute)), ATTENTION_EXCESS, source=LAYER)


def gated_recompute(model: ModelSpec, x: Widths) -> tuple[Line, ...]:
    """List what is alive at a gated MLP's highest point where nothing is saved."""
    inner, matrix = x.element * x.tokens * model.intermediate_size, x.element * x.hidden * model.intermediate_size
    if not x.autocast:
        return middle(x), norm_output(x), Line(TEMPORARY, 3 * inner, "silu, up and gated product", "3·e·T·f", LLAMA)
    # At the product the down projection's cast does not exist yet; at the down projection it does, and less of the rest.
    later = inner + x.element * x.tokens * x.hidden
    gated = Line(
        TEMPORARY,
        maximum(3 * inner - matrix, later),
        "silu, up and gated product before the last weight is cast, or gated product and MLP output",
        "max(3·e·T·f - e·h·f, e·T·(f+h))",
        LLAMA,
    )
    return middle(x), norm_output(x), gated


def attention_kept(x: Widths, *products: Line) -> tuple[Line, ...]:
    """List what per-operation recomputation keeps of attention: ``products``, and its output where a kernel computes it."""
    if written_out.is_written_out(x):
        return products
    output = Line(SAVED, x.element * x.tokens * x.context, "attention output", "e·T·c", SDPA)
    sums = Line(SAVED, 4 * x.tokens * x.heads, "log-sum-exp of the scores, fp32", "4·T·a", SDPA)
    return (*products, output, sums, *written_out.saved(x))


def query_and_value(x: Widths) -> tuple[Line, Line]:
    """Describe the first and third product of attention without biases."""
    return (
        Line(SAVED, x.element * x.tokens * x.query, "output of the q projection", "e·T·q", SELECTIVE),
        Line(SAVED, x.element * x.tokens * x.value, "output of the v projection", "e·T·v", SELECTIVE),
    )


def _selective(model: ModelSpec, x: Widths) -> tuple[Line, ...]:
    """Every second plain matrix product of the block; a product with a bias is another operator, neither counted nor kept."""
    kept = x.element * x.tokens
    if model.attention_bias and model.family == "qwen2":
        output = Line(SAVED, kept * x.hidden, "output of the output projection", "e·T·h", SELECTIVE)
        up = Line(SAVED, kept * model.intermediate_size, "output of the up projection", "e·T·f", SELECTIVE)
        return attention_kept(x, output, up)
    products = () if model.attention_bias else query_and_value(x)
    if not model.mlp_bias:
        gate = Line(SAVED, kept * model.intermediate_size, "output of the gate projection", "e·T·f", SELECTIVE)
        tag = Tag(Role.OUTPUT, Module.DOWN)
        products = (*products, gate, Line(SAVED, kept * x.hidden, "output of the down projection", "e·T·h", SELECTIVE, tag))
    return attention_kept(x, *products)
