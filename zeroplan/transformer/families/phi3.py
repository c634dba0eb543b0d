"""Blocks of the Phi-3 kind: Llama's, with one projection for q, k and v and one for gate and up."""

from zeroplan.ledger import Module
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.activation import activated
from zeroplan.transformer.families.attend import Attended, Heads
from zeroplan.transformer.families.gated import Branches, two_branches
from zeroplan.transformer.families.operators import NormAs, Site
from zeroplan.transformer.families.program import Block, Program
from zeroplan.transformer.families.tape import Tape, Value
from zeroplan.transformer.symbols import T, c, f, h, k, q, v

LAYER = "transformers 5.23, models/phi3/modeling_phi3.py, Phi3DecoderLayer.forward"
ATTENTION = "transformers 5.23, models/phi3/modeling_phi3.py, Phi3Attention.forward"
MLP = "transformers 5.23, models/phi3/modeling_phi3.py, Phi3MLP.forward"
NORM = NormAs(one_plus=False, source="transformers 5.23, models/phi3/modeling_phi3.py, Phi3RMSNorm.forward")


def phi3(tape: Tape, given: Value, block: Block) -> Value:
    """One decoder layer."""
    return two_branches(tape, given, block, _PARTS)


def _attention(tape: Tape, normal: Value, block: Block) -> Attended:
    joint = op.linear(tape, normal, (q + k + v), Site("joint q, k and v projection", ATTENTION))
    query, key, value = op.slices(tape, joint, (T * q, T * k, T * v), Site("slices of q, k and v", ATTENTION))
    turned = op.rotary(tape, query, Site("queries", ATTENTION)), op.rotary(tape, key, Site("keys", ATTENTION))
    tape.release(query, key)
    context, weights = block.attend(tape, Heads(*turned, value, block.grouped, block.one_key, joined=True, joint=True))
    made = op.linear(tape, context, h, Site("output projection", ATTENTION), reads=c)
    tape.release(joint, value, *turned, context)
    return Attended(made, weights)


def _mlp(tape: Tape, normal: Value, block: Block) -> Value:
    both = op.linear(tape, normal, (f + f), Site("joint gate and up projection", MLP))
    gate, up = op.chunk(tape, both, (T * f, T * f), Site("gate and up", MLP))
    tape.release(both)
    active = activated(tape, gate, block.activation, f"{block.activation} of the gate", MLP)
    inner = op.product(tape, up, active, "gated product, input of the down projection", Site("gated product", MLP))
    tape.release(active, up)
    made = op.linear(tape, inner, h, Site("down projection", MLP, Module.DOWN), reads=f)
    tape.release(inner, gate)
    return made


_PARTS = Branches(NORM, _attention, _mlp, LAYER)


PROGRAMS = {"phi3": Program(phi3, LAYER, NORM)}
