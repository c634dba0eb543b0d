"""The lines of one parameter group in an FSDP2 step: its buffers, its gradients and their reduction."""

from zeroplan.engines.formulas import product, sized
from zeroplan.engines.fsdp2.buffers import ALONE, COPY_OUT, GATHER, POST_FORWARD, reduce_output_width, smaller_shard
from zeroplan.engines.fsdp2.groups import Group, ParamGroup
from zeroplan.engines.fsdp2.plan import REDUCE, Plan
from zeroplan.ledger import PLAIN, Kind, Line, Role, Tag
from zeroplan.numeric import Int, ceil_div, maximum, where

# --- parameters -------------------------------------------------------------------------------------------------------


def gather_buffer(plan: Plan, group: ParamGroup) -> tuple[Line]:
    """Return the all-gather buffer of a group, on its own stream. [bytes]"""
    return _buffer(plan, group, "gathered")


def gathered_ahead(plan: Plan, group: ParamGroup) -> tuple[Line]:
    """Return the all-gather buffer of a group that is prefetched for its backward. [bytes]"""
    return _buffer(plan, group, "gathered ahead of its backward")


def _buffer(plan: Plan, group: ParamGroup, words: str) -> tuple[Line]:
    n_bytes = group.gathers * unsharded_bytes(plan, group.of)
    formula = group.said(n_bytes, f"{_whole(plan, group)}{group.gate}")
    return (Line(Kind.GATHER, n_bytes, f"{group.words}, {words}", formula, GATHER),)


def unsharded(plan: Plan, group: ParamGroup) -> tuple[Line]:
    """Return a group's parameters, copied out of the buffer. [bytes]"""
    n_bytes = unsharded_bytes(plan, group.of)
    formula = group.said(n_bytes, _whole(plan, group))
    return (Line(Kind.UNSHARDED_PARAMETERS, n_bytes, f"{group.words}, copied out for use", formula, COPY_OUT),)


def unsharded_bytes(plan: Plan, group: Group) -> Int:
    """Return a group's parameters as they compute. [bytes]"""
    return plan.width.compute * group.padded - group.in_float8


def _whole(plan: Plan, group: ParamGroup) -> str:
    formula = f"{plan.width.compute}·{group.whole}"
    return f"({formula} - {group.of.in_float8})" if plan.recipe.fsdp2.float8_all_gather else formula


def chunk_to_gather(plan: Plan, group: ParamGroup, copied: ParamGroup) -> tuple[Line, ...]:
    """Return this rank's chunk as the all-gather reads it, if that is a copy: cast, or copied from host memory. [bytes]

    ``copied``: the part of the group that is copied. Frozen weights beside adapters have the compute dtype already, unless they
    are in host memory.
    """
    if not (plan.width.mixed or plan.offloaded or plan.recipe.fsdp2.float8_all_gather) or not copied.of.numel:
        return ()
    n_bytes = group.gathers * plan.width.compute * copied.of.shard
    formula = group.said(n_bytes, f"{plan.width.compute}·{copied.share}{group.gate}")
    if plan.recipe.fsdp2.float8_all_gather:  # norms in 16 bits are not copied
        narrow = group.gathers * group.of.in_float8 // group.ranks
        n_bytes = n_bytes - narrow if plan.width.mixed else narrow
        formula = group.said(n_bytes, f"{formula} - {narrow}" if plan.width.mixed else f"{narrow}")
    return (Line(Kind.GATHER, n_bytes, f"{group.words}, this rank's chunk, cast", formula, GATHER),)


def smaller_chunk_to_gather(plan: Plan, unit: Group, copied: Group) -> tuple[Line, ...]:
    """Return the same in the backward, if ``reshard_after_forward`` is a number. [bytes]

    A smaller shard is on the GPU, cast already. In mixed precision torch copies it anyway.
    """
    width, whole = plan.width.compute, plan.width.mixed or plan.offloaded
    of_shard: Int = width * copied.shard if whole else 0
    of_smaller: Int = width * smaller_shard(plan, copied) if plan.width.mixed and not plan.offloaded else 0
    n_bytes = plan.gathers * where(plan.n == plan.reshard, of_shard, of_smaller)
    formula = f"{width}·Q_{copied.symbol}·min(1, N-1)" if plan.width.mixed and not plan.offloaded else ""
    return (Line(Kind.GATHER, n_bytes, f"a copy of its smaller shard ({unit.symbol})", formula, GATHER),)


