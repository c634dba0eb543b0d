"""Blocks of the GPT-2 kind: LayerNorm, one joint projection for q, k and v, an MLP of two matrices. Dropout is off."""

from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.activation import activated
from zeroplan.transformer.families.attend import Attended, Heads
from zeroplan.transformer.families.norms import LAYER_BEFORE_ATTENTION, LAYER_BEFORE_MLP, LAYER_NORM
from zeroplan.transformer.families.operators import Site
from zeroplan.transformer.families.program import Block, Program
from zeroplan.transformer.families.tape import Tape, Value
from zeroplan.transformer.symbols import T, c, f, h, k, q, v

LAYER = "transformers 5.23, models/gpt2/modeling_gpt2.py, GPT2Block.forward"
ATTENTION = "transformers 5.23, models/gpt2/modeling_gpt2.py, GPT2Attention.forward"
MLP = "transformers 5.23, models/gpt2/modeling_gpt2.py, GPT2MLP.forward"


def gpt2(tape: Tape, given: Value, block: Block) -> Value:
    """One block; it holds attention's output, and the weights where they are written out, by name to its end."""
    normal = op.layer_norm(tape, given, LAYER_BEFORE_ATTENTION, LAYER_NORM)
    attended, weights = _attention(tape, normal, block)
    addition = Site("residual addition", LAYER)
    middle = op.add(tape, attended, given, "residual stream between attention and MLP", addition)
    tape.release(normal)
    normal = op.layer_norm(tape, middle, LAYER_BEFORE_MLP, LAYER_NORM)
    branch = _mlp(tape, normal, block)
    made = op.add(tape, middle, branch, "block output", addition)
    tape.release(branch, normal, middle, attended)
    if weights is not None:
        tape.release(weights)
    return made


def _attention(tape: Tape, normal: Value, block: Block) -> Attended:
    joint = op.linear(tape, normal, (q + k + v), Site("joint q, k and v projection", ATTENTION), bias=True, addmm=True)
    query, key, value = op.chunk(tape, joint, (T * q, T * k, T * v), Site("parts q, k and v", ATTENTION))
    context, weights = block.attend(tape, Heads(query, key, value, grouped=False, one_key=False, joint=True))
    made = op.linear(tape, context, h, Site("output projection", ATTENTION), reads=c, bias=True, addmm=True)
    tape.release(joint, query, key, value, context)
    return Attended(made, weights)


def _mlp(tape: Tape, normal: Value, block: Block) -> Value:
    inner = op.linear(tape, normal, f, Site("first MLP projection", MLP), bias=True, addmm=True)
    active = activated(tape, inner, block.activation, "activation, input of the second projection", MLP)
    tape.release(inner)
    made = op.linear(tape, active, h, Site("second MLP projection", MLP), reads=f, bias=True, addmm=True)
    tape.release(active)
    return made


PROGRAMS = {"gpt2": Program(gpt2, LAYER)}
