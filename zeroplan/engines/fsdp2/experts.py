"""Expert parallelism under FSDP2: each rank has some of the experts, and ranks with the same experts shard their weights.

A block is one ``fully_shard`` unit of two groups, as in torchtitan: the experts' weights on F = N·tp/ep ranks, all others on N.
The forward gathers and copies out the experts' group last; the backward prefetches and reduces it first. transformers' own
all-to-all sends tokens to their expert's rank and back (:mod:`zeroplan.transformer.families.experts`).

Leaves out explicit prefetching, with which torchtitan gathers one block ahead in forward too.
"""

from collections.abc import Iterator

from zeroplan.engines.account import Symbol
from zeroplan.engines.fsdp2.groups import Group
from zeroplan.engines.fsdp2.plan import Plan
from zeroplan.ledger import Among, Collective, Phase
from zeroplan.numeric import Int, ceil_div
from zeroplan.spec.batch import Batch
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import EVEN, GATHERING, RecipeSpec
from zeroplan.transformer.parameters import BlockRun

EXCHANGE = "transformers 5.23, distributed/expert_parallel.py, AllToAllEP"
GATHERED = "NeMo AutoModel 36044ad3, components/moe/experts.py, GroupedExperts.forward"
NOTE = "zeroplan assumes even routing; a rank whose experts get more tokens needs more memory and time"


def note_of(recipe: RecipeSpec) -> str:
    """Return the assumption about routing."""
    if recipe.imbalance == 1:
        return NOTE
    return (
        f"this rank's experts get {recipe.imbalance:g} times the even share of tokens in every block; times assume even routing"
    )


def used_as_they_are(group: Group) -> Group:
    """Return a block whose experts no other rank has, in 16 bits, as AutoModel leaves them out of FSDP: nothing is gathered.

    Source: NeMo AutoModel 36044ad3, components/moe/parallelizer.py, apply_fsdp (``ep_shard_enabled``, ``ignored_params``).
    """
    one = group.experts
    if one is None or not isinstance(one.ranks, int) or one.ranks > 1:
        return group
    return group._replace(padded=group.padded - one.padded, experts=one._replace(padded=0, by_the_way=0, last=0))


def symbols(plan: Plan) -> Iterator[Symbol]:
    """Yield the symbols of the two groups of a block with experts."""
    trained = plan.trained_blocks if plan.is_partly_frozen else ()
    for group in (*plan.blocks, *trained):
        if plan.reshard is False:
            yield Symbol(f"Q_{group.symbol}", group.padded, f"padded parameters that one {group.symbol} block has unsharded")
        if group.experts is None:
            continue
        one, kind = group.experts, group.symbol
        yield Symbol("F", one.ranks, "ranks that have the same experts, and share their weights out: N·tp/ep")
        yield Symbol(f"X_{kind}", one.padded, f"padded parameters of the experts that a rank has in one {kind} block")
        yield Symbol(f"D_{kind}", group.padded - one.padded, f"padded parameters of one {kind} block beside its experts")
        yield Symbol(f"Y_{kind}", one.numel, f"parameters of the experts that a rank has in one {kind} block, without padding")


