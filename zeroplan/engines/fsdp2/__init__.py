"""The memory and traffic of a rank under FSDP2 (``fully_shard``).

Every block is one group, and the root group has everything else (embedding, final norm, head), as in PyTorch's own examples. A
buffer lives until its last Python reference in host order, so the allocated bytes at every moment follow from the code of
``torch/distributed/fsdp/_fully_shard``: torch 2.13's, or 2.15's if a job says so (``fsdp2.torch``). The estimate is for rank 0,
whose dim-0 chunk is never the smaller one.

Leaves out frozen parameters without adapters, other wrappings, explicit prefetching of other units than blocks, and buffers of
the process group itself.
"""

from collections.abc import Iterator

from zeroplan.engines.account import Account, Symbol
from zeroplan.engines.fsdp2 import step
from zeroplan.engines.fsdp2.buffers import smaller_shard
from zeroplan.engines.fsdp2.groups import Group
from zeroplan.engines.fsdp2.plan import Plan, make_plan
from zeroplan.engines.fsdp2.traffic import collectives
from zeroplan.engines.optimizers import counted, step_temporary_lines, total_elements
from zeroplan.engines.pinned import NOTHING, OffloadedActivations, beyond, beyond_symbol, note, offloaded_activations
from zeroplan.engines.published_optimizers import notes_of as notes_of_optimizer
from zeroplan.ledger import Line
from zeroplan.numeric import ceil_div
from zeroplan.spec.batch import Batch, of_a_rank
from zeroplan.spec.compiled import COMPILED_BLOCKS
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.transformer.parameters import Parameter

_NOTABLE_EXCESS = 50  # an excess of a fiftieth over an even share is worth a note


