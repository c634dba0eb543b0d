"""Expert parallelism under FSDP2: each rank has some of the experts, whose weights those ranks share out that have the same ones.

A block is one ``fully_shard`` unit of two groups, as torchtitan makes it: the experts' weights on F = N/ep ranks, everything else
on N. The second is gathered, copied out and reduced after the first, and in the backward the first after the second. Tokens go to
their expert's rank and back by transformers' own all-to-all (:mod:`zeroplan.transformer.families.dispatched`).

Left out: explicit prefetching, with which torchtitan gathers one block ahead in forward too; uneven routing.
"""

from collections.abc import Iterator
from functools import lru_cache

from zeroplan.engines.account import Symbol
from zeroplan.engines.fsdp2.groups import Apart, Group, cast_one_by_one
from zeroplan.engines.fsdp2.plan import REDUCE, Plan
from zeroplan.engines.optimizers import LocalTensor
from zeroplan.engines.positions import Position
from zeroplan.ledger import Among, Collective, Kind, Line, Moment, Phase
from zeroplan.numeric import Bool, Int, ceil_div, maximum, where
from zeroplan.spec.batch import Batch
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.parameters import BlockRun, Layout, Parameter
from zeroplan.transformer.params import layout

SPLIT = "torchtitan, distributed/fsdp.py, apply_fsdp_to_decoder (shard_placement_fn)"
GATHER = "torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, FSDPParamGroup.wait_for_unshard"
COPY_OUT = "torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, foreach_all_gather_copy_out"
PREFETCH = "torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, FSDPParamGroup._backward_prefetch"
EXCHANGE = "transformers 5.23, distributed/expert_parallel.py, AllToAllEP"
NOTE = (
    "experts are taken to be evenly visited, each rank's as often as any other's; a rank whose experts are visited more often "
    "holds and computes more"
)


# --- which weights a rank has ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def local_layout(model: ModelSpec, ep: int) -> Layout:
    """The parameters of one rank's experts and of everything else."""
    whole = layout(model)
    return whole._replace(runs=tuple(_local_run(run, ep) for run in whole.runs))