def local_experts(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Iterator[Symbol]:
    """Yield the symbols of a rank's experts, and of the pairs that they receive under uneven routing."""
    assert model.moe is not None  # noqa: S101  asked of models with experts only
    yield Symbol("x", model.moe.num_experts // mesh.ep, "experts of this rank, E/ep")
    if GATHERING & set(recipe.fused_parts):
        yield Symbol("T_g", _tokens(mesh, batch), "tokens of all ranks that share the experts, T·ep")
    if recipe.imbalance != 1:
        yield Symbol("X_r", _pairs(model, recipe, mesh, batch)[-1], "pairs that come to this rank's experts")


# --- traffic ----------------------------------------------------------------------------------------------------------------------


def exchanges(plan: Plan, run: BlockRun, mesh: Mesh, batch: Batch, model: ModelSpec) -> Iterator[Collective]:
    """Yield the all-to-alls of tokens and of their counts in forward and backward, and in a recomputation.

    Selective recomputation keeps the received tokens, as torchtitan's does, but sends the counts again.
    """
    assert model.moe is not None  # noqa: S101  asked of blocks with experts only
    if GATHERING & set(plan.recipe.fused_parts):
        yield from _gathered(plan, run, mesh, batch, model.width_of_experts)
        return
    sizes = [pairs * model.width_of_experts for pairs in _pairs(model, plan.recipe, mesh, batch)]
    calls, again = batch.grad_accum_steps * run.layers, "none" if run.plain else plan.recipe.recompute
    width, name = plan.width.compute, f"{run.words} blocks"
    twice = again == "full" or (again == "selective" and "router-kept" in plan.recipe.fused_parts)
    each, ranks = 2 // len(sizes) * calls, mesh.ep
    for elements in sizes:
        yield _exchange(f"tokens of {name}", Phase.FORWARD, ranks, each, width, elements)
        yield _exchange(f"tokens of {name}", Phase.BACKWARD, ranks, (2 if twice else 1) * each, width, elements)
    yield _exchange(f"counts of {name}", Phase.FORWARD, ranks, calls, 8, model.moe.num_experts)
    if again != "none":
        yield _exchange(f"counts of {name}", Phase.BACKWARD, ranks, calls, 8, model.moe.num_experts)


def _tokens(mesh: Mesh, batch: Batch) -> Int:
    return batch.micro_batch_size * batch.seq_len * int(mesh.ep)


def _gathered(plan: Plan, run: BlockRun, mesh: Mesh, batch: Batch, hidden: int) -> Iterator[Collective]:
    """Yield NeMo AutoModel's exchanges: tokens gathered, outputs summed in fp32, and their gradients."""
    recipe, elements, ranks = plan.recipe, _tokens(mesh, batch) * hidden, mesh.ep
    calls, again = batch.grad_accum_steps * run.layers, 1 if run.plain or recipe.recompute == "none" else 2
    name, width = f"{run.words} blocks", plan.width.compute
    for operation, what, phase, times, of_one in (
        ("all_gather", "tokens", Phase.FORWARD, 1, width), ("all_reduce", "outputs", Phase.FORWARD, 1, 4),
        *((("all_gather", "tokens", Phase.BACKWARD, 1, width),) * (again - 1)), ("all_reduce", "outputs", Phase.BACKWARD, again, 4),
        ("all_reduce", "gradients of tokens", Phase.BACKWARD, 1, width),
    ):  # fmt: skip
        payload, runs = of_one * elements, calls * times
        moved = payload - payload // ranks
        sent = runs * (2 * moved if operation == "all_reduce" else moved)
        yield Collective(
            operation, f"{what} of {name}", phase.value, ranks, runs, payload, sent, runs * elements, GATHERED, near=True,
            phase=phase, among=Among.EXPERTS,
        )  # fmt: skip


def _pairs(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> tuple[Int, ...]:
    """Return the number of (token, expert) pairs that leave this rank and that it receives; one number if they are equal."""
    assert model.moe is not None  # noqa: S101  as above
    pairs = batch.micro_batch_size * (batch.seq_len // mesh.tp) * model.moe.num_experts_per_tok
    come = ceil_div(pairs * recipe.imbalance_in_thousandths, EVEN)
    return (pairs,) if recipe.imbalance == 1 else (pairs, come)


def _exchange(what: str, phase: Phase, ranks: Int, calls: Int, width: int, elements: Int) -> Collective:
    payload: Int = width * elements
    sent: Int = calls * (payload - payload // ranks)
    return Collective(
        "all_to_all", what, phase.value, ranks, calls, payload, sent, calls * elements, EXCHANGE, near=True, phase=phase,
        among=Among.EXPERTS,
    )  # fmt: skip
