"""A stage of a pipeline whose experts are on several ranks: what FSDP2 does otherwise with blocks that are sharded in two groups.

Everything but the experts is gathered, copied out and, under a schedule, reduced first, the experts after it; only the second
gives back the inputs of reductions before it (torch 2.13, ``torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py``,
``post_backward``; ``torch/distributed/pipelining/stage.py``, ``perform_reduce_grad``).
"""

from collections.abc import Iterator

from zeroplan.engines.formulas import product
from zeroplan.engines.fsdp2 import experts
from zeroplan.engines.fsdp2.buffers import last_gathered, reduce_input, reduce_output_bytes, reduce_output_width
from zeroplan.engines.fsdp2.groups import Apart, Group
from zeroplan.engines.fsdp2.plan import REDUCE, Plan
from zeroplan.engines.positions import Position
from zeroplan.ledger import Kind, Line, Moment, Phase
from zeroplan.numeric import Int, maximum


def entering(
    plan: Plan, position: Position, alive: tuple[Line, ...], before: tuple[Line, ...], beside: tuple[Line, ...]
) -> Iterator[Moment]:
    """A block is copied out in two goes, while the block ``before`` has its buffer and then while its own has."""
    parked = before[0] if before else Line(Kind.GATHER, 0, "nothing before it")
    for moment in experts.entering(plan, position, alive, parked, beside):
        there, made = moment.lines[: len(alive)], moment.lines[len(alive) :]
        yield moment._replace(lines=(*there, *map(plain, made)))


def while_all_are_copied_out(plan: Plan) -> Int:
    """What there is at the most beside all of a stage, gathered or copied out: the buffer of a group, or a second copy. [bytes]

    Experts that no other rank has are not there before they are copied themselves, the last block's at the end.
    """
    width, most = plan.width.compute, plan.width.compute * plan.gathers * plan.root.padded
    for group in plan.blocks:
        if group.experts is None:
            most = maximum(most, width * plan.gathers * group.padded)
            continue
        one = group.experts
        by_the_way, _ = experts.copying(plan, group, one)
        beside = width * (group.padded - one.padded - (1 - one.gathers) * one.padded)
        most = maximum(most, beside, width * one.gathers * one.padded + by_the_way)
    return most


def gathered_ahead(plan: Plan, position: Position) -> Line:
    """In the backward: a block's own buffers until they are copied out, then those of the block below."""
    (line,) = experts.own_buffers_then_the_next(plan, position)
    return plain(line)


def reducing(
    plan: Plan, run: int, width: int, name: str, there: tuple[tuple[Line, ...], tuple[Line, ...]]
) -> Iterator[Moment]:  # fmt: skip
    """What is not the experts' is reduced first, while they are unsharded; then they are.

    ``there`` is what is there in both, and in the first alone. Gradients are ``width`` bytes wide until then.
    """
    alive, waiting = there
    group = plan.blocks[run]
    apart = _apart(group)
    others = group.beside_experts
    theirs = (
        _of(Kind.UNSHARDED_PARAMETERS, plan.width.compute * apart.padded, "its experts, unsharded"),
        _of(Kind.UNSHARDED_GRADIENTS, width * apart.numel, "its experts' gradients"),
    )
    last = [one.numel for one in plan.runs[run].parameters if one.active_share == (1, 1)][-1]
    named = plan.gathers * width * last
    made = maximum(width * others.numel, reduce_output_bytes(plan, others) + named)
    copied = _of(
        Kind.UNSHARDED_GRADIENTS, made, "the others' while copied in, or the reduce-scatter output and the last of them"
    )
    into = plain(reduce_input(plan, others, "reduce-scatter input of what is not the experts'"))
    yield Moment(f"reducing {name} beside its experts", Phase.BACKWARD, (*alive, *theirs, *waiting, into, copied))
    shards = _of(Kind.GRADIENTS, plan.width.stored * others.shard, "this rank's chunk of the others' gradients")
    apart_too = 0 if plan.reduce_bytes == plan.width.stored else plan.reduce_bytes  # the all-reduce's own is a copy then
    held = _of(Kind.REDUCE, plan.replicated * apart_too * others.shard, "the others' all-reduce over replicas, held")
    into = _of(Kind.REDUCE, plan.reduce_bytes * apart.padded, "reduce-scatter input of its experts")
    yield Moment(
        f"reducing the experts of {name}",
        Phase.BACKWARD,
        (*alive, shards, held, into, _experts_made(plan, group, apart, width)),
    )


def _experts_made(plan: Plan, group: Group, apart: Apart, width: int) -> Line:
    """As outside pipelines, but that the last gradient has a name until the reduction is over."""
    copied = plain(experts.copied_in(plan, apart, group.symbol, (reduce_output_width(plan), width, "")))
    named = apart.gathers * width * apart.last + reduce_output_bytes(plan, group.of_experts)
    return copied._replace(n_bytes=maximum(copied.n_bytes, named), formula=product(1, maximum(copied.n_bytes, named)))


def waiting(plan: Plan, run: int, *, is_first: bool) -> tuple[Line, ...]:
    """The input of the reduction before a block's, of the same kind unless it is the first: it stays until the experts' begins."""
    before = plan.root if is_first and not run else plan.blocks[run - is_first]
    return (plain(reduce_input(plan, before.of_experts, "reduce-scatter input of what was reduced before")),)


def parked(plan: Plan, group: Group, reason: str) -> Line:
    """The buffer that stays until the next copy-out."""
    return plain(last_gathered(plan, group, reason))


def plain(line: Line) -> Line:
    """The line with bytes for a formula: what stages call alike is of several sizes."""
    return line._replace(formula=product(1, line.n_bytes))


def _of(kind: Kind, n_bytes: Int, reason: str) -> Line:
    return plain(Line(kind, n_bytes, reason, source=REDUCE))


def _apart(group: Group) -> Apart:
    assert group.experts is not None  # noqa: S101  asked of blocks with experts only
    return group.experts
