"""What does FSDP1 (``FullyShardedDataParallel``) allocate, and when?

Every block is one unit, everything else (embedding, final norm, head) is the root's, as accelerate wraps a transformer. A unit's
parameters are one flat parameter, and so are its gradients, in the code of torch 2.13 (``torch/distributed/fsdp``). The estimate
is for rank 0, whose shard is never the smaller one.

Left out: one rank alone, where FSDP1 shards nothing; parameters in host memory; buffers of the process group itself.
"""

from collections.abc import Iterator

from zeroplan.engines.account import Account, Symbol
from zeroplan.engines.activations_away import note
from zeroplan.engines.frozen import ROUTED
from zeroplan.engines.fsdp1 import step
from zeroplan.engines.fsdp1.flat import FlatPlan, flat_plan, frozen_units
from zeroplan.engines.fsdp1.traffic import collectives
from zeroplan.engines.fsdp2 import activations_away, in_host_memory, symbols_of
from zeroplan.engines.optimizers import counted, step_temporary_lines
from zeroplan.ledger import Line, Role, Tag
from zeroplan.spec.batch import Batch
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec


def account(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Account:
    """Memory of rank 0 and traffic per step under FSDP1, stage 2 (SHARD_GRAD_OP) or 3 (FULL_SHARD). [bytes]

    Source: the files named in each line; verified against real runs on fake tensors with a fake process group.
    """
    plan = flat_plan(model, recipe, mesh, batch)
    states = (*plan.persistent, _gradients(plan))
    updated = "U" if recipe.fsdp1.use_orig_params else f"{plan.trained_symbol}/N"
    temporaries = step_temporary_lines(recipe.optimizer, plan.impl, plan.local_tensors, plan.width.stored, symbol=updated)
    activations = activations_away(plan)
    return Account(
        states=states,
        moments=step.moments(plan, (*states, *temporaries)),
        collectives=collectives(plan, mesh, batch),
        host=in_host_memory(plan, activations),
        symbols=(*symbols_of(plan, model, activations), *_of_frozen(plan), *counted(*plan.persistent, *temporaries)),
        notes=tuple(_notes(plan, model)),
        kept=tuple(
            (run.name, one.kept(again)) for run, one, again in zip(plan.runs, plan.passes, plan.recomputes, strict=True)
        ),
    )


def _gradients(plan: FlatPlan) -> Line:
    """This rank's shard of the gradients, which ``zero_grad`` does not free where it clears views alone.

    Source: torch 2.13, _flat_param.py, ``FlatParamHandle._reset_flat_param_grad_info_if_needed``, in the root's next forward.
    """
    line = plan.gradient_shards(plan.every_layer, "after backward", plan.trained_outside)
    return line._replace(tag=Tag(Role.UNTIL_NEXT_STEP)) if plan.options.use_orig_params else line


def _of_frozen(plan: FlatPlan) -> Iterator[Symbol]:
    for group in frozen_units(plan) if plan.is_partly_frozen else ():
        yield Symbol(f"P_{group.symbol}", group.padded, f"padded parameters of the frozen unit, {group.symbol}")


def _notes(plan: FlatPlan, model: ModelSpec) -> Iterator[str]:
    if plan.recipe.offload_activations:
        yield note(plan.recipe.recompute)
    if model.adapter is not None and model.moe is not None:
        yield ROUTED
    copied = plan.is_partly_frozen and plan.width.mixed and not model.is_quantised
    if copied and not plan.options.use_orig_params:
        yield "copies of the adapters' inputs are counted, which FSDP1 takes in the first step alone; later steps take less"
