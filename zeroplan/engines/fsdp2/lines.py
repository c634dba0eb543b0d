"""The lines of an FSDP2 step that belong to one parameter group: its buffers, its gradients and their reduction."""

from functools import lru_cache

from zeroplan.engines.formulas import product
from zeroplan.engines.fsdp2.buffers import ALONE, COPY_OUT, GATHER, POST_FORWARD, reduce_output_width, smaller_shard
from zeroplan.engines.fsdp2.groups import Group
from zeroplan.engines.fsdp2.param_groups import ParamGroup
from zeroplan.engines.fsdp2.plan import REDUCE, Plan
from zeroplan.ledger import Kind, Line
from zeroplan.numeric import Int, ceil_div, maximum, where

OUTSIDE = "embedding, final norm and head, from forward to the end of backward"


# --- parameters -------------------------------------------------------------------------------------------------------


def gather_buffer(plan: Plan, group: ParamGroup, words: str = "gathered") -> Line:
    """The all-gather buffer of a group, on a stream of its own. [bytes]"""
    width = plan.width.compute
    formula = _formula(width, group.whole, group.gate)
    return Line(Kind.GATHER, group.gathers * width * group.padded, f"{group.words}, {words}", formula, GATHER)


def unsharded(plan: Plan, group: ParamGroup) -> Line:
    """A group's parameters, copied out of the buffer. [bytes]"""
    width = plan.width.compute
    reason = OUTSIDE if group.is_root else f"{group.words}, copied out for use"
    return Line(Kind.UNSHARDED_PARAMETERS, width * group.padded, reason, _formula(width, group.whole), COPY_OUT)


def chunk_to_gather(plan: Plan, group: ParamGroup, copied: ParamGroup) -> tuple[Line, ...]:
    """This rank's chunk as the gather reads it, where that is a copy: cast, or fetched from host memory. [bytes]

    ``copied`` is the part of the group that is copied: beside adapters, frozen weights lie there in the compute dtype.
    """
    if not (plan.width.mixed or plan.offloaded):
        return ()
    width = plan.width.compute
    formula = _formula(width, copied.share, group.gate)
    return (Line(Kind.GATHER, group.gathers * width * copied.shard, f"{group.words}, this rank's chunk, cast", formula, GATHER),)


def smaller_chunk_to_gather(plan: Plan, unit: Group, copied: Group) -> tuple[Line, ...]:
    """The same in the backward, where ``reshard_after_forward`` is a number. [bytes]

    A smaller shard has been cast already and is on the GPU. Where dtypes are mixed, torch copies it all the same.
    """
    width, whole = plan.width.compute, plan.width.mixed or plan.offloaded
    of_shard: Int = width * copied.shard if whole else 0
    of_smaller: Int = width * smaller_shard(plan, copied) if plan.width.mixed and not plan.offloaded else 0
    n_bytes = plan.gathers * where(plan.n == plan.reshard, of_shard, of_smaller)
    formula = f"{width}·Q_{copied.symbol}·min(1, N-1)" if plan.width.mixed and not plan.offloaded else ""
    return (Line(Kind.GATHER, n_bytes, f"a copy of its smaller shard ({unit.symbol})", formula, GATHER),)


def copying_out(plan: Plan, unit: Group, group: ParamGroup) -> tuple[Line, ...]:
    """What copying a group out takes in passing. [bytes]

    Experts that are sharded along dim 1 are copied once more. A single rank casts its parameters one after the other.
    """
    if not group.are_experts:
        return _cast_alone(plan, unit)
    width = plan.width.compute
    alone = width * group.by_the_way if plan.width.mixed else 0
    n_bytes = group.narrow * width * group.padded + (1 - group.gathers) * alone
    again = f"{group.narrow}·{width}·{group.whole}" if isinstance(group.narrow, int) else ""
    formula = f"{again} + (1 - min(1, F-1))·{alone}" if again else ""
    return (Line(Kind.GATHER, n_bytes, "experts, cast or copied once more on their way out", formula, COPY_OUT),)


def _cast_alone(plan: Plan, unit: Group) -> tuple[Line, ...]:
    """A single rank gathers nothing: what it casts, or fetches, beside the unsharded parameters. [bytes]

    Beside adapters, frozen weights are neither cast nor fetched, and the rest is small.
    """
    copies = plan.cast_too and (plan.width.mixed or plan.offloaded)
    if not copies or (isinstance(plan.gathers, int) and plan.gathers):
        return ()
    width = plan.width.compute
    elements = unit.alone_from_host if plan.width.mixed and plan.offloaded else unit.alone
    formula, reason = f"(1 - min(1, N-1))·{product(width, elements)}", "its parameters, one after the other"
    return (Line(Kind.GATHER, (1 - plan.gathers) * width * elements, reason, formula, ALONE),)


