"""Blocks of the Llama kind: Llama, Mistral, Qwen2, and Qwen3 with its norms over each head's queries and keys."""

from __future__ import annotations

from zeroplan.ledger import Line
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.blocks import BlockPass
from zeroplan.transformer.families.attention import LLAMA, grouped_query_attention
from zeroplan.transformer.families.mlp import gated_mlp
from zeroplan.transformer.families.norms import BEFORE_ATTENTION, BEFORE_MLP, rms_norm
from zeroplan.transformer.families.parts import SAVED, TEMPORARY, Part, backward_points, saved_by
from zeroplan.transformer.families.widths import Widths


def llama_block(model: ModelSpec, x: Widths) -> BlockPass:
    """One decoder layer: norm, attention, norm, gated MLP."""
    bias = model.attention_bias
    attention = grouped_query_attention(x, bias=bias, output_bias=bias and model.family == "llama")
    mlp = gated_mlp(x, model.intermediate_size, bias=model.mlp_bias)
    parts = (rms_norm(x, BEFORE_ATTENTION), attention, rms_norm(x, BEFORE_MLP), mlp)
    return assemble(model, x, parts)


def assemble(model: ModelSpec, x: Widths, parts: tuple[Part, ...]) -> BlockPass:
    """A pre-norm block of two residual branches from its four parts."""
    hidden = x.tokens * x.hidden
    block_input = Line(SAVED, x.residual * hidden, "block input", "r·T·h", LLAMA)
    output = Line(TEMPORARY, x.residual * hidden, "block output", "r·T·h", LLAMA)
    branch = Line(TEMPORARY, x.element * hidden, "MLP output before the residual addition", "e·T·h", LLAMA)
    middle = Line(TEMPORARY, x.residual * hidden, "residual stream between attention and MLP", "r·T·h", LLAMA)
    copied = x.residual != 4
    inner = x.element * x.tokens * model.intermediate_size
    recompute = (
        middle,
        Line(TEMPORARY, x.element * hidden, "input of the MLP", "e·T·h", LLAMA),
        Line(TEMPORARY, 3 * inner, "silu, up and gated product", "3·e·T·f", LLAMA),
    )
    return BlockPass(
        saved_by(parts),
        (block_input,),
        (block_input,),
        (block_input, middle, branch, output) if copied else (branch, output),
        recompute,
        backward_points(x, parts),
        sum(part.casts for part in parts),
        (block_input,) if copied else (),
    )
