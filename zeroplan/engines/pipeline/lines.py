"""Lines that the moments of a pipeline rank share: parameters, kept activations, and gradients, whole until all passes are over.

On tensor-parallel ranks hidden states go from stage to stage sharded along the sequence, from each rank to the rank with the same
shard (torchtitan: stages take and return local tensors). A vocabulary-parallel embedding's gradient stays whole on every rank until
it is reduced (torch 2.13, ``torch/distributed/fsdp/_fully_shard/_fsdp_param.py``, ``_get_grad_inner_tensor``).
"""

from collections.abc import Iterable

from zeroplan.engines.formulas import product, several, sized
from zeroplan.engines.fsdp2 import buffers
from zeroplan.engines.fsdp2.buffers import kept
from zeroplan.engines.fsdp2.groups import Group, param_groups
from zeroplan.engines.fsdp2.lines import copying_out
from zeroplan.engines.fsdp2.plan import ACCUMULATE, REDUCE, Plan
from zeroplan.engines.pipeline.stage import StagePlan
from zeroplan.engines.sources import FLOWING
from zeroplan.ledger import Kind, Line, Moment, Phase, total_bytes
from zeroplan.numeric import Int, maximum, weighted
from zeroplan.trace import Trace
from zeroplan.transformer.blocks import AtEmbedding
from zeroplan.transformer.families.tags import HELD_NORM
from zeroplan.transformer.parameters import Parameter

UNSYNCED = "torch 2.13, torch/distributed/pipelining/stage.py, backward_maybe_with_nosync"
AT_ONCE = "torch 2.13, torch/distributed/pipelining/schedules.py, _add_unshard_reshard"


def stays_unsharded(plan: Plan, *, whole: bool) -> tuple[Group, ...]:
    """Return the units outside the blocks that stay unsharded between passes; in a ``whole`` stage also a separate embedding."""
    return plan.outside if plan.ends is None or whole else (plan.ends.head,)


def unsharded_parameters(plan: Plan, layers: tuple[int, ...], reason: str, outside: tuple[Group, ...] = ()) -> Line:
    """Return the unsharded parameters of these layers and of ``outside`` units. [bytes]"""
    elements = sum([group.padded for group in outside]) + weighted(layers, [group.padded for group in plan.blocks])
    return sized(Kind.UNSHARDED_PARAMETERS, plan.width.compute, elements, reason, UNSYNCED)


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
            own = group.gathers * width * group.of.padded + total_bytes(copying_out(plan, unit, group)) * group.are_experts
            most = maximum(most, own - missing)
            missing = missing + (1 - group.gathers) * width * group.of.padded
    return together, sized(Kind.GATHER, 1, most, "the buffer of the group that is copied out", AT_ONCE)


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


HALVES = "torch 2.13, torch/distributed/pipelining/_backward.py, stage_backward_weight"


def accumulated(
    plan: Plan, layers: tuple[int, ...], outside: tuple[Group, ...] = (), *, whose: str = "this stage's"
) -> Line:  # fmt: skip
    """Return the whole gradients of layers and of units outside them, in the reduction's dtype. [bytes]"""
    in_layers = weighted(layers, [group.numel for group in plan.trained_blocks])
    elements = sum(elements_of(plan, group) for group in outside) + in_layers
    reason = f"{whose} whole gradients, not reduced yet"
    return sized(Kind.UNSHARDED_GRADIENTS, plan.reduce_bytes, elements, reason, ACCUMULATE)


def reduced(plan: Plan, layers: tuple[int, ...], reason: str, outside: tuple[Group, ...]) -> Line:
    """Return this rank's gradient shards of layers and of units outside them; nothing if they are on the host. [bytes]"""
    elements = 0 if plan.offloaded else plan.trained_shards(layers, outside)
    return sized(Kind.GRADIENTS, plan.width.stored, elements, reason, REDUCE)


def named_bytes(plan: Plan, width: int, last: int) -> Int:
    """Return the bytes of a unit's last gradient (``last`` elements), which a local of ``foreach_reduce`` holds until it returns.

    In torch 2.13 only a loop over several ranks' chunks assigns that local.
    """
    return 0 if plan.of_torch_2_15 else plan.gathers * width * last


def as_made(plan: Plan, layers: tuple[int, ...], outside: tuple[Group, ...] = (), *, whose: str = "this stage's") -> Line:
    """Return the whole gradients of a second half, in the dtype in which they were made. [bytes]"""
    line = accumulated(plan._replace(reduce_bytes=plan.width.compute), layers, outside)
    return line._replace(reason=f"{whose} whole gradients of weights, not added to the others yet", source=HALVES)


def root_gradients(plan: Plan, made: int, current: int = 0) -> Line:
    """Return the gradients of parameters outside the blocks. [bytes]"""
    line = buffers.root_gradients(plan, made, current)
    return plain(line._replace(n_bytes=made_bytes(plan, made, current)))