def cut_to_smaller_shards(plan: Plan, run: int) -> Line:
    """The most that parameters take while each is cut to its smaller shard, which is copied before the whole one goes. [bytes]"""
    ways, width = int(plan.reshard), plan.width.compute
    most: Int = 0
    done: Int = 0
    for parameter in plan.runs[run].parameters:
        whole = ceil_div(parameter.shape[0], plan.n) * plan.n * (parameter.numel // parameter.shape[0])
        most, done = maximum(most, done + whole // ways), done + whole // ways - whole
    formula = product(width, most) if isinstance(most, int) else ""
    return Line(Kind.UNSHARDED_PARAMETERS, width * most, "smaller shards beside what is still whole", formula, POST_FORWARD)


def own_smaller_shard(plan: Plan, unit: Group) -> tuple[Line, ...]:
    """A block's smaller shard, which is there until the block is copied out. [bytes]"""
    if isinstance(plan.reshard, bool):
        return ()
    width = plan.width.compute
    reason = "this block's smaller shard, until it is copied out"
    return (Line(Kind.UNSHARDED_PARAMETERS, width * smaller_shard(plan, unit), reason, f"{width}·Q_{unit.symbol}", POST_FORWARD),)


# --- gradients --------------------------------------------------------------------------------------------------------


def reduce_input(plan: Plan, group: ParamGroup) -> Line:
    """The input of a reduce-scatter: the whole group in the reduction's dtype. [bytes]"""
    width, words = plan.reduce_bytes, "the root group" if group.is_root else group.words
    return Line(Kind.REDUCE, width * group.padded, f"{words}, reduce-scatter input", _formula(width, group.whole), REDUCE)


def copied_width(plan: Plan) -> tuple[Int, str]:
    """Bytes of a gradient's element that is copied into the input, and their formula.

    The copy reads this micro-batch's gradients, or accumulated ones that have taken these up.
    """
    compute, reduced = plan.width.compute, plan.reduce_bytes
    if plan.recipe.sync_every_micro_batch or reduced == compute:
        return compute, f"{compute}"
    return where(plan.several > 0, reduced, compute), _widths(reduced, compute)


@lru_cache(maxsize=256)
def _widths(reduced: int, compute: int) -> str:
    return f"({reduced}·M + {compute}·(1-M))"


def copied_or_reduced(plan: Plan, group: ParamGroup) -> Line:
    """Gradients while they are copied into the input, then the output beside it, with its cast. [bytes]"""
    if group.are_experts:
        return _experts_copied_or_reduced(plan, group)
    copied, formula = copied_width(plan)
    out = reduce_output_width(plan)
    made = maximum(copied * group.numel, out * group.shard)
    reason = "this block's while copied in, or the reduce-scatter output"
    return Line(
        Kind.UNSHARDED_GRADIENTS, made, reason, _larger(f"{formula}·{group.plain}", f"{out}·{group.share}"), REDUCE
    )


def _experts_copied_or_reduced(plan: Plan, group: ParamGroup) -> Line:
    """The same of experts. [bytes]

    Gradients of weights that are chunked along dim 1 are joined anew first, and the last original stays. Where no other rank has
    the same experts, torch 2.13 divides the sum out of place, by one. Torch 2.15 does neither (``_default_reduce_scatter_input_fn``).
    """
    copied, formula = copied_width(plan)
    out, reason = reduce_output_width(plan), "the experts' while copied in, or the reduce-scatter output"
    if plan.of_torch_2_15:
        made = maximum(copied * group.numel, out * group.shard)
        return Line(
            Kind.UNSHARDED_GRADIENTS, made, reason, _larger(f"{formula}·{group.plain}", f"{out}·{group.share}"), REDUCE
        )
    narrow = group.narrow * copied * group.last
    divided = (1 - group.gathers) * plan.reduce_bytes * group.padded
    made = maximum(copied * group.numel + narrow, out * group.shard + narrow, plan.reduce_bytes * group.shard + divided)
    if not isinstance(group.narrow, int):
        return Line(Kind.UNSHARDED_GRADIENTS, made, reason, "", REDUCE)
    last = f"{group.narrow}·{formula}·{group.last}"
    alone = f"{plan.reduce_bytes}·{group.share} + (1 - min(1, F-1))·{plan.reduce_bytes}·{group.whole}"
    formula = f"max({formula}·{group.plain} + {last}, {out}·{group.share} + {last}, {alone})"
    return Line(Kind.UNSHARDED_GRADIENTS, made, reason, formula, REDUCE)


def waiting_gradients(plan: Plan, group: ParamGroup) -> Line:
    """Gradients of a block's other group, while its experts' are reduced. [bytes]

    Where earlier micro-batches have left gradients in a wider dtype, these have not been added to them yet.
    """
    copied, formula = copied_width(plan)
    if not plan.recipe.sync_every_micro_batch and not plan.adds_up:
        copied, formula = copied + plan.several * plan.width.compute, f"{formula} + {plan.width.compute}·M"
    reason = f"{group.words}, made"
    return Line(Kind.UNSHARDED_GRADIENTS, copied * group.numel, reason, f"({formula})·{group.plain}", REDUCE)


def fresh_shard(plan: Plan, group: ParamGroup) -> Line:
    """A group's chunk of the reduced gradients, until the whole block is reduced; none where it is added to an earlier one. [bytes]"""
    once, first = (1 - plan.several, "(1-M)·") if plan.recipe.sync_every_micro_batch else (1, "")
    stored = plan.width.stored
    reason = f"{group.words}, this rank's chunk of the gradients"
    return Line(Kind.GRADIENTS, once * stored * group.shard, reason, f"{first}{stored}·{group.share}", REDUCE)


@lru_cache(maxsize=1024)
def _formula(width: int, name: str, gate: str = "") -> str:
    return f"{width}·{name}{gate}"


@lru_cache(maxsize=1024)
def _larger(one: str, other: str) -> str:
    return f"max({one}, {other})"
