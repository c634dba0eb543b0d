"""A stage of a pipeline whose experts are on several ranks. FSDP2 shards each of its blocks in two param groups.

Everything but the experts is gathered, copied out and, under a schedule, reduced first; the experts follow. Only the second
reduction frees the inputs of earlier reductions (torch 2.13, ``torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py``,
``post_backward``; ``torch/distributed/pipelining/stage.py``, ``perform_reduce_grad``).
"""

from collections.abc import Iterator

from zeroplan.engines.formulas import product
from zeroplan.engines.fsdp2.buffers import reduce_input, reduce_output_bytes
from zeroplan.engines.fsdp2.groups import Apart, Group, param_groups
from zeroplan.engines.fsdp2.lines import experts_copied_or_reduced
from zeroplan.engines.fsdp2.plan import REDUCE, Plan
from zeroplan.engines.pipeline.gradients import named_bytes
from zeroplan.ledger import Kind, Line, Moment, Phase
from zeroplan.numeric import Int, maximum


def reducing(
    plan: Plan, run: int, width: int, name: str, there: tuple[tuple[Line, ...], tuple[Line, ...]]
) -> Iterator[Moment]:  # fmt: skip
    """Yield the reduction of a block's other parameters, while its experts are unsharded, and then that of the experts.

    ``there``: lines alive in both, and lines alive only in the first. Gradients are ``width`` bytes wide until then.
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
    made = maximum(width * others.numel, reduce_output_bytes(plan, others) + named_bytes(plan, width, last))
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
    """Return the experts' gradients in their reduction. A variable holds the last one until it ends."""
    _, theirs = param_groups(group, plan.gathers, "", plan.n)
    copied = experts_copied_or_reduced(plan, theirs, width)
    named = apart.gathers * named_bytes(plan, width, apart.last) + reduce_output_bytes(plan, group.of_experts)
    return _of(Kind.UNSHARDED_GRADIENTS, maximum(copied, named), "the experts' while copied in, or the reduce-scatter output")


def waiting(plan: Plan, run: int, *, is_first: bool) -> tuple[Line, ...]:
    """Return the input of the previous reduction, of the same group unless it is the first; it lives until the experts' begins."""
    before = plan.outside[0] if is_first and not run else plan.blocks[run - is_first]
    return (plain(reduce_input(plan, before.of_experts, "reduce-scatter input of what was reduced before")),)


def plain(line: Line) -> Line:
    """Return the line with its bytes as formula, since stages use one name for several sizes."""
    return line._replace(formula=product(1, line.n_bytes))


def _of(kind: Kind, n_bytes: Int, reason: str) -> Line:
    return plain(Line(kind, n_bytes, reason, source=REDUCE))


def _apart(group: Group) -> Apart:
    assert group.experts is not None  # noqa: S101  asked of blocks with experts only
    return group.experts
