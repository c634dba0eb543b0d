"""Blocks of GPT-NeoX and Pythia: attention and MLP side by side over the same input, each behind a LayerNorm."""

from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.attend import Attended, Heads
from zeroplan.transformer.families.norms import LAYER_BEFORE_ATTENTION, LAYER_BEFORE_MLP, LAYER_FINAL, LAYER_NORM
from zeroplan.transformer.families.operators import Site
from zeroplan.transformer.families.program import Block
from zeroplan.transformer.families.tape import Tape, Value

LAYER = "transformers 5.23, models/gpt_neox/modeling_gpt_neox.py, GPTNeoXLayer.forward"
ATTENTION = "transformers 5.23, models/gpt_neox/modeling_gpt_neox.py, GPTNeoXAttention.forward"
MLP = "transformers 5.23, models/gpt_neox/modeling_gpt_neox.py, GPTNeoXMLP.forward"


def gpt_neox(tape: Tape, given: Value, block: Block) -> Value:
    """One layer with the parallel residual."""
    normal = op.layer_norm(tape, given, LAYER_BEFORE_ATTENTION, LAYER_NORM)
    attended, weights = _attention(tape, normal, block)
    tape.release(normal)
    if weights is not None:
        tape.release(weights)
    normal = op.layer_norm(tape, given, LAYER_BEFORE_MLP, LAYER_NORM)
    branch = _mlp(tape, normal)
    tape.release(normal)
    both = op.add(tape, branch, attended, "sum of MLP and attention", Site("addition of the branches", LAYER))
    made = op.add(tape, both, given, "block output", Site("residual addition", LAYER))
    tape.release(both, branch, attended)
    return made


def final_norm(tape: Tape, given: Value) -> Value:
    """The norm before the head."""
    return op.layer_norm(tape, given, LAYER_FINAL, LAYER_NORM)


def _attention(tape: Tape, normal: Value, block: Block) -> Attended:
    bias = block.attention_bias
    joint = op.linear(tape, normal, "(q+k+v)", Site("joint q, k and v projection", ATTENTION), bias=bias)
    query, key, value = op.chunk(tape, joint, ("T·q", "T·k", "T·v"), Site("parts q, k and v", ATTENTION))
    turned = (
        op.rotary(tape, query, Site("queries", ATTENTION), part="/4"),
        op.rotary(tape, key, Site("keys", ATTENTION), part="/4"),
    )
    tape.release(query, key)
    context, weights = block.attend(tape, Heads(*turned, value, grouped=False, one_key=False, joined=True, joint=True))
    made = op.linear(tape, context, "h", Site("output projection", ATTENTION), reads="c", bias=bias)
    tape.release(joint, value, *turned, context)
    return Attended(made, weights)


def _mlp(tape: Tape, normal: Value) -> Value:
    inner = op.linear(tape, normal, "f", Site("first MLP projection", MLP), bias=True)
    active = op.pointwise(tape, inner, "gelu, input of the second projection", Site("gelu", MLP))
    tape.release(inner)
    made = op.linear(tape, active, "h", Site("second MLP projection", MLP), reads="f", bias=True)
    tape.release(active)
    return made
