"""The memory and traffic of a rank under FSDP1 (``FullyShardedDataParallel``).

Every block is one unit, and the root has everything else (embedding, final norm, head), as accelerate wraps a transformer. A
unit's parameters are one flat parameter, and so are its gradients, in the code of torch 2.13 (``torch/distributed/fsdp``). The
estimate is for rank 0, whose shard is never the smaller one.

Leaves out a single rank, where FSDP1 shards nothing; buffers of the process group itself.
"""

from collections.abc import Iterator

from zeroplan.engines.account import Account, Symbol
from zeroplan.engines.frozen import ROUTED
from zeroplan.engines.fsdp1 import step
from zeroplan.engines.fsdp1.adapters import IGNORED
from zeroplan.engines.fsdp1.flat import FlatPlan, adapter_units, flat_plan, frozen_units
from zeroplan.engines.fsdp2 import activations_on_host, in_host_memory, symbols_of
from zeroplan.engines.fsdp2.groups import Group, on_host
from zeroplan.engines.fsdp2.traffic import ROOT, of_units
from zeroplan.engines.optimizers import counted, step_temporary_lines
from zeroplan.engines.pinned import note
from zeroplan.ledger import Collective, Line, Role, Tag
from zeroplan.numeric import Int, ceil_div
from zeroplan.spec.batch import Batch
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec


def account(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Account:
    """Return memory of rank 0 and traffic per step under FSDP1, stage 2 (SHARD_GRAD_OP) or 3 (FULL_SHARD). [bytes]

    Source: the files named in each line; verified against real runs on fake tensors with a fake process group.
    """
    plan = flat_plan(model, recipe, mesh, batch)
    gradients = _gradients(plan)
    states = (*plan.persistent, on_host(gradients) if plan.offloaded else gradients)
    updated = "U" if recipe.fsdp1.use_orig_params else f"{plan.trained_symbol}/N"
    temporaries = step_temporary_lines(recipe.optimizer, plan.impl, plan.local_tensors, plan.width.stored, symbol=updated)
    here, there = ((), temporaries) if plan.offloaded else (temporaries, ())
    activations = activations_on_host(plan)
    written_back, written_symbols = plan.written_back(there)
    frozen = (
        Symbol(f"P_{group.symbol}", group.padded, f"padded parameters of the frozen unit, {group.symbol}")
        for group in (frozen_units(plan) if plan.is_partly_frozen else ())
    )
    return Account(
        states=states,
        moments=step.moments(plan, (*states, *here)),
        collectives=collectives(plan, mesh, batch),
        host=(*in_host_memory(plan, activations), *there, *written_back),
        symbols=(*symbols_of(plan, model, activations), *frozen, *written_symbols, *counted(*plan.persistent, *temporaries)),
        notes=tuple(_notes(plan, model)),
        kept=plan.kept_in_a_block,
    )


def _gradients(plan: FlatPlan) -> Line:
    """Return this rank's gradient shard. With ``use_orig_params`` ``zero_grad`` clears only views, and does not free it.

    Source: torch 2.13, _flat_param.py, ``FlatParamHandle._reset_flat_param_grad_info_if_needed``, in the root's next forward.
    """
    line = plan.gradient_shards(plan.every_layer, "after backward", plan.trained_outside)
    return line._replace(tag=Tag(Role.UNTIL_NEXT_STEP)) if plan.options.use_orig_params else line


def _notes(plan: FlatPlan, model: ModelSpec) -> Iterator[str]:
    if plan.recipe.offload_activations:
        yield note(plan.recipe.recompute)
    if model.adapter is not None and model.moe is not None:
        yield ROUTED
    copied = plan.is_partly_frozen and plan.width.mixed and not model.is_quantised
    if copied and not plan.options.use_orig_params:
        yield "copies of the adapters' inputs are counted, which FSDP1 takes in the first step alone; later steps take less"


def collectives(plan: FlatPlan, mesh: Mesh, batch: Batch) -> tuple[Collective, ...]:
    """Return every collective of one optimizer step.

    At stage 2 under ``no_sync`` parameters stay gathered from one micro-batch to the next (``_should_free_in_backward``).
    """
    passes, synced = batch.grad_accum_steps, plan.recipe.sync_every_micro_batch
    once: Int = 1 if plan.reshard is False and not synced else passes
    reductions: Int = passes if synced else 1
    reduced = reductions if plan.trained_root.numel else 0
    calls = list(_of_unit(plan, mesh, plan.root, ROOT, 1, (once, 0, reduced), is_root=True))
    again: Int = 0 if plan.reshard is False else passes * (1 + plan.options.checkpoints_units)
    if plan.is_partly_frozen:
        return (*calls, *_beside_adapters(plan, mesh, (once, again, reductions)))
    for group, run in zip(plan.blocks, plan.runs, strict=True):
        calls += _of_unit(plan, mesh, group, f"{run.words} blocks", run.layers, (once, again, reductions))
    return tuple(calls)


def _beside_adapters(plan: FlatPlan, mesh: Mesh, times: tuple[Int, Int, Int]) -> Iterator[Collective]:
    """Yield collectives of frozen units and adapters. Reentrant checkpoints gather an adapter's unit once more."""
    once, again, reductions = times
    more = 2 * again if plan.recomputed and not plan.options.checkpoints_units else again
    for at, (group, run) in enumerate(zip(frozen_units(plan), plan.runs, strict=True)):
        yield from _of_unit(plan, mesh, group, f"frozen {run.words} blocks", run.layers, (once, again, 0))
        for unit in adapter_units(plan, at):
            if plan.options.ignores_adapters:
                yield _all_reduce(plan, unit, reductions * run.layers, f"gradients of adapters of {run.words} blocks")
                continue
            yield from _of_unit(plan, mesh, unit, f"adapters of {run.words} blocks", run.layers, (once, more, reductions))


def _all_reduce(plan: FlatPlan, unit: Group, calls: Int, what: str) -> Collective:
    """Return the all-reduces of a matrix that every rank has whole."""
    payload: Int = plan.width.stored * unit.numel
    sent: Int = 2 * calls * ceil_div(payload, plan.n) * (plan.n - 1)
    return Collective("all_reduce", what, "backward", plan.n, calls, payload, sent, 2 * calls * unit.numel, IGNORED)


def _of_unit(
    plan: FlatPlan, mesh: Mesh, group: Group, name: str, layers: int, times: tuple[Int, Int, Int], *, is_root: bool = False
) -> Iterator[Collective]:
    forward, backward, reductions = (each * layers for each in times)
    calls, replicas = (forward, backward, reductions), mesh.dp_replicate
    return of_units(plan, (group, group), name, calls, ranks=plan.n, replicas=replicas, is_root=is_root)