def copying_out(plan: Plan, unit: Group, group: ParamGroup) -> tuple[Line, ...]:
    """Return the temporaries of copying a group out. [bytes]

    Experts sharded along dim 1 are copied once more. A single rank casts its parameters one after the other.
    """
    if not group.are_experts:
        return _cast_alone(plan, unit, group)
    width = plan.width.compute
    alone = width * group.of.by_the_way if plan.width.mixed else 0
    n_bytes = group.of.narrow * width * group.of.padded + (1 - group.gathers) * alone
    again = f"{group.of.narrow}·{width}·{group.whole}" if isinstance(group.of.narrow, int) else ""
    formula = group.said(n_bytes, f"{again} + (1 - min(1, F-1))·{alone}" if again else "")
    return (Line(Kind.GATHER, n_bytes, "experts, cast or copied once more on their way out", formula, COPY_OUT),)


def _cast_alone(plan: Plan, unit: Group, group: ParamGroup) -> tuple[Line, ...]:
    """Return the casts or copies of a single rank beside its unsharded parameters. [bytes]

    Frozen weights beside adapters are not cast, and the adapters are small. From host memory they are copied uncast. The copies are
    on the compute stream, which reuses their memory. Only a layer's experts are blocks so large that the allocator finds no other
    use for them (replayed: DeepSeek-V3 on one rank reserves more than one such block beside the sum of its streams).
    """
    copies = plan.offloaded or (plan.cast_too and plan.width.mixed)
    if not copies or (isinstance(plan.gathers, int) and plan.gathers):
        return ()
    width = plan.width.compute
    elements = unit.alone
    if plan.width.mixed and plan.offloaded:
        elements = unit.alone_from_host if plan.cast_too else unit.alone_beside_adapters
    n_bytes: Int = (1 - plan.gathers) * width * elements
    formula = group.said(n_bytes, f"(1 - min(1, N-1))·{product(width, elements)}")
    has_experts = any(one.active_share != (1, 1) and not one.autocast for run in plan.runs for one in run.parameters)
    tag = PLAIN if has_experts else Tag(Role.COPIED_OUT)
    return (Line(Kind.GATHER, n_bytes, "its parameters, one after the other", formula, ALONE, tag),)


