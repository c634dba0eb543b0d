"""The memory and traffic of the ZeRO paper's idealised formulas.

Rajbhandari et al. 2020 (arXiv:1910.02054), sections 3 and 5: mixed-precision Adam holds 2Ψ of parameters, 2Ψ of gradients and
12Ψ of optimizer state (fp32 master copy, momentum, variance). Stage 1 divides the optimizer state by N_d, stage 2 also the
gradients, stage 3 also the parameters. Tensor parallelism divides everything by its degree. Activations and the loss come on
top. Leaves out buffers, padding beyond whole elements, and the optimizer's temporaries.
"""

from functools import lru_cache

from zeroplan.engines.account import Account, Symbol
from zeroplan.engines.formulas import kept_by
from zeroplan.engines.optimizers import counted, state_lines, whole_tensors
from zeroplan.engines.outside import outside
from zeroplan.engines.precisions import compute_of, widths
from zeroplan.engines.sources import KEPT
from zeroplan.ledger import Collective, Kind, Line, Moment, Phase, total_bytes
from zeroplan.numeric import Int, ceil_div, weighted, where
from zeroplan.spec.batch import Batch
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.transformer.activations import block_pass
from zeroplan.transformer.parameters import BlockRun
from zeroplan.transformer.params import layout, parameter_count, runs_in_order
from zeroplan.transformer.published import KORTHIKANTI, megatron_layer_lines

_STATES = "arXiv:1910.02054, sections 3.1 and 5"
_VOLUME = "arXiv:1910.02054, section 7"
_KEEPS = "bytes one {} block keeps from its forward to its backward"

Lines = tuple[Line, ...]


