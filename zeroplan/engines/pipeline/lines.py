"""Lines that all moments of a pipeline rank share: parameters and kept activations."""

from zeroplan.engines.formulas import product, several
from zeroplan.engines.fsdp2.buffers import kept
from zeroplan.engines.fsdp2.groups import Group, param_groups
from zeroplan.engines.fsdp2.lines import copying_out
from zeroplan.engines.fsdp2.plan import Plan
from zeroplan.engines.pipeline.gradients import sizes_of
from zeroplan.engines.pipeline.stage import StagePlan
from zeroplan.engines.pipeline.tensor import whole_embedding
from zeroplan.engines.sources import FLOWING
from zeroplan.ledger import Kind, Line, total_bytes
from zeroplan.numeric import Int, maximum, weighted

UNSYNCED = "torch 2.13, torch/distributed/pipelining/stage.py, backward_maybe_with_nosync"
AT_ONCE = "torch 2.13, torch/distributed/pipelining/schedules.py, _add_unshard_reshard"


def stays_unsharded(plan: Plan, *, whole: bool) -> tuple[Group, ...]:
    """Return the units outside the blocks that stay unsharded between passes; in a ``whole`` stage also a separate embedding."""
    return plan.outside if plan.ends is None or whole else (plan.ends.head,)


def unsharded_parameters(plan: Plan, layers: tuple[int, ...], reason: str, outside: tuple[Group, ...] = ()) -> Line:
    """Return the unsharded parameters of these layers and of ``outside`` units. [bytes]"""
    elements = sum([group.padded for group in outside]) + weighted(layers, [group.padded for group in plan.blocks])
    n_bytes = plan.width.compute * elements
    return Line(Kind.UNSHARDED_PARAMETERS, n_bytes, reason, product(plan.width.compute, elements), UNSYNCED)


def gathered_at_once(plan: Plan) -> tuple[Line, Line]:
    """Return all groups of a stage, gathered before its first pass and then copied out one by one, with temporaries. [bytes]"""
    reason, width = "this stage's parameters, in all-gather buffers or copied out", plan.width.compute
    together = unsharded_parameters(plan, plan.every_layer, reason, plan.outside)
    most: Int = 0
    for unit in (*plan.outside, *plan.blocks):
        missing: Int = 0
        for group in reversed(
            param_groups(unit, plan.gathers, "", plan.n)
        ):  # experts that no other rank has are copied at the end
            own = group.gathers * width * group.padded + total_bytes(copying_out(plan, unit, group)) * group.are_experts
            most = maximum(most, own - missing)
            missing = missing + (1 - group.gathers) * width * group.padded
    return together, Line(Kind.GATHER, most, "the buffer of the group that is copied out", product(1, most), AT_ONCE)


def flowing_line(stage: StagePlan, reason: str, count: int = 1) -> Line:
    """Return a gradient of the hidden state, if it is a separate tensor. [bytes]"""
    n_bytes = count * stage.hidden_bytes
    return Line(Kind.ACTIVATION_GRADIENTS, n_bytes, reason, several((count, stage.hidden_bytes)), FLOWING)


def kept_before(stage: StagePlan, layers: tuple[int, ...]) -> tuple[Line, ...]:
    """Return the activations of this micro-batch in these blocks. The lowest block's input is in a receive buffer. [bytes]"""
    return _kept_of(stage, layers, every=False)


def kept_of_all(stage: StagePlan) -> tuple[Line, ...]:
    """Return the activations of this micro-batch in all blocks. [bytes]"""
    return _kept_of(stage, stage.plan.every_layer, every=True)


def _kept_of(stage: StagePlan, layers: tuple[int, ...], *, every: bool) -> tuple[Line, ...]:
    line, *tables = kept(stage.plan, layers, every=every)
    formula = several(*zip(layers, stage.plan.kept, strict=True))
    if stage.takes_from_buffer and any(layers):
        line = line._replace(n_bytes=line.n_bytes - stage.hidden_bytes)
        formula = formula and f"{formula} - {stage.hidden_bytes}"
    return (line._replace(formula=formula), *tables)


def root_sizes(plan: Plan) -> tuple[int, ...]:
    """Return the elements of each trained parameter's gradient outside the blocks; a split embedding's counts whole."""
    blocks = {parameter.name for run in plan.runs for parameter in run.parameters}
    first, *rest = sizes_of(one for one in plan.parameters if one.name not in blocks)
    return first + whole_embedding(plan), *rest
