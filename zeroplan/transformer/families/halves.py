"""A backward in two halves, gradients of inputs first and those of weights later: of a block, and of what follows the blocks.

``torch.distributed.pipelining`` splits it so under zero-bubble schedules (torch 2.13, ``_backward.py``). The first half frees
nothing, since the graph is still needed, and the gradients that meet an operator with a weight stay for the second half. That
goes through the weights in the order of ``parameters()``, from the first block to the last, and lets go of the gradients, and
of what the operator saved, when the weight's own gradient is made; what else the graph saved goes when the last weight is done.

The programs are those of a backward in one go (``tape.py``). Left out: weights that operators of their own lead to (routers
and experts under autocast, sinks), recomputation.
"""

from functools import lru_cache
from typing import NamedTuple

from zeroplan.expr import Values
from zeroplan.ledger import Kind, Line
from zeroplan.numeric import Int
from zeroplan.spec.batch import Batch
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.blocks import Compute
from zeroplan.transformer.families.definition import definition_of
from zeroplan.transformer.families.ending import Ending, ending_of, ran_forward
from zeroplan.transformer.families.highest import highest
from zeroplan.transformer.families.parts import INCOMING
from zeroplan.transformer.families.program import Block
from zeroplan.transformer.families.tape import Store, Tape, Value
from zeroplan.transformer.families.traced import Index, Places, Plan, Sizes, of_a_rank, program_of, run_forward, structure_of
from zeroplan.transformer.families.widths import beyond_the_window, values_of, widths
from zeroplan.transformer.parameters import BlockRun, Parameter
from zeroplan.transformer.symbols import r

SPLIT_BACKWARD = "torch 2.13, torch/distributed/pipelining/_backward.py, stage_backward_input and stage_backward_weight"


class Point(NamedTuple):
    """A moment of the first half where memory can be highest: what is alive that the forward has not left."""

    name: str
    lines: tuple[Line, ...]


class Weights(NamedTuple):
    """Weights whose gradients are made together in the second half."""

    name: str
    numel: int
    beside: tuple[Line, ...]
    """What making them takes beside them."""
    freed: Int
    """What goes when they are made: gradients that waited, and what their operator saved. [bytes]"""


class Halves(NamedTuple):
    """One block, or what stands behind the blocks, in a backward of two halves."""

    held: Int
    """Gradients that stay from the first half to the second, the one that flows out among them. [bytes]"""
    points: tuple[Point, ...]
    """Of the first half, in its order."""
    weights: tuple[Weights, ...]
    """Of the second, in its order."""


class _Planned(NamedTuple):
    """What a structure came to. ``weights``: for each operator with weights its name, what is there beside, and what goes."""

    plan: Plan
    is_sharded: bool
    held: Places
    weights: tuple[tuple[str, Places, Places], ...]


def why_not(model: ModelSpec, compute: Compute) -> tuple[str, str] | None:
    """What of a job is not told here, and what to use instead; ``None`` where everything is."""
    for untold, instead in (
        (model.moe is not None and "experts", "a dense model"),
        (
            compute.recompute != "none" and f"recompute {compute.recompute!r} (which would run for each weight)",
            "recompute none",
        ),
    ):
        if untold:
            return untold, instead
    return None


def block_halves(model: ModelSpec, run: BlockRun, compute: Compute, batch: Batch) -> Halves:
    """One block of a run of dense ones."""
    x = widths(model, compute, batch)
    planned = _plan_of(*structure_and_order(model, run, compute, batch))
    numel = tuple(_modules(run.parameters).values())
    return _halves(planned, values_of(model, x, compute.tp if planned.is_sharded else 1), numel)


def structure_and_order(model: ModelSpec, run: BlockRun, compute: Compute, batch: Batch) -> tuple[Block, tuple[int, ...]]:
    """A block's structure, and its modules with weights in the order of the second half: their places as they run forward."""
    x = widths(model, compute, batch)
    is_masked = run.kind != "global" and _always(beyond_the_window(model, x))
    structure = structure_of(model, run.kind, compute, x, masked=is_masked)
    modules = _modules(run.parameters)
    as_run = [name for name in definition_of(structure.family).modules if name in modules]
    return structure, tuple([as_run.index(name) for name in modules])


def head_halves(model: ModelSpec, tail: tuple[Parameter, ...], compute: Compute, batch: Batch) -> Halves:
    """Final norm, head and loss, with the parameters of the first two."""
    x = widths(model, compute, batch)
    modules = _modules(tail)
    planned = _plan_of(ending_of(model, compute, x, "full"), tuple(range(len(modules))))
    return _halves(planned, values_of(model, x, compute.tp if planned.is_sharded else 1), tuple(modules.values()))


def _modules(parameters: tuple[Parameter, ...]) -> dict[str, int]:
    """The elements of every module, in the order of ``parameters()``; a weight and its bias get their gradients together."""
    numel: dict[str, int] = {}
    for one in parameters:
        name = one.name.rpartition(".")[0]
        numel[name] = numel.get(name, 0) + one.numel
    return numel


def _always(found: object) -> bool:
    """Whether something holds for all batches; no search has columns of lengths of which it holds for some."""
    return bool(found.all()) if hasattr(found, "all") else bool(found)


def _halves(planned: _Planned, values: Values, numel: tuple[int, ...]) -> Halves:
    sizes = Sizes(planned.plan, values)
    points = tuple([Point(one.name, sizes.lines(one.stores)) for one in planned.plan.points])
    weights = tuple(
        [
            Weights(name, elements, sizes.lines(beside), sizes.total(freed))
            for elements, (name, beside, freed) in zip(numel, planned.weights, strict=True)
        ]
    )
    return Halves(sizes.total(planned.held), points, weights)


@lru_cache(maxsize=256)
def _plan_of(structure: Block | Ending, order: tuple[int, ...]) -> _Planned:
    """Run the program of a structure forward, backward to its input, and through its weights, the ``order`` of which is given."""
    tape, output, incoming = _forward(structure)
    index, kept = Index(), {*tape.saved, incoming}
    tape.run_to_inputs(output, incoming)
    moments = [one._replace(stores=tuple([store for store in one.stores if store not in kept])) for one in tape.moments]
    wide = structure.wide
    points = index.moments(highest(moments, wide=wide, autocast=False, scratch_apart=True))
    held = index.of([store for store in tape.alive if store not in kept])
    left = tape.left[::-1]
    made = [(left[at].operator.name, tape.run_weights(left[at])) for at in order]
    weights = tuple([(name, index.of(beside), index.of(freed)) for name, (beside, freed) in made])
    plan = Plan(tuple(index.stores), (), {}, points, (), (), (), (), SPLIT_BACKWARD, {})
    return _Planned(of_a_rank(plan) if structure.sharded else plan, structure.sharded, held, weights)


def _forward(structure: Block | Ending) -> tuple[Tape, Value, Store]:
    """A program that has run: its tape, what it returns, and the gradient of that."""
    if isinstance(structure, Ending):
        tape, loss = ran_forward(structure)
        return tape, loss, loss.store
    tape, given, output = run_forward(structure, saving=True)
    tape.release(output, given)
    source = program_of(structure.family).source
    return tape, output, Store(Kind.ACTIVATION_GRADIENTS, "gradient of the residual stream", r * output.shape, source, INCOMING)
