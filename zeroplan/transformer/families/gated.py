"""What blocks of several families have in common: two branches behind norms, attention of three projections, a gated MLP."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from zeroplan.expr import Size
from zeroplan.ledger import Module
from zeroplan.transformer.blocks import At, Place
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.activation import activated
from zeroplan.transformer.families.attend import Attended, Heads
from zeroplan.transformer.families.norms import AT_ATTENTION_NORM, AT_MLP_NORM, RMS_NORM
from zeroplan.transformer.families.operators import NormAs
from zeroplan.transformer.families.program import Block, Program
from zeroplan.transformer.families.sharded import gathered, norm
from zeroplan.transformer.families.tape import Site, Tape, Value
from zeroplan.transformer.symbols import T, a, c, d, f, h, k, k_d, q, v

#: How Llama writes RMSNorm, and those that follow it.
LLAMA_NORM = NormAs(one_plus=False, source=RMS_NORM)


class Branches(NamedTuple):
    """A layer whose attention and MLP each read a norm's output and are added to the residual stream."""

    norm: NormAs
    attention: Callable[[Tape, Value, Block], Attended]
    mlp: Callable[[Tape, Value, Block], Value]
    source: str
    multiplied: bool = False
    """What a branch makes is multiplied by a number before it is added."""
    before_mlp: Place = AT_MLP_NORM
    """Of the norm before the MLP."""
    after: tuple[Place, Place] | None = None
    """Of norms after attention and after the MLP, where there are any."""


def two_branches(tape: Tape, given: Value, block: Block, parts: Branches) -> Value:
    """One decoder layer; it holds the attention's weights by name to its end."""
    normal = norm(tape, given, "norm before attention", parts.norm, AT_ATTENTION_NORM)
    whole = gathered(tape, normal, "input of attention")
    attended, weights = parts.attention(tape, whole, block)
    tape.release(whole, normal)
    attended = _normed(tape, attended, "norm after attention", parts, 0)
    middle = _added(tape, given, attended, "residual stream between attention and MLP", parts)
    normal = norm(tape, middle, "norm before the MLP", parts.norm, parts.before_mlp)
    whole = gathered(tape, normal, "input of the MLP")
    branch = parts.mlp(tape, whole, block)
    tape.release(whole, normal)
    branch = _normed(tape, branch, "norm after the MLP", parts, 1)
    made = _added(tape, middle, branch, "block output", parts)
    tape.release(middle)
    if weights is not None:
        tape.release(weights)
    return made


def layer(parts: Branches) -> Program:
    """A family's program whose layer has two such branches."""
    return Program(partial(two_branches, parts=parts), parts.source, parts.norm)


def _normed(tape: Tape, branch: Value, name: str, parts: Branches, number: int) -> Value:
    """What a branch has made, put through a norm of its own where the family has one; the name goes over."""
    if parts.after is None:
        return branch
    made = op.rms_norm(tape, branch, name, parts.norm, place=parts.after[number])
    tape.release(branch)
    return made


def _added(tape: Tape, given: Value, branch: Value, reason: str, parts: Branches) -> Value:
    """Add to the residual stream what a branch has made, whose name stays until that is done."""
    term = op.multiplied(tape, branch, Site("branch times its multiplier", parts.source)) if parts.multiplied else branch
    made = op.add(tape, given, term, reason, Site("residual addition", parts.source))
    tape.release(*((term, branch) if parts.multiplied else (branch,)))
    return made


def three_projections(
    tape: Tape, normal: Value, block: Block, source: str, of_heads: NormAs | None = None, *, at_once: bool = False
) -> Attended:  # fmt: skip
    """Attention whose queries, keys and values are projected apart; ``of_heads`` is the norm of each head's queries and keys.

    ``at_once``: each of these is normalised as soon as it is made, or else when all three are.
    """

    def projected(width: Size, name: str, module: Module) -> Value:
        return op.linear(tape, normal, width, Site(name, source, module), bias=block.attention_bias)

    def normed(bare: Value, name: str, rows: Size, module: Module) -> Value:
        if of_heads is None:
            return bare
        made = op.rms_norm(tape, bare, name, of_heads, weight=d, rows=rows, place=Place(At.NORM, module))
        tape.release(bare)
        return made

    def normed_queries(bare: Value) -> Value:
        return normed(bare, "norm of the queries", T * a, Module.Q_NORM)

    def normed_keys(bare: Value) -> Value:
        return normed(bare, "norm of the keys", T * k_d, Module.K_NORM)

    query = projected(q, "q projection", Module.Q)
    query = normed_queries(query) if at_once else query
    key = projected(k, "k projection", Module.K)
    key = normed_keys(key) if at_once else key
    value = projected(v, "v projection", Module.V)
    if not at_once:
        query, key = normed_queries(query), normed_keys(key)
    turned = op.rotary(tape, query, Site("queries", source)), op.rotary(tape, key, Site("keys", source))
    tape.release(query, key)
    context, weights = block.attend(tape, Heads(*turned, value, block.grouped, block.one_key))
    made = op.linear(tape, context, h, Site("output projection", source, Module.O), reads=c, bias=block.output_bias)
    tape.release(value, *turned, context)
    return Attended(made, weights)


def gated_mlp(tape: Tape, normal: Value, block: Block, source: str, *, width: Size = f, of: str = "") -> Value:
    """``down(act(gate(x)) * up(x))``; ``of`` goes before the names of its moments, where there is another."""
    bias, modules = block.mlp_bias, (Module.NONE,) * 3 if of else (Module.GATE, Module.UP, Module.DOWN)
    gate = op.linear(tape, normal, width, Site(f"{of}gate projection", source, modules[0]), bias=bias)
    active = activated(tape, gate, block.activation, f"{of}{block.activation} of the gate", source)
    tape.release(gate)
    up = op.linear(tape, normal, width, Site(f"{of}up projection", source, modules[1]), bias=bias)
    inner = op.product(tape, active, up, f"{of}gated product, input of the down projection", Site(f"{of}gated product", source))
    tape.release(active, up)
    made = op.linear(tape, inner, h, Site(f"{of}down projection", source, modules[2]), reads=width, bias=bias)
    tape.release(inner)
    return made