def made_bytes(plan: Plan, made: int, current: int) -> Int:
    """Return the gradients of this micro-batch beside earlier ones; ``current`` of these elements are just made. [bytes]

    Torch 2.15 casts the first micro-batch's gradients one by one, as they reach their weights.
    """
    if plan.cast_on_arrival and not plan.several:
        return plan.width.compute * current + plan.reduce_bytes * (made - current)
    n_bytes, _ = plan.fresh(made, current)
    return n_bytes


def made_line(plan: Plan, n_bytes: Int, reason: str) -> Line:
    """Return a line of whole gradients of this micro-batch, in the compute dtype. [bytes]"""
    width = plan.width.compute
    return Line(Kind.UNSHARDED_GRADIENTS, n_bytes, reason, product(width, n_bytes // width), ACCUMULATE)


def plain(line: Line) -> Line:
    """Return the line with its bytes as formula, since stages use one name for several sizes."""
    return line._replace(formula=product(1, line.n_bytes))


def sizes_of_block(plan: Plan, run: int) -> tuple[int, ...]:
    """Return the elements of each trained parameter of a block."""
    return sizes_of(plan.runs[run].parameters)


def sizes_of(parameters: Iterable[Parameter]) -> tuple[int, ...]:
    """Return the elements of the trained parameters."""
    return tuple(parameter.numel for parameter in parameters if not parameter.frozen)


def accumulated_gradients(plan: Plan, sizes: tuple[int, ...], *, first: bool) -> Line:
    """Return the gradients of one group while FSDP2 accumulates them, cast if they are the first and the dtype widens. [bytes]

    If the dtypes are alike, or autograd has cast the gradients on arrival, those of later micro-batches have been added
    already.
    """
    here, there = plan.width.compute, plan.reduce_bytes
    n_bytes = here * sum(sizes)
    if here == there or plan.cast_on_arrival:
        n_bytes = there * sum(sizes) if first else 0
    elif first:
        n_bytes = _highest_cast(sizes, here, there)
    return made_line(plan, n_bytes, "this micro-batch's, cast one by one or added to earlier ones")


def _highest_cast(sizes: tuple[int, ...], here: int, there: int) -> int:
    """Return the peak while tensors of one width become tensors of another, one after the other. [bytes]"""
    most, done, left = 0, 0, sum(sizes)
    for size in sizes:
        done += size
        most = max(most, there * done + here * left)
        left -= size
    return most


def whole_embedding(plan: Plan) -> int:
    """Return the elements by which the embedding's unreduced gradient exceeds this rank's shard of it."""
    return (
        0 if plan.at_embedding is None else int(plan.at_embedding.whole.n_bytes) // plan.width.compute - plan.embedding_elements
    )


def elements_of(plan: Plan, group: Group) -> int:
    """Return the elements of a unit's unreduced gradients outside the blocks; the first unit has the embedding."""
    return group.numel + (whole_embedding(plan) if group is plan.trained_outside[0] else 0)


def split_embedding_backward(at: AtEmbedding, trace: Trace, flow: Line) -> None:
    """Gather the gradient of the embedding's output, and make the whole embedding's gradient from it."""
    trace.at("backward of the embedding: gathering", Phase.BACKWARD)
    trace.put("gathered gradient", at.gathered)
    trace.pass_by(at.by_rank, flow)
    trace.at("backward of the embedding", Phase.BACKWARD)
    trace.pass_by(at.whole)
    trace.drop("gathered gradient")


def taking_its_share(plan: Plan, alive: tuple[Line, ...]) -> Moment:
    """Return the moment when a rank copies its shard of the embedding's gradient, while the root group is still unsharded."""
    reduced, (group, *_) = plan.reduce_bytes, plan.outside
    unsharded, gradients = plan.width.compute * group.padded, elements_of(plan, plan.trained_outside[0])
    share = reduced * plan.embedding_elements
    lines = (
        sized(Kind.UNSHARDED_PARAMETERS, 1, unsharded, "the root group, unsharded", REDUCE),
        sized(Kind.UNSHARDED_GRADIENTS, reduced, gradients, "the root group's, of the whole embedding", ACCUMULATE),
        sized(Kind.UNSHARDED_GRADIENTS, 1, share, "this rank's share of the embedding's", REDUCE),
    )  # fmt: skip
    return Moment("reducing the root group: this rank's share", Phase.BACKWARD, (*alive, *lines))


def split_head_forward(plan: Plan, by_rank: Line, trace: Trace) -> None:
    """Gather the final norm's output along the sequence, then make this rank's logits. A variable holds this rank's shard."""
    named = tuple(line for line in plan.head.loss_forward if line.tag == HELD_NORM)
    trace.at("head, forward: gathering", Phase.FORWARD)
    trace.pass_by(*named, by_rank)
    trace.at("head, forward", Phase.FORWARD)
    trace.pass_by(*named, *plan.head.output)
