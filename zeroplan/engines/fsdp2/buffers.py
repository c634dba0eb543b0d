"""FSDP2's buffers, one line each: gathered and unsharded parameters, kept activations, reduce-scatter inputs and outputs."""

from zeroplan.engines.formulas import blocks_sum, kept_by, product, sized
from zeroplan.engines.fsdp2.groups import Group
from zeroplan.engines.fsdp2.plan import FINAL_NORM, REDUCE, Plan
from zeroplan.engines.sources import FLOWING, KEPT
from zeroplan.ledger import Kind, Line
from zeroplan.numeric import Int, weighted, where

GATHER = "torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, foreach_all_gather"
COPY_OUT = "torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, foreach_all_gather_copy_out"
ALONE = "torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, FSDPParamGroup.wait_for_unshard"
CAST = "torch 2.15, torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, FSDPParamGroup._set_unsharded_grad_dtypes"
EXPERTS = "NeMo AutoModel 36044ad3, components/moe/parallelizer.py, apply_fsdp (experts_reshard_after_forward)"
POST_FORWARD = "torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_param.py, FSDPParam.to_sharded_post_forward"

_KEPT = {
    "none": ("saved by the blocks before this one", "saved by all blocks"),
    "selective": (
        "kept by selective recomputation in the blocks before this one",
        "kept by selective recomputation in all blocks",
    ),
    "full": ("inputs of the blocks before this one (checkpoints)", "inputs of all blocks (checkpoints)"),
}
_KEPT_BY_BOTH = ("kept by the blocks before this one, recomputed or not", "kept by all blocks, recomputed or not")


def outside_unsharded(plan: Plan) -> tuple[Line, ...]:
    """Return all units outside the blocks, while they are unsharded. [bytes]"""
    width, reason = plan.width.compute, "embedding, final norm and head, from forward to the end of backward"
    return tuple(
        sized(Kind.UNSHARDED_PARAMETERS, width, group.padded, reason, COPY_OUT, f"P_{group.symbol}") for group in plan.outside
    )


def still_unsharded(plan: Plan, layers: tuple[int, ...]) -> tuple[Line, ...]:
    """Return the parameters that blocks keep gathered between forward and backward, by ``reshard_after_forward``."""
    if plan.reshard is True:
        return ()
    gathered, kinds = plan.gathered_blocks
    elements = weighted(layers, [one.padded if plan.reshard is False else smaller_shard(plan, one) for one in gathered])
    reason = "blocks unsharded until their backward" if plan.reshard is False else "blocks' smaller shards until their backward"
    letter, width = "P" if plan.reshard is False and not plan.has_experts_apart else "Q", plan.width.compute
    formula = f"{width}·({blocks_sum(letter, layers, kinds)})"
    n_bytes = width * elements
    if plan.recipe.fsdp2.float8_all_gather:
        narrow = weighted(layers, [one.in_float8 for one in gathered])
        n_bytes, formula = n_bytes - narrow, f"{formula} - {narrow}"
    return (Line(Kind.UNSHARDED_PARAMETERS, n_bytes, reason, formula, POST_FORWARD), *plan.shards_viewed(layers))


