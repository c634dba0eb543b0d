"""The buffers of FSDP2, one line each: gathered and unsharded parameters, kept activations, reduce-scatter inputs and outputs."""

from zeroplan.engines.fsdp2.plan import REDUCE, Group, Plan, kept_formula
from zeroplan.engines.positions import Position
from zeroplan.ledger import Kind, Line
from zeroplan.numeric import Int

GATHER = "torch 2.13 _fsdp_collectives.py foreach_all_gather"
COPY_OUT = "torch 2.13 _fsdp_collectives.py foreach_all_gather_copy_out"
PARKED = "torch 2.13 _fsdp_param_group.py FSDPParamGroup.wait_for_unshard"
POST_FORWARD = "torch 2.13 _fsdp_param.py FSDPParam.to_sharded_post_forward"

_KEPT = {
    "none": ("saved by the blocks before this one", "saved by all blocks"),
    "selective": (
        "kept by selective recomputation in the blocks before this one",
        "kept by selective recomputation in all blocks",
    ),
    "full": ("inputs of the blocks before this one (checkpoints)", "inputs of all blocks (checkpoints)"),
}


def unsharded(plan: Plan, group: Group) -> Line:
    """A block's parameters, copied out of the all-gather buffer for use."""
    width = plan.width.compute
    formula = f"{width}·P_{group.symbol}"
    return Line(Kind.UNSHARDED_PARAMETERS, width * group.padded, "this block's, copied out for use", formula, COPY_OUT)


def root_unsharded(plan: Plan) -> Line:
    """The root group is not resharded between forward and backward."""
    width = plan.width.compute
    reason = "embedding, final norm and head, from forward to the end of backward"
    return Line(Kind.UNSHARDED_PARAMETERS, width * plan.root.padded, reason, f"{width}·P_root", COPY_OUT)


def gathered(plan: Plan, group: Group, reason: str, source: str = GATHER) -> Line:
    """An all-gather buffer: the whole group, on a stream of its own; none with a single rank."""
    width = plan.width.compute
    formula = f"{width}·P_{group.symbol}·min(1, N-1)"
    return Line(Kind.GATHER, plan.gathers * width * group.padded, reason, formula, source)


def gathered_below(plan: Plan, position: Position) -> tuple[Line, ...]:
    """The all-gather of the block below, issued ahead while this one goes backward."""
    if position.previous_run is None or plan.reshard is False:
        return ()
    return (gathered(plan, plan.blocks[position.previous_run], "the block below, gathered ahead of its backward"),)


def still_unsharded(plan: Plan, layers: tuple[int, ...]) -> tuple[Line, ...]:
    """What blocks keep of their gathered parameters between their forward and their backward, by ``reshard_after_forward``."""
    if plan.reshard is True:
        return ()
    elements: Int = 0
    for count, group in zip(layers, plan.blocks, strict=True):
        elements = elements + count * (group.padded if plan.reshard is False else group.padded // plan.reshard)
    reason = "blocks unsharded until their backward" if plan.reshard is False else "blocks' smaller shards until their backward"
    return (Line(Kind.UNSHARDED_PARAMETERS, plan.width.compute * elements, reason, "", POST_FORWARD),)


def kept(plan: Plan, layers: tuple[int, ...], *, every: bool = False) -> tuple[Line, ...]:
    """Activations that these layers of each run keep for their backward, and the tables all layers share."""
    n_bytes: Int = 0
    for count, one in zip(layers, plan.kept, strict=True):
        n_bytes = n_bytes + count * one
    formula = kept_formula(layers, tuple(group.symbol for group in plan.blocks))
    return (Line(Kind.ACTIVATIONS, n_bytes, _KEPT[plan.recipe.recompute][every], formula), *plan.head.shared)


def output(plan: Plan) -> tuple[Line, ...]:
    """The logits, where the training loop holds the model's output."""
    return plan.head.output if plan.recipe.keep_logits else ()


def root_gradients(plan: Plan, elements: int) -> Line:
    """Gradients of the root group, kept whole until it is reduced at the very end."""
    width = plan.width.compute
    return Line(
        Kind.UNSHARDED_GRADIENTS, width * elements, "root group's, kept until the very end", f"{width}·{elements}", REDUCE
    )


def reduce_input(plan: Plan, group: Group, reason: str) -> Line:
    """A reduce-scatter input: the whole group in the reduction's dtype."""
    width = plan.reduce_bytes
    return Line(Kind.REDUCE, width * group.padded, reason, f"{width}·P_{group.symbol}", REDUCE)


def reduce_output_bytes(plan: Plan, group: Group) -> Int:
    """The reduce-scatter output and, where it is in another dtype than the parameters, its cast. [bytes]"""
    cast = 0 if plan.reduce_bytes == plan.width.stored else plan.width.stored
    return group.shard * (plan.reduce_bytes + cast)


def flowing(plan: Plan, reason: str) -> Line:
    """One gradient of the hidden state."""
    return Line(Kind.ACTIVATIONS, plan.head.hidden_bytes, reason, "e·T·h")
