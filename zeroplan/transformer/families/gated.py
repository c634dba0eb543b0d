"""What blocks of several families have in common: two branches behind norms, attention of three projections, a gated MLP."""

from collections.abc import Callable
from typing import NamedTuple

from zeroplan.expr import Size
from zeroplan.ledger import Module
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.activation import activated
from zeroplan.transformer.families.attend import Attended, Heads
from zeroplan.transformer.families.norms import AT_ATTENTION_NORM, AT_MLP_NORM, RMS_NORM
from zeroplan.transformer.families.operators import NormAs, Site
from zeroplan.transformer.families.program import Block
from zeroplan.transformer.families.tape import Tape, Value
from zeroplan.transformer.symbols import T, a, c, d, f, h, k, k_d, q, v

#: How Llama writes RMSNorm, and those that follow it.
LLAMA_NORM = NormAs(one_plus=False, source=RMS_NORM)


class Branches(NamedTuple):
    """A layer whose attention and MLP each read a norm's output and are added to the residual stream."""

    norm: NormAs
    attention: Callable[[Tape, Value, Block], Attended]
    mlp: Callable[[Tape, Value, Block], Value]
    source: str


def two_branches(tape: Tape, given: Value, block: Block, parts: Branches) -> Value:
    """One decoder layer; it holds the attention's weights by name to its end."""
    addition = Site("residual addition", parts.source)
    normal = op.rms_norm(tape, given, "norm before attention", parts.norm, place=AT_ATTENTION_NORM)
    attended, weights = parts.attention(tape, normal, block)
    tape.release(normal)
    middle = op.add(tape, given, attended, "residual stream between attention and MLP", addition)
    tape.release(attended)
    normal = op.rms_norm(tape, middle, "norm before the MLP", parts.norm, place=AT_MLP_NORM)
    branch = parts.mlp(tape, normal, block)
    tape.release(normal)
    made = op.add(tape, middle, branch, "block output", addition)
    tape.release(branch, middle)
    if weights is not None:
        tape.release(weights)
    return made


def three_projections(tape: Tape, normal: Value, block: Block, source: str, norm: NormAs | None = None) -> Attended:
    """Attention whose queries, keys and values are projected apart; ``norm`` is that of each head's queries and keys."""
    names, bias = ((q, "q projection"), (k, "k projection"), (v, "v projection")), block.attention_bias
    query, key, value = (op.linear(tape, normal, width, Site(name, source), bias=bias) for width, name in names)
    if norm is not None:
        bare = query, key
        query = op.rms_norm(tape, query, "norm of the queries", norm, weight=d, rows=T * a)
        key = op.rms_norm(tape, key, "norm of the keys", norm, weight=d, rows=T * k_d)
        tape.release(*bare)
    turned = op.rotary(tape, query, Site("queries", source)), op.rotary(tape, key, Site("keys", source))
    tape.release(query, key)
    context, weights = block.attend(tape, Heads(*turned, value, block.grouped, block.one_key))
    made = op.linear(tape, context, h, Site("output projection", source), reads=c, bias=block.output_bias)
    tape.release(value, *turned, context)
    return Attended(made, weights)


def gated_mlp(tape: Tape, normal: Value, block: Block, source: str, *, width: Size = f, of: str = "") -> Value:
    """``down(act(gate(x)) * up(x))``; ``of`` goes before the names of its moments, where there is another."""
    bias = block.mlp_bias
    gate = op.linear(tape, normal, width, Site(f"{of}gate projection", source), bias=bias)
    active = activated(tape, gate, block.activation, f"{of}{block.activation} of the gate", source)
    tape.release(gate)
    up = op.linear(tape, normal, width, Site(f"{of}up projection", source), bias=bias)
    inner = op.product(tape, active, up, f"{of}gated product, input of the down projection", Site(f"{of}gated product", source))
    tape.release(active, up)
    module = Module.NONE if of else Module.DOWN
    made = op.linear(tape, inner, h, Site(f"{of}down projection", source, module), reads=width, bias=bias)
    tape.release(inner)
    return made