def account(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Account:
    """Return memory of rank 0 and traffic per step under FSDP2, stage 2 (``reshard_after_forward=False``) or 3. [bytes]

    Source: the files named in each line; verified against real runs on CPU tensors with a fake process group.
    """
    batch = of_a_rank(batch, int(mesh.cp))
    plan = make_plan(model, recipe, mesh, batch)
    states = plan.persistent
    if not recipe.fsdp2.step_in_backward:
        states += (plan.gradient_shards(plan.every_layer, "after backward", plan.trained_outside),)
    temporaries = step_temporary_lines(
        recipe.optimizer, plan.impl, plan.local_tensors, plan.width.stored, symbol=plan.updated or f"{plan.trained_symbol}/N"
    )
    if recipe.fsdp2.step_in_backward:
        temporaries = ()
    here, there = ((), temporaries) if plan.offloaded else (temporaries, ())
    activations = activations_on_host(plan)
    held = plan.head.at_embedding if plan.loss_in_loop else ()
    moments = step.moments(plan, (*states, *held, *here))
    of_experts = tuple(_of_experts(plan, model, mesh, batch)) if plan.has_experts_apart else ()
    return Account(
        states=states,
        moments=moments,
        collectives=collectives(plan, mesh, batch, model),
        host=(*in_host_memory(plan, activations), *there),
        symbols=(*symbols_of(plan, model, activations), *counted(*plan.persistent, *temporaries), *of_experts),
        notes=tuple(_notes(plan)),
        kept=plan.kept_in_a_block,
    )


def activations_on_host(plan: Plan) -> OffloadedActivations:
    """Return the blocks' activations in host memory."""
    if not plan.recipe.offload_activations:
        return NOTHING
    kinds = [run.name for run in plan.runs]
    return offloaded_activations(plan.recipe.recompute, zip(kinds, plan.passes, plan.every_layer, strict=True))


def in_host_memory(plan: Plan, activations: OffloadedActivations) -> tuple[Line, ...]:
    """Return the host memory per rank under offload, including the optimizer step's temporaries."""
    if not plan.recipe.offloads:
        return ()
    pinned = beyond(plan.beyond_pinned_bytes + activations.beyond_bytes)
    if not plan.offloaded:
        return (*activations.lines, pinned)
    gradients = plan.reduced_gradients(plan.every_layer, "after backward", plan.trained_outside)
    return (*plan.in_host_memory, gradients, *activations.lines, pinned)


def symbols_of(plan: Plan, model: ModelSpec, activations: OffloadedActivations) -> tuple[Symbol, ...]:
    """Return the symbols in a plan's formulas that the model's legend lacks."""
    return (
        Symbol("N", plan.n, "ranks that share one copy"),
        Symbol("M", plan.several, "1 where earlier micro-batches of the step left gradients, else 0"),
        Symbol("M_2", plan.twice, "1 where at least two did, else 0"),
        Symbol("R", plan.replicated, "1 with replicas, whose gradients are all-reduced on top, else 0"),
        Symbol("P", plan.padded, "parameters, each one's dim 0 padded to a multiple of N"),
        *_of_outside(plan),
        *(
            symbol
            for group, kept in zip(plan.blocks, plan.kept, strict=True)
            for symbol in (
                _padded(plan, group),
                Symbol(f"G_{group.symbol}", group.numel, f"parameters of one {group.symbol} block without padding"),
                Symbol(f"S_{group.symbol}", kept, f"bytes one {group.symbol} block keeps from its forward to its backward"),
            )
        ),
        *_smaller_shards(plan),
        *activations.symbols,
        *((beyond_symbol(plan.beyond_pinned_bytes + activations.beyond_bytes),) if plan.recipe.offloads else ()),
        *(_of_trained(plan) if plan.is_partly_frozen else ()),
        *_of_quantised(model),
    )


def _of_outside(plan: Plan) -> Iterator[Symbol]:
    words = ("the root group (embedding, final norm, head)",) if plan.ends is None else ("the embedding", "final norm and head")
    for group, what in zip(plan.outside, words, strict=True):
        yield Symbol(f"P_{group.symbol}", group.padded, f"of them in {what}")
        yield Symbol(f"G_{group.symbol}", group.numel, f"parameters of {what} without padding")


def _padded(plan: Plan, group: Group) -> Symbol:
    name = f"P_{group.symbol}"
    if group.experts is None:
        return Symbol(name, group.padded, f"padded parameters of one {group.symbol} block")
    return Symbol(name, plan.n * group.shard, f"N times this rank's chunk of one {group.symbol} block")


def _of_experts(plan: Plan, model: ModelSpec, mesh: Mesh, batch: Batch) -> Iterator[Symbol]:
    from zeroplan.engines.fsdp2 import experts  # noqa: PLC0415  keeps start-up fast

    yield from experts.symbols(plan)
    yield from experts.local_experts(model, plan.recipe, mesh, batch)


def _of_quantised(model: ModelSpec) -> tuple[Symbol, ...]:
    if not model.is_quantised:
        return ()
    from zeroplan.engines.quantised import quantised_symbols  # noqa: PLC0415  keeps start-up fast

    return quantised_symbols(model)


def _of_trained(plan: Plan) -> Iterator[Symbol]:
    padded = plan.n * plan.trained_shards(plan.every_layer, plan.trained_outside)
    yield Symbol("P_trained", padded, "of the padded parameters those that are trained")
    if plan.updated is not None:
        stepped = plan.n * total_elements(plan.local_tensors)
        yield Symbol("P_stepped", stepped, "of these those that an optimizer updates, of the adapters that learn")
    for group in plan.trained_outside:
        if group.numel:
            yield Symbol(f"P_{group.symbol}", group.padded, "padded parameters that are trained outside the blocks")
            yield Symbol(f"G_{group.symbol}", group.numel, "parameters that are trained outside the blocks")
    for group, run in zip(plan.trained_blocks, plan.runs, strict=True):
        padded = group.padded if group.experts is None else plan.n * group.shard
        yield Symbol(f"P_{group.symbol}", padded, f"padded parameters that are trained in one {run.kind} block")
        yield Symbol(f"G_{group.symbol}", group.numel, f"parameters that are trained in one {run.kind} block")


def _smaller_shards(plan: Plan) -> Iterator[Symbol]:
    if isinstance(plan.reshard, bool):
        return
    apart = plan.trained_blocks if plan.is_partly_frozen else ()
    embedding = () if plan.ends is None else (plan.ends.embedding, *((plan.ends.trained_embedding,) if apart else ()))
    outside = [("the embedding", group) for group in embedding]
    for what, group in (*outside, *((f"one {group.symbol} block", group) for group in (*plan.blocks, *apart))):
        meaning = f"elements of the smaller shard of {what} between its forward and its backward"
        yield Symbol(f"Q_{group.symbol}", smaller_shard(plan, group), meaning)


def _casting(recipe: RecipeSpec) -> str:
    if COMPILED_BLOCKS in recipe.fused_parts:
        return "as torch.compile runs it"
    return "without torch.compile, which fuses the casts and takes less"


def notes_of(recipe: RecipeSpec) -> Iterator[str]:
    """Yield notes: torch release and modules, parts on the host, and left-out parts."""
    if recipe.fsdp2.are_torchtitans:
        release = "0.2.2" if recipe.fsdp2.modules == "torchtitan" else "0.3.0"
        yield f"the modules, units and loss are those of torchtitan {release}"
    if recipe.fsdp2.of_torch_2_15:
        yield "FSDP2 is that of torch 2.15"
    if recipe.offload_activations:
        yield note(recipe.recompute)
    if recipe.float8_recipe in ("mxfp8", "nvfp4"):
        read = recipe.float8_recipe == "mxfp8" and COMPILED_BLOCKS not in recipe.fused_parts
        how = "read from its code, not run" if read else "that of its code without its kernels"
        yield (
            f"linear layers of the blocks run in torchao's {recipe.float8_recipe}, whose memory is {how}; "
            "parameters are gathered in the compute dtype"
        )
    elif recipe.float8_recipe is not None:
        yield (
            f"linear layers of the blocks run in torchao's float8 {_casting(recipe)}; "
            f"parameters are gathered in {'float8' if recipe.fsdp2.float8_all_gather else 'the compute dtype'}"
        )
    yield from notes_of_optimizer(recipe.optimizer)
    if recipe.optimizer == "muon":
        yield (
            "torch's DTensor chooses what Muon gathers, exchanges and sums up, here as on nodes of 8 GPUs; it fails if a matrix "
            "has fewer rows than ranks shard it"
        )
    if recipe.fsdp2.step_in_backward:
        yield "each weight's optimizer steps as soon as its unit is reduced, and frees the gradient"
    if recipe.fsdp2.cpu_offload:
        yield "shards of parameters and gradients and the optimizer's state are in pinned host memory, and the CPU takes the step"


_AHEAD = (
    "multi-token prediction: the most that its logits take is counted, and weights of each depth even where all depths share them; "
    "times leave out its heads"
)


def _notes(plan: Plan) -> Iterator[str]:
    """Yield the recipe's notes, and one if dim-0 sharding gives rank 0 clearly more than an even share."""
    yield from notes_of(plan.recipe)
    if plan.recipe.fsdp2.step_in_backward and isinstance(plan.replicated, int) and plan.replicated:
        yield "an all-reduce over replicas holds its buffer until the backward ends, so that freed gradients save no memory"
    if plan.outlive > 1:
        yield (
            "prime-rl frees the gradients of adapters that step alone, and those of a block share one buffer: "
            f"{plan.outlive} buffers of all adapters' gradients are counted, the most, if every run steps at another time"
        )
    if plan.first_ahead is not None:
        yield _AHEAD
    if plan.has_experts_apart:
        from zeroplan.engines.fsdp2.experts import note_of as visited  # noqa: PLC0415  keeps start-up fast

        yield visited(plan.recipe)
        return

    def excess(one: Parameter, ranks: int) -> int:
        """Return the elements of rank 0's chunk beyond an even share."""
        return ceil_div(one.shape[0], ranks) * (one.numel // one.shape[0]) - one.numel // ranks

    shards, even = plan.padded // plan.n, plan.numel // plan.n
    if not isinstance(shards, int) or shards - even <= even // _NOTABLE_EXCESS:
        return
    worst = max(plan.parameters, key=lambda one: excess(one, int(plan.n)))
    yield (
        f"FSDP2 shards along dim 0: rank 0 holds {shards:,} parameters where an even share is {even:,}, mostly because "
        f"{worst.name} has {worst.shape[0]} rows for {plan.n} ranks; DeepSpeed shards flat and stays even"
    )