def _local_run(run: BlockRun, ep: int) -> BlockRun:
    parameters = tuple(
        parameter._replace(shape=(parameter.shape[0] // ep, *parameter.shape[1:])) if _is_expert(parameter) else parameter
        for parameter in run.parameters
    )
    return run._replace(parameters=parameters)


def _is_expert(parameter: Parameter) -> bool:
    return parameter.active_share != (1, 1)


def chunk(parameter: Parameter, repeat: int, *, n: Int, ep: int, in_block: bool) -> LocalTensor:
    """This rank's chunk: of experts along dim 1 where all ranks are more than experts are, else along dim 0."""
    rows, *rest = parameter.shape
    if not _is_expert(parameter):
        return LocalTensor((ceil_div(rows, n), *rest), repeat, in_block)
    narrow, ranks = _is_narrow(rows, n, ep), n // ep
    split = where(narrow, rest[0] // ranks, rest[0])
    return LocalTensor((where(narrow, rows, ceil_div(rows, ranks)), split, *rest[1:]), repeat, in_block)


def _is_narrow(rows: int, n: Int, ep: int) -> Bool:
    """Whether experts are fewer than ranks: ``rows`` are this rank's experts."""
    return n > rows * ep


def block_group(run: BlockRun, n: Int, ep: int) -> Group:
    """One ``fully_shard`` unit; of a block without experts as ever."""
    theirs = tuple(parameter for parameter in run.parameters if _is_expert(parameter))
    shard: Int = 0
    for parameter in run.parameters:
        shard = shard + chunk(parameter, 1, n=n, ep=ep, in_block=True).numel
    numel = sum(parameter.numel for parameter in run.parameters)
    if not theirs:
        return Group(shard, shard * n, numel, run.kind)
    apart: Int = 0
    for parameter in theirs:
        apart = apart + chunk(parameter, 1, n=n, ep=ep, in_block=True).numel
    ranks = n // ep
    experts = Apart(
        ranks, apart, apart * ranks, sum(parameter.numel for parameter in theirs),
        cast_one_by_one(tuple(parameter.numel for parameter in theirs)), theirs[-1].numel,
        where(_is_narrow(theirs[0].shape[0], n, ep), 1, 0), where(ranks > 1, 1, 0),
    )  # fmt: skip
    return Group(shard, (shard - apart) * n + experts.padded, numel, run.kind, experts=experts)


def symbols(plan: Plan) -> Iterator[Symbol]:
    """What formulas call the two groups of a block with experts."""
    for group in plan.blocks:
        if plan.reshard is False:
            yield Symbol(f"Q_{group.symbol}", group.padded, f"padded parameters that one {group.symbol} block has unsharded")
        if group.experts is None:
            continue
        one, kind = group.experts, group.symbol
        yield Symbol("F", one.ranks, "ranks that have the same experts, and share their weights out: N/ep")
        yield Symbol(f"X_{kind}", one.padded, f"padded parameters of the experts that a rank has in one {kind} block")
        yield Symbol(f"D_{kind}", group.padded - one.padded, f"padded parameters of one {kind} block beside its experts")
        yield Symbol(f"Y_{kind}", one.numel, f"parameters of the experts that a rank has in one {kind} block, without padding")


def local_experts(model: ModelSpec, ep: int) -> Symbol:
    """The symbol of the experts on a rank."""
    return Symbol("x", 0 if model.moe is None else model.moe.num_experts // ep, "experts of this rank, E/ep")


# --- buffers ------------------------------------------------------------------------------------------------------------------


def gathered(plan: Plan, group: Group, experts: Apart, reason: str, source: str) -> Line:
    """Both groups' all-gather buffers; experts that no other rank has are not gathered."""
    width = plan.width.compute
    n_bytes = width * (group.padded - experts.padded + experts.gathers * experts.padded)
    return Line(Kind.GATHER, n_bytes, reason, f"{width}·(D_{group.symbol} + X_{group.symbol}·min(1, F-1))", source)


def last_gathered(plan: Plan, group: Group, experts: Apart, reason: str, source: str) -> Line:
    """The experts' buffer alone: it is parked last in forward, and alone gathered ahead of the whole backward."""
    width = plan.width.compute
    formula = f"{width}·X_{group.symbol}·min(1, F-1)"
    return Line(Kind.GATHER, experts.gathers * width * experts.padded, reason, formula, source)


def _beside(plan: Plan, group: Group, experts: Apart) -> Int:
    return plan.width.compute * (group.padded - experts.padded)


def copying(plan: Plan, group: Group, experts: Apart) -> tuple[Int, str]:
    """What copying the experts out takes by the way, and its formula. [bytes]

    What was sharded along dim 1 is copied once more. Without ranks to gather from, weights are cast one after the other: the first
    one's cast is there when the second is made.
    """
    width = plan.width.compute
    alone = width * experts.by_the_way if plan.width.mixed else 0
    n_bytes = experts.narrow * width * experts.padded + (1 - experts.gathers) * alone
    again = f"{experts.narrow}·{width}·X_{group.symbol}" if isinstance(experts.narrow, int) else ""
    return n_bytes, f"{again} + (1 - min(1, F-1))·{alone}" if again else ""


# --- forward ---------------------------------------------------------------------------------------------------------------------


def entering(
    plan: Plan, position: Position, common: tuple[Line, ...], before: Line, beside: tuple[Line, ...]
) -> Iterator[Moment]:
    """What is not the experts' is copied out while the block before has its buffer, then the experts' while that has its own.

    In torch 2.13; in 2.15 each is gathered while the one before has its buffer.
    """
    group, width = plan.blocks[position.run], plan.width.compute
    experts, name = _apart(group), position.name
    if plan.of_torch_2_15:
        one, other = _gathering(plan, position.run, experts)
        yield Moment(f"forward: gathering {name}, experts not yet", Phase.FORWARD, (*common, before, *one, *beside))
        yield Moment(f"forward: gathering {name}", Phase.FORWARD, (*common, *other, *beside))
    else:
        one = _copied_out_first(plan, group, experts)
        yield Moment(f"forward: unsharding {name}, experts not yet", Phase.FORWARD, (*common, *one, before, *beside))
    n_bytes, formula = copying(plan, group, experts)
    by_the_way = Line(Kind.GATHER, n_bytes, "experts, cast or copied once more on their way out", formula, COPY_OUT)
    second = (
        Line(Kind.UNSHARDED_PARAMETERS, width * group.padded, "this block's, copied out for use", f"{width}·{group.whole}", GATHER),
        (last_gathered if plan.of_torch_2_15 else gathered)(
            plan, group, experts, "this block's, until the experts' are copied out", GATHER
        ),
        by_the_way,
    )  # fmt: skip
    yield Moment(f"forward: unsharding {name}", Phase.FORWARD, (*common, *second, *beside))


def _copied_out_first(plan: Plan, group: Group, experts: Apart) -> tuple[Line, Line]:
    n_bytes, formula = _beside(plan, group, experts), f"{plan.width.compute}·D_{group.symbol}"
    return (
        Line(Kind.UNSHARDED_PARAMETERS, n_bytes, "this block's beside its experts, copied out for use", formula, GATHER),
        Line(Kind.GATHER, n_bytes, "this block's beside its experts, being copied out", formula, GATHER),
    )


def _gathering(plan: Plan, run: int, experts: Apart) -> tuple[tuple[Line, ...], tuple[Line, ...]]:
    """What is alive of a block's two groups while the first is gathered, and while the second is."""
    group, width, kind = plan.blocks[run], plan.width.compute, plan.blocks[run].symbol
    whole, buffer = _copied_out_first(plan, group, experts)
    chunk, theirs = (width * (group.shard - experts.shard), width * experts.shard) if plan.width.mixed else (0, 0)
    cast = Line(Kind.GATHER, chunk, "this rank's chunk of it, cast", f"{width}·D_{kind}/N" if plan.width.mixed else "0", GATHER)
    cast_theirs = Line(
        Kind.GATHER, experts.gathers * theirs, "this rank's chunk of the experts, cast",
        f"{width}·X_{kind}/F·min(1, F-1)" if plan.width.mixed else "0", GATHER,
    )  # fmt: skip
    gathers = last_gathered(plan, group, experts, "the experts', being gathered", GATHER)
    parked = buffer._replace(reason="this block's beside its experts, parked")
    return (buffer._replace(reason="this block's beside its experts, being gathered"), cast), (
        whole,
        parked,
        gathers,
        cast_theirs,
    )


def _apart(group: Group) -> Apart:
    assert group.experts is not None  # noqa: S101  asked of blocks with experts only
    return group.experts


# --- backward ---------------------------------------------------------------------------------------------------------------------


def own_buffers_then_the_next(plan: Plan, position: Position) -> tuple[Line, ...]:
    """All-gather buffers beside the unsharded block: its own until they are copied out, then those of the block below.

    Of the block below the experts are gathered first.
    """
    group, width = plan.blocks[position.run], plan.width.compute
    experts, kind = _apart(group), group.symbol
    own: Int = experts.gathers * width * experts.padded
    by_the_way, how = copying(plan, group, experts)
    ahead = maximum(_beside(plan, group, experts) + own - width * experts.padded, own + by_the_way)
    parts = [
        f"{width}·(D_{kind} + X_{kind}·min(1, F-1) - X_{kind})", f"{width}·X_{kind}·min(1, F-1) + {how}",
    ]  # fmt: skip
    if position.previous_run is not None:
        more, formulas = _below(plan, plan.blocks[position.previous_run])
        ahead, parts = maximum(ahead, *more), [*parts, *formulas]
    formula = f"max({', '.join(parts)})" if how else ""
    return (Line(Kind.GATHER, ahead, "this block's, then the next one's with its cast input", formula, PREFETCH),)


def _below(plan: Plan, below: Group) -> tuple[list[Int], list[str]]:
    width, mixed, kind = plan.width.compute, plan.width.mixed, below.symbol
    if below.experts is None:
        cast: Int = width * below.shard if mixed else 0
        return [width * below.padded + cast], [f"{width}·P_{kind}" + (f" + {width}·P_{kind}/N" if mixed else "")]
    one = below.experts
    theirs: Int = one.gathers * width * one.padded
    whole: Int = theirs + width * (below.padded - one.padded)
    cast_theirs: Int = one.gathers * width * one.shard if mixed else 0
    cast = width * (below.shard - one.shard) if mixed else 0
    gather = f"{width}·X_{kind}·min(1, F-1)"
    return [theirs + cast_theirs, whole + cast], [
        gather + (f" + {width}·X_{kind}/F·min(1, F-1)" if mixed else ""),
        f"{gather} + {width}·D_{kind}" + (f" + {width}·D_{kind}/N" if mixed else ""),
    ]


def reducing(plan: Plan, position: Position, alive: tuple[Line, ...], widths: tuple[int, Int, str]) -> Iterator[Moment]:
    """The experts' gradients are reduced while the rest of the block is still unsharded, then the others'.

    ``widths`` are those of the reduction's output with its cast, of a gradient that is copied in, and its formula.
    """
    group = plan.trained_blocks[position.run]
    experts, kind = _apart(group), group.symbol
    into = Line(
        Kind.REDUCE, plan.reduce_bytes * experts.padded, "reduce-scatter input of this block's experts",
        f"{plan.reduce_bytes}·X_{kind}", REDUCE,
    )  # fmt: skip
    theirs = (*_waiting_for_experts(plan, group, widths), into, copied_in(plan, experts, kind, widths))
    yield Moment(f"backward: reducing the experts of {position.name}", Phase.BACKWARD, (*alive, *theirs))
    others = (into, *_reducing_the_rest(plan, group, widths))
    yield Moment(f"backward: reducing {position.name}", Phase.BACKWARD, (*alive, *others))


def _waiting_for_experts(plan: Plan, group: Group, widths: tuple[int, Int, str]) -> tuple[Line, Line]:
    """What of a block is not its experts, while those are reduced."""
    experts, kind, width = _apart(group), group.symbol, plan.width.compute
    _, copied, copied_formula = widths
    twice, twice_formula = _beside_accumulated(plan)
    return (
        Line(Kind.UNSHARDED_PARAMETERS, width * (group.padded - experts.padded), "this block's beside its experts",
             f"{width}·D_{kind}", GATHER),
        Line(Kind.UNSHARDED_GRADIENTS, (copied + twice) * (group.numel - experts.numel), "this block's beside its experts, made",
             f"({copied_formula}{twice_formula})·(G_{kind} - Y_{kind})", REDUCE),
    )  # fmt: skip


def _reducing_the_rest(plan: Plan, group: Group, widths: tuple[int, Int, str]) -> tuple[Line, Line, Line]:
    experts, kind, (out, copied, copied_formula) = _apart(group), group.symbol, widths
    shards, first = (1 - plan.several, "(1-M)·") if plan.recipe.sync_every_micro_batch else (1, "")
    stored = plan.width.stored
    made = maximum(copied * (group.numel - experts.numel), out * (group.shard - experts.shard))
    return (
        Line(Kind.GRADIENTS, shards * stored * experts.shard, "this rank's chunk of the experts' gradients",
             f"{first}{stored}·X_{kind}/F", REDUCE),
        Line(Kind.REDUCE, plan.reduce_bytes * (group.padded - experts.padded), "reduce-scatter input of the rest of this block",
             f"{plan.reduce_bytes}·D_{kind}", REDUCE),
        Line(Kind.UNSHARDED_GRADIENTS, made, "the rest of this block's while copied in, or the reduce-scatter output",
             f"max({copied_formula}·(G_{kind} - Y_{kind}), {out}·D_{kind}/N)", REDUCE),
    )  # fmt: skip


def _beside_accumulated(plan: Plan) -> tuple[Int, str]:
    """Bytes of an element of a gradient that has not been added yet to the one that earlier micro-batches left, and its formula."""
    if plan.recipe.sync_every_micro_batch or plan.adds_up:
        return 0, ""
    return plan.several * plan.width.compute, f" + {plan.width.compute}·M"


def copied_in(plan: Plan, experts: Apart, kind: str, widths: tuple[int, Int, str]) -> Line:
    """The experts' gradients while they are copied in, or what comes out.

    Chunked along dim 1 they are joined anew first, and the last original stays. Where no other rank has them, the sum is divided
    out of place, by one. Torch 2.15 lets go of that one (``_default_reduce_scatter_input_fn``), and divides by nothing.
    """
    out, copied, copied_formula = widths
    if plan.of_torch_2_15:
        made = maximum(copied * experts.numel, out * experts.shard)
        formula = f"max({copied_formula}·Y_{kind}, {out}·X_{kind}/F)"
        return Line(
            Kind.UNSHARDED_GRADIENTS, made, "the experts' while copied in, or the reduce-scatter output", formula, REDUCE
        )
    narrow = experts.narrow * copied * experts.last
    divided = (1 - experts.gathers) * plan.reduce_bytes * experts.padded
    made = maximum(copied * experts.numel + narrow, out * experts.shard + narrow, plan.reduce_bytes * experts.shard + divided)
    last = f"{experts.narrow}·{copied_formula}·{experts.last}" if isinstance(experts.narrow, int) else ""
    reduced = f"{plan.reduce_bytes}·X_{kind}/F + (1 - min(1, F-1))·{plan.reduce_bytes}·X_{kind}"
    formula = f"max({copied_formula}·Y_{kind} + {last}, {out}·X_{kind}/F + {last}, {reduced})" if last else ""
    return Line(Kind.UNSHARDED_GRADIENTS, made, "the experts' while copied in, or the reduce-scatter output", formula, REDUCE)


# --- traffic ----------------------------------------------------------------------------------------------------------------------


def exchanges(plan: Plan, run: BlockRun, mesh: Mesh, batch: Batch, model: ModelSpec) -> Iterator[Collective]:
    """Tokens to their experts and back, in forward and backward, and how many go where before; once more where recomputed.

    Selective recomputation keeps what came, as torchtitan's does, but asks again how many.
    """
    assert model.moe is not None  # noqa: S101  asked of blocks with experts only
    pairs = batch.micro_batch_size * batch.seq_len * model.moe.num_experts_per_tok
    calls, again = batch.grad_accum_steps * run.layers, plan.recipe.recompute
    width, name = plan.width.compute, f"{run.kind} blocks"
    elements, ranks = pairs * model.hidden_size, mesh.ep
    yield _exchange(f"tokens of {name}", Phase.FORWARD, ranks, 2 * calls, width, elements)
    yield _exchange(f"tokens of {name}", Phase.BACKWARD, ranks, (4 if again == "full" else 2) * calls, width, elements)
    yield _exchange(f"counts of {name}", Phase.FORWARD, ranks, calls, 8, model.moe.num_experts)
    if again != "none":
        yield _exchange(f"counts of {name}", Phase.BACKWARD, ranks, calls, 8, model.moe.num_experts)


def _exchange(what: str, phase: Phase, ranks: Int, calls: Int, width: int, elements: Int) -> Collective:
    payload: Int = width * elements
    sent: Int = calls * (payload - payload // ranks)
    return Collective(
        "all_to_all", what, phase.value, ranks, calls, payload, sent, calls * elements, EXCHANGE, near=True, phase=phase,
        among=Among.EXPERTS,
    )  # fmt: skip