def cut_to_smaller_shards(plan: Plan, run: int) -> Line:
    """Return the peak while parameters are split to smaller shards. Each is copied before the whole one is freed. [bytes]"""
    ways, width = int(plan.reshard), plan.width.compute
    most: Int = 0
    done: Int = 0
    for parameter in plan.runs[run].parameters:
        whole = ceil_div(parameter.shape[0], plan.n) * plan.n * (parameter.numel // parameter.shape[0])
        most, done = maximum(most, done + whole // ways), done + whole // ways - whole
    formula = product(width, most) if isinstance(most, int) else ""
    return Line(Kind.UNSHARDED_PARAMETERS, width * most, "smaller shards beside what is still whole", formula, POST_FORWARD)


def own_smaller_shard(plan: Plan, unit: Group) -> tuple[Line, ...]:
    """Return a block's smaller shard, which lives until the block is copied out. [bytes]"""
    if isinstance(plan.reshard, bool):
        return ()
    width = plan.width.compute
    reason = "this block's smaller shard, until it is copied out"
    return (sized(Kind.UNSHARDED_PARAMETERS, width, smaller_shard(plan, unit), reason, POST_FORWARD, f"Q_{unit.symbol}"),)


# --- gradients --------------------------------------------------------------------------------------------------------


def reduce_input(plan: Plan, group: ParamGroup) -> tuple[Line]:
    """Return the input of a reduce-scatter: the whole group in the reduction's dtype. [bytes]"""
    width = plan.reduce_bytes
    return (sized(Kind.REDUCE, width, group.of.padded, f"{group.words}, reduce-scatter input", REDUCE, group.whole),)


def copied_width(plan: Plan) -> tuple[Int, str]:
    """Return the bytes per gradient element that is copied into the reduce-scatter input, and their formula.

    The copy reads this micro-batch's gradients, or accumulated ones that include them.
    """
    compute, reduced = plan.width.compute, plan.reduce_bytes
    if plan.recipe.sync_every_micro_batch or reduced == compute:
        return compute, f"{compute}"
    return where(plan.several > 0, reduced, compute), f"({reduced}·M + {compute}·(1-M))"


def copied_or_reduced(plan: Plan, group: ParamGroup) -> tuple[Line]:
    """Return gradients while they are copied into the input, then the output beside it, with its cast. [bytes]"""
    copied, formula = copied_width(plan)
    if group.are_experts:
        n_bytes = experts_copied_or_reduced(plan, group, copied)
        formula = _of_experts(plan, group, formula)
        return (Line(Kind.UNSHARDED_GRADIENTS, n_bytes, _EXPERTS_REDUCED, formula, REDUCE),)
    out = reduce_output_width(plan)
    made = maximum(copied * group.of.numel, out * group.of.shard)
    reason = f"{group.words}, while copied in, or the reduce-scatter output"
    return (Line(Kind.UNSHARDED_GRADIENTS, made, reason, f"max({formula}·{group.plain}, {out}·{group.share})", REDUCE),)


def experts_copied_or_reduced(plan: Plan, group: ParamGroup, copied: Int) -> Int:
    """Return the same for experts, whose gradients are ``copied`` bytes wide. [bytes]

    Gradients of weights sharded along dim 1 are first concatenated again. A local of the loop over several ranks' chunks holds
    the last original until the reduction is done. If no other rank has the same experts, torch 2.13 divides the sum by one, out
    of place. Torch 2.15 does none of this (``_default_reduce_scatter_input_fn``).
    """
    out = reduce_output_width(plan)
    if plan.of_torch_2_15:
        return maximum(copied * group.of.numel, out * group.of.shard)
    narrow, named = group.of.narrow * copied * group.of.last, group.gathers * copied * group.of.last
    divided = (1 - group.gathers) * plan.reduce_bytes * group.of.padded
    return maximum(copied * group.of.numel + narrow, out * group.of.shard + named, plan.reduce_bytes * group.of.shard + divided)


def reduced(plan: Plan, group: ParamGroup) -> tuple[Line]:
    """Return the reduce-scatter output of a group, with its cast. [bytes]"""
    width = reduce_output_width(plan)
    formula = group.said(width * group.of.shard, f"{width}·{group.share}")
    return (Line(Kind.REDUCE, width * group.of.shard, f"{group.words}, reduce-scatter output", formula, REDUCE),)


def still_named(plan: Plan, last: int, which: str = "the last of its gradients") -> Line:
    """Return the last gradient of a unit, which a local of ``foreach_reduce`` holds until it returns. [bytes]

    Only a loop over several ranks' chunks assigns that local.
    """
    width = copied_width(plan)[0]
    formula = f"{product(width, last)}·min(1, N-1)" if isinstance(width, int) else ""
    return Line(Kind.UNSHARDED_GRADIENTS, plan.gathers * width * last, f"{which}, still named", formula, REDUCE)


_EXPERTS_REDUCED = "the experts' while copied in, or the reduce-scatter output"


def _of_experts(plan: Plan, group: ParamGroup, copied: str) -> str:
    out = reduce_output_width(plan)
    if plan.of_torch_2_15:
        return f"max({copied}·{group.plain}, {out}·{group.share})"
    if not isinstance(group.of.narrow, int):
        return ""
    last, named = f"{group.of.narrow}·{copied}·{group.of.last}", f"min(1, F-1)·{copied}·{group.of.last}"
    alone = f"{plan.reduce_bytes}·{group.share} + (1 - min(1, F-1))·{plan.reduce_bytes}·{group.whole}"
    return f"max({copied}·{group.plain} + {last}, {out}·{group.share} + {named}, {alone})"


def waiting_gradients(plan: Plan, group: ParamGroup) -> tuple[Line]:
    """Return the gradients of a block's other group while its experts' are reduced. [bytes]

    If earlier micro-batches have left gradients in a wider dtype, these are not added to them yet.
    """
    copied, formula = copied_width(plan)
    if not plan.recipe.sync_every_micro_batch and not plan.adds_up:
        copied, formula = copied + plan.several * plan.width.compute, f"{formula} + {plan.width.compute}·M"
    reason = f"{group.words}, made"
    return (Line(Kind.UNSHARDED_GRADIENTS, copied * group.of.numel, reason, f"({formula})·{group.plain}", REDUCE),)


def fresh_shard(plan: Plan, group: ParamGroup) -> tuple[Line]:
    """Return a group's shard of the reduced gradients, until the whole block is reduced. [bytes]

    It is 0 if it is added to an earlier micro-batch's shard.
    """
    once, first = (1 - plan.several, "(1-M)·") if plan.recipe.sync_every_micro_batch else (1, "")
    stored = plan.width.stored
    reason = f"{group.words}, this rank's chunk of the gradients"
    return (Line(Kind.GRADIENTS, once * stored * group.of.shard, reason, f"{first}{stored}·{group.share}", REDUCE),)