def smaller_shard(plan: Plan, group: Group) -> Int:
    """Return one of a block's ``reshard_after_forward`` shards, if that is a number. [elements]

    It is 0 at the places of a column with as many ranks, where the option equals ``True``.
    """
    ways = int(plan.reshard)
    return where(plan.n == ways, 0, group.padded // ways)


def kept(plan: Plan, layers: tuple[int, ...], *, every: bool = False) -> tuple[Line, ...]:
    """Return the activations that these layers of each run keep for their backward, and the tables that all layers share."""
    n_bytes = weighted(layers, plan.kept)
    recompute = plan.recipe.recompute
    formula, tag = kept_by(layers, plan.kinds)
    reasons = _KEPT[recompute] if len(set(plan.recomputes)) == 1 else _KEPT_BY_BOTH
    return (Line(Kind.ACTIVATIONS, n_bytes, reasons[every], formula, KEPT[recompute], tag), *plan.head.shared)


def output(plan: Plan) -> tuple[Line, ...]:
    """Return the logits, if the training loop holds the model's output."""
    return plan.head.output if plan.recipe.keep_logits else ()


def root_gradients(plan: Plan, made: int, current: int = 0, *, waiting: int = 0) -> Line:
    """Return the root group's gradients, which stay whole until its reduction at the very end.

    ``made``: elements so far; ``current``: of them just made; ``waiting``: a tied head's, until the embedding's arrives.
    """
    n_bytes, formula = plan.fresh(made, current, waiting=waiting)
    return Line(Kind.UNSHARDED_GRADIENTS, n_bytes, "root group's, kept until the very end", formula, REDUCE)


def cast_early(plan: Plan, *, normed: bool = True) -> tuple[Line, ...]:
    """Return the extra bytes of root gradients that are in the reduction's dtype before the reduction.

    These are the head's after a chunked loss, whose backward runs before FSDP2's hooks, and the final norm's once it is
    ``normed``, if tensor-parallel ranks all-reduce it (``FSDPParam.may_reduce_grad_outside_dp``).
    """
    elements = 0
    if plan.cast_on_arrival and plan.recipe.loss == "chunked":
        elements = plan.head.points[0].gradients
    if plan.cast_on_arrival and plan.at_embedding is not None and normed:
        elements += sum(one.numel for one in plan.parameters if one.name.startswith(FINAL_NORM))
    if not elements:
        return ()
    more, synced = plan.reduce_bytes - plan.width.compute, plan.recipe.sync_every_micro_batch
    once = 1 if synced else 1 - plan.several
    formula = product(more, elements) if synced else f"(1-M)·{product(more, elements)}"
    return (Line(Kind.UNSHARDED_GRADIENTS, once * more * elements, "root group's, cast as they came", formula, CAST),)


def reduce_input(plan: Plan, group: Group, reason: str) -> Line:
    """Return a reduce-scatter input: the whole group in the reduction's dtype."""
    width = plan.reduce_bytes
    return sized(Kind.REDUCE, width, group.padded, reason, REDUCE, group.whole)


def reduce_output_bytes(plan: Plan, group: Group) -> Int:
    """Return the reduce-scatter output and, if the parameters have another dtype, its cast. [bytes]"""
    return group.shard * reduce_output_width(plan)


def reduce_output_width(plan: Plan) -> int:
    """Return the bytes per element of the reduce-scatter output, including its cast if there is one."""
    return plan.reduce_bytes + (0 if plan.reduce_bytes == plan.width.stored else plan.width.stored)


def flowing(plan: Plan, reason: str, *, in_tower: bool = False) -> Line:
    """Return one gradient of the hidden state: the text's, or a vision tower's."""
    if in_tower:
        return Line(Kind.ACTIVATION_GRADIENTS, plan.head.tower_bytes, reason, "", FLOWING)
    return Line(Kind.ACTIVATION_GRADIENTS, plan.head.hidden_bytes, reason, plan.head.hidden_formula, FLOWING)


def experts_ahead(plan: Plan) -> tuple[Line, ...]:
    """Return the experts of multi-token prediction, which stay gathered; none if all blocks do anyway. [bytes]"""
    if plan.reshard is False:
        return ()
    reason, width = "experts of the predictions, unsharded until their backward", plan.width.compute
    return tuple(
        sized(Kind.UNSHARDED_PARAMETERS, run.layers, width * group.experts.padded, reason, EXPERTS, f"{width}·X_{group.symbol}")
        for run, group in zip(plan.runs, plan.blocks, strict=True)
        if run.kind.endswith("ahead") and group.experts is not None
    )  # fmt: skip
