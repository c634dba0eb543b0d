"""Blocks of Gemma 2 and Gemma 3: norms before and after each branch, scaled in fp32; Gemma 3 also norms queries and keys."""

from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.attend import Attended, Heads
from zeroplan.transformer.families.operators import NormAs, Site
from zeroplan.transformer.families.program import Block
from zeroplan.transformer.families.tape import Tape, Value

LAYER = "transformers 5.23, models/gemma3/modeling_gemma3.py, Gemma3DecoderLayer.forward"
ATTENTION = "transformers 5.23, models/gemma3/modeling_gemma3.py, Gemma3Attention.forward"
MLP = "transformers 5.23, models/gemma3/modeling_gemma3.py, Gemma3MLP.forward"
NORM = NormAs(one_plus=True, source="transformers 5.23, models/gemma3/modeling_gemma3.py, Gemma3RMSNorm.forward")


def gemma(tape: Tape, given: Value, block: Block) -> Value:
    """One decoder layer."""
    normal = op.rms_norm(tape, given, "norm before attention", NORM)
    attended, weights = _attention(tape, normal, block)
    tape.release(normal)
    normal = op.rms_norm(tape, attended, "norm after attention", NORM)
    tape.release(attended)
    middle = op.add(tape, given, normal, "residual stream between attention and MLP", Site("residual addition", LAYER))
    tape.release(normal)
    normal = op.rms_norm(tape, middle, "norm before the MLP", NORM)
    branch = _mlp(tape, normal)
    tape.release(normal)
    normal = op.rms_norm(tape, branch, "norm after the MLP", NORM)
    tape.release(branch)
    made = op.add(tape, middle, normal, "block output", Site("residual addition", LAYER))
    tape.release(normal, middle)
    if weights is not None:
        tape.release(weights)
    return made


def final_norm(tape: Tape, given: Value) -> Value:
    """The norm before the head."""
    return op.rms_norm(tape, given, "final norm", NORM)


def _attention(tape: Tape, normal: Value, block: Block) -> Attended:
    names = (("q", "q projection"), ("k", "k projection"), ("v", "v projection"))
    query, key, value = (
        op.linear(tape, normal, width, Site(name, ATTENTION), bias=block.attention_bias) for width, name in names
    )  # fmt: skip
    if block.head_norms:
        bare = query, key
        query = op.rms_norm(tape, query, "norm of the queries", NORM, weight="d", rows="T·a")
        key = op.rms_norm(tape, key, "norm of the keys", NORM, weight="d", rows="T·k/d")
        tape.release(*bare)
    turned = op.rotary(tape, query, Site("queries", ATTENTION)), op.rotary(tape, key, Site("keys", ATTENTION))
    tape.release(query, key)
    context, weights = block.attend(tape, Heads(*turned, value, block.grouped, block.one_key))
    made = op.linear(tape, context, "h", Site("output projection", ATTENTION), reads="c", bias=block.attention_bias)
    tape.release(value, *turned, context)
    return Attended(made, weights)


def _mlp(tape: Tape, normal: Value) -> Value:
    gate = op.linear(tape, normal, "f", Site("gate projection", MLP))
    active = op.pointwise(tape, gate, "gelu of the gate", Site("gelu", MLP))
    tape.release(gate)
    up = op.linear(tape, normal, "f", Site("up projection", MLP))
    inner = op.product(tape, active, up, "gated product, input of the down projection", Site("gated product", MLP))
    tape.release(active, up)
    made = op.linear(tape, inner, "h", Site("down projection", MLP), reads="f")
    tape.release(inner)
    return made
