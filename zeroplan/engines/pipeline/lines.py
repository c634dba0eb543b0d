"""Lines that the moments of a pipeline rank have in common: parameters, gradients and what a stage keeps, whatever the pass."""

from zeroplan.engines.formulas import product, several
from zeroplan.engines.fsdp2 import buffers
from zeroplan.engines.fsdp2.buffers import kept
from zeroplan.engines.fsdp2.groups import Group
from zeroplan.engines.fsdp2.plan import ACCUMULATE, Plan
from zeroplan.engines.pipeline.stage import StagePlan
from zeroplan.engines.pipeline.tensor import root_elements
from zeroplan.engines.positions import Position
from zeroplan.engines.sources import FLOWING
from zeroplan.ledger import Kind, Line
from zeroplan.numeric import Int

UNSYNCED = "torch 2.13, torch/distributed/pipelining/stage.py, backward_maybe_with_nosync"
AT_ONCE = "torch 2.13, torch/distributed/pipelining/schedules.py, _add_unshard_reshard"
HALVES = "torch 2.13, torch/distributed/pipelining/_backward.py, stage_backward_weight"


def unsharded_parameters(plan: Plan, layers: tuple[int, ...], reason: str, *, root: bool = True) -> Line:
    """What is outside the blocks, and these layers of them."""
    elements: Int = plan.root.padded if root else 0
    for count, group in zip(layers, plan.blocks, strict=True):
        elements = elements + count * group.padded
    return Line(
        Kind.UNSHARDED_PARAMETERS, plan.width.compute * elements, reason, product(plan.width.compute, elements), UNSYNCED
    )


def accumulated(plan: Plan, layers: tuple[int, ...], *, root: bool, whose: str = "this stage's") -> Line:
    """Whole gradients in the dtype in which they will be reduced."""
    elements = root_elements(plan) if root else 0
    for count, group in zip(layers, plan.blocks, strict=True):
        elements += count * group.numel
    n_bytes, formula = plan.reduce_bytes * elements, product(plan.reduce_bytes, elements)
    return Line(Kind.UNSHARDED_GRADIENTS, n_bytes, f"{whose} whole gradients, not reduced yet", formula, ACCUMULATE)


def as_made(plan: Plan, layers: tuple[int, ...], *, root: bool, whose: str = "this stage's") -> Line:
    """Whole gradients of a second half, in the dtype that they were made in."""
    line = accumulated(plan._replace(reduce_bytes=plan.width.compute), layers, root=root)
    return line._replace(reason=f"{whose} whole gradients of weights, not taken up yet", source=HALVES)


def gathered(plan: Plan, group: Group, reason: str) -> Line:
    """A group's all-gather buffer; formulas of a stage count elements."""
    return in_elements(buffers.gathered(plan, group, reason), plan.width.compute)


def root_gradients(plan: Plan, made: int, current: int = 0) -> Line:
    """Gradients of what is outside the blocks, likewise."""
    return in_elements(buffers.root_gradients(plan, made, current), plan.width.compute)


def in_elements(line: Line, width: int) -> Line:
    """Write a line as so many bytes times so many elements of this rank's stages."""
    return line._replace(formula=product(width, line.n_bytes // width))


def made_line(plan: Plan, n_bytes: Int, reason: str) -> Line:
    """Whole gradients of this micro-batch, in the dtype that they are computed in."""
    return in_elements(Line(Kind.UNSHARDED_GRADIENTS, n_bytes, reason, source=ACCUMULATE), plan.width.compute)


def flowing_line(stage: StagePlan, reason: str, count: int = 1) -> Line:
    """A gradient of the hidden state, where it is a tensor of its own."""
    n_bytes = count * stage.hidden_bytes
    return Line(Kind.ACTIVATION_GRADIENTS, n_bytes, reason, several((count, stage.hidden_bytes)), FLOWING)


def plus(one: tuple[int, ...], run: int) -> tuple[int, ...]:
    """The layers of each run, with one more of this."""
    return tuple(count + (at == run) for at, count in enumerate(one))


def parked_line(plan: Plan, group: Group, reason: str) -> Line:
    """A buffer that stays until the next copy-out: of a block whose experts are on several ranks, theirs."""
    if group.experts is None:
        return gathered(plan, group, reason)
    from zeroplan.engines.pipeline import experts  # noqa: PLC0415  the others' answers need not wait for it

    return experts.parked(plan, group, reason)


def kept_before(stage: StagePlan, position: Position) -> tuple[Line, ...]:
    """What this micro-batch has left in the blocks below; the lowest one's input stands in a receive buffer."""
    return _kept_of(stage, position.before, every=False)


def _kept_of(stage: StagePlan, layers: tuple[int, ...], *, every: bool) -> tuple[Line, ...]:
    line, *tables = kept(stage.plan, layers, every=every)
    formula = several(*zip(layers, stage.plan.kept, strict=True))
    if stage.takes_from_buffer and any(layers):
        line = line._replace(n_bytes=line.n_bytes - stage.hidden_bytes)
        formula = formula and f"{formula} - {stage.hidden_bytes}"
    return (line._replace(formula=formula), *tables)


def kept_of_all(stage: StagePlan) -> tuple[Line, ...]:
    """What this micro-batch has left in all blocks."""
    return _kept_of(stage, stage.plan.every_layer, every=True)