def account(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Account:
    """Return memory and traffic of every rank by the paper's formulas.

    Source: Rajbhandari et al. 2020, arXiv:1910.02054, sections 3, 5 and 7.
    """
    whole = state_lines(recipe.optimizer, "foreach", whole_tensors(layout(model)), widths(recipe.precision).stored, symbol="Ψ")
    states = _states(model, recipe, mesh, whole)
    kept = tuple((run, _kept(model, run.kind, recipe, mesh, batch)) for run in layout(model).runs)
    return Account(
        states,
        _moments(model, recipe, batch, states, kept),
        _collectives(model, recipe, mesh, batch),
        symbols=(
            Symbol("Ψ", parameter_count(model), "parameters"),
            Symbol("N", mesh.dp_shard, "ranks that share what the stage shards"),
            Symbol("p", mesh.tp, "tensor-parallel ranks"),
            *(Symbol(f"S_{run.kind}", total_bytes(lines), _KEEPS.format(run.kind)) for run, lines in kept),
            *counted(*whole),
        ),
        kept=tuple((run.kind, lines) for run, lines in kept),
    )


def _states(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, whole: tuple[Line, ...]) -> tuple[Line, ...]:
    width, local = widths(recipe.precision), ceil_div(parameter_count(model), mesh.tp)
    parameters, gradients, updated = (_sharded(local, recipe, mesh, from_stage=stage) for stage in (3, 2, 1))
    lines = [
        Line(
            Kind.PARAMETERS, width.compute * parameters, f"{width.name} parameters", _formula(width.compute, recipe, 3), _STATES
        ),
        Line(Kind.GRADIENTS, width.compute * gradients, f"{width.name} gradients", _formula(width.compute, recipe, 2), _STATES),
    ]
    if width.mixed:
        master = width.stored * updated
        lines.append(
            Line(Kind.OPTIMIZER_STATE, master, "fp32 copy of the parameters", _formula(width.stored, recipe, 1), _STATES)
        )
    return (*lines, *(_divided(line, recipe, mesh) for line in whole))


def _divided(line: Line, recipe: RecipeSpec, mesh: Mesh) -> Line:
    n_bytes = _sharded(ceil_div(line.n_bytes, mesh.tp), recipe, mesh, from_stage=1)
    split = f"ceil(({line.formula})/p)"
    formula = f"ceil({split}/N)" if recipe.zero_stage >= 1 else split
    return line._replace(n_bytes=n_bytes, formula=formula)


def _sharded(elements: Int, recipe: RecipeSpec, mesh: Mesh, *, from_stage: int) -> Int:
    return ceil_div(elements, mesh.dp_shard) if recipe.zero_stage >= from_stage else elements


def _formula(width: int, recipe: RecipeSpec, from_stage: int) -> str:
    return f"{width}·ceil(ceil(Ψ/p)/N)" if recipe.zero_stage >= from_stage else f"{width}·ceil(Ψ/p)"


def _moments(
    model: ModelSpec, recipe: RecipeSpec, batch: Batch, states: tuple[Line, ...], kept: tuple[tuple[BlockRun, Lines], ...]
) -> tuple[Moment, ...]:
    compute = compute_of(recipe)
    head = outside(model, recipe, batch)
    alive = (*states, _activations(recipe, kept))
    moments = [
        Moment("loss, forward", Phase.LOSS, (*alive, *head.shared, *head.saved, *head.loss_forward), of_forward=True),
        Moment("loss, backward", Phase.LOSS, (*alive, *head.shared, *head.points[0].lines)),
        Moment("optimizer step", Phase.STEP, states),
    ]
    if recipe.recompute != "none" and recipe.activation_model == "module":
        for at, below in _last_of_each_kind(model):
            kind = kept[at][0].kind
            last = block_pass(model, kind, compute, batch)
            before = (*states, _activations(recipe, kept, below), *head.shared)
            name = _LAST if at == len(kept) - 1 else f"backward of the last {kind} block, recomputed"
            moments.insert(-1, Moment(name, Phase.BACKWARD, (*before, *last.checkpoint_in_backward, *last.saved)))
    return tuple(moments)


_LAST = "backward of the last block, recomputed"


@lru_cache(maxsize=256)
def _last_of_each_kind(model: ModelSpec) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return, last run first, the number of blocks of every run below the run's last block, where most activations are kept."""
    order, runs = runs_in_order(model), range(len(layout(model).runs))
    last = {run: at for at, run in enumerate(order)}
    return tuple((run, tuple(order[: last[run]].count(one) for one in runs)) for run in reversed(runs))


def _activations(recipe: RecipeSpec, kept: tuple[tuple[BlockRun, Lines], ...], layers: tuple[int, ...] | None = None) -> Line:
    """Return the activations that this many blocks of each run keep; by default all blocks."""
    layers = layers or tuple(run.layers for run, _ in kept)
    n_bytes = weighted(layers, [total_bytes(lines) for _, lines in kept])
    formula, tag = kept_by(layers, tuple(run.kind for run, _ in kept))
    source = KORTHIKANTI if recipe.activation_model == "megatron" else KEPT[recipe.recompute]
    return Line(Kind.ACTIVATIONS, n_bytes, "tensors that the blocks keep from forward to backward", formula, source, tag)


def _kept(model: ModelSpec, kind: str, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> tuple[Line, ...]:
    if recipe.activation_model == "megatron":
        return megatron_layer_lines(model, mesh, batch, sequence_parallel=recipe.sequence_parallel, recompute=recipe.recompute)
    return block_pass(model, kind, compute_of(recipe), batch).kept(recipe.recompute)


def _collectives(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> tuple[Collective, ...]:
    """Return the traffic of section 7: 2Ψ up to stage 2, 3Ψ at stage 3; a ring sends (N-1)/N of each pass."""
    elements = ceil_div(parameter_count(model), mesh.tp)
    passes = batch.grad_accum_steps if recipe.sync_every_micro_batch else 1
    if recipe.zero_stage == 0:
        return (_call("all_reduce", "gradients", Phase.BACKWARD, 2, passes, elements, recipe, mesh),)
    reduce = _call("reduce_scatter", "gradients", Phase.BACKWARD, 1, passes, elements, recipe, mesh)
    if recipe.zero_stage < 3:
        return (reduce, _call("all_gather", "updated parameters", Phase.STEP, 1, 1, elements, recipe, mesh))
    forward = _call("all_gather", "parameters", Phase.FORWARD, 1, batch.grad_accum_steps, elements, recipe, mesh)
    backward = _call("all_gather", "parameters", Phase.BACKWARD, 1, batch.grad_accum_steps, elements, recipe, mesh)
    return (forward, backward, reduce)


def _call(
    operation: str, what: str, phase: Phase, ring_passes: int, calls: Int, elements: Int, recipe: RecipeSpec, mesh: Mesh
) -> Collective:  # fmt: skip
    ranks = mesh.dp_shard * mesh.dp_replicate
    width = widths(recipe.precision).compute
    sent = calls * ring_passes * width * ceil_div(elements, ranks) * (ranks - 1)
    volume = where(ranks > 1, calls * ring_passes * elements, 0)
    when = "after the step" if phase is Phase.STEP else phase.value
    return Collective(operation, what, when, ranks, calls, width * elements, sent, volume, _VOLUME, phase=phase)
