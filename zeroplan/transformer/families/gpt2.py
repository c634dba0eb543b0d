"""Blocks of the GPT-2 kind: LayerNorm, one joint projection for q, k and v, a two-matrix MLP with tanh GELU."""

from zeroplan.ledger import Line, total_bytes
from zeroplan.numeric import maximum
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.blocks import BlockPass
from zeroplan.transformer.families.attention import EAGER, eager_forward_bytes, fused_attention
from zeroplan.transformer.families.llama import (
    EAGER_EXCESS,
    attention_kept,
    eager_excess,
    middle,
    norm_output,
)
from zeroplan.transformer.families.mlp import GPT2, gelu_mlp
from zeroplan.transformer.families.norms import LAYER_BEFORE_ATTENTION, LAYER_BEFORE_MLP, layer_norm
from zeroplan.transformer.families.parts import TEMPORARY, assemble
from zeroplan.transformer.families.widths import Widths
from zeroplan.transformer.families.written_out import ON_CUDA

BLOCK = "transformers 5.23, models/gpt2/modeling_gpt2.py, GPT2Block.forward"


def gpt2_block(model: ModelSpec, x: Widths) -> BlockPass:
    """One GPT-2 block, dropout off. Its products have biases, so that selective recomputation keeps none of them."""
    parts = (
        layer_norm(x, LAYER_BEFORE_ATTENTION),
        fused_attention(x),
        layer_norm(x, LAYER_BEFORE_MLP),
        gelu_mlp(x, model.intermediate_size),
    )
    forward, recompute = _forward(model, x), _recompute(model, x)
    if x.attention == "eager":
        forward = (*forward, eager_excess(x, parts, forward))
        at_softmax = eager_forward_bytes(x, head_norms=False, recomputed=True)
        above = maximum(0, at_softmax - total_bytes(recompute))
        recompute = (*recompute, Line(TEMPORARY, above, EAGER_EXCESS, source=EAGER))
    return assemble(
        x, parts, forward=forward, recompute=recompute, selective=attention_kept(x), input_is_saved=True
    )  # fmt: skip


def _attention_output(x: Widths) -> Line:
    return Line(TEMPORARY, x.element * x.tokens * x.hidden, "attention's output, held by name", "e·T·h", BLOCK)


def _forward(model: ModelSpec, x: Widths) -> tuple[Line, ...]:
    hidden = x.tokens * x.hidden
    lines = (
        _attention_output(x),
        Line(TEMPORARY, x.element * hidden, "MLP output before the residual addition", "e·T·h", BLOCK),
        Line(TEMPORARY, x.residual * hidden, "block output", "r·T·h", BLOCK),
    )
    return (*lines, norm_output(x), _gelu_in_fp32(model, x)) if x.autocast else lines


def _gelu_in_fp32(model: ModelSpec, x: Widths) -> Line:
    """What the second projection reads, held by name beside the copy that autocast makes of it, before the output is there."""
    beyond = maximum(0, 4 * x.tokens * (model.intermediate_size - x.hidden))
    return Line(TEMPORARY, beyond, f"gelu in fp32, beyond the block output, {ON_CUDA}", "max(0, 4·T·(f-h))", GPT2)


def _recompute(model: ModelSpec, x: Widths) -> tuple[Line, ...]:
    inner = x.tokens * model.intermediate_size
    if x.autocast:
        # At GELU the second projection's weight is not cast yet, which is counted among the casts.
        hidden = x.tokens * x.hidden
        early, late = 12 * inner - x.element * x.hidden * model.intermediate_size, x.element * (inner + hidden)
        gelu = Line(
            TEMPORARY,
            maximum(early, late, (x.element + 4) * hidden),
            "operands of tanh GELU, partly fp32 under CUDA's autocast, or what follows",
            "max(12·T·f - e·h·f, e·T·(f+h), (e+4)·T·h)",
            GPT2,
        )
    else:
        gelu = Line(TEMPORARY, 4 * x.element * inner, "operands of tanh GELU", "4·e·T·f", GPT2)
    return middle(x), _attention_output(x), norm_output(x), gelu
