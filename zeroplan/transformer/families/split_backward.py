"""Backward in two halves, first input gradients and then weight gradients, for a block and for the layers after the blocks.

``torch.distributed.pipelining`` splits backwards this way under zero-bubble schedules (torch 2.13, ``_backward.py``). The first
half frees no saved tensor, and keeps the output gradients of operators with weights. The second half makes the weight gradients
in the order of ``parameters()``, from the first block to the last. After each weight it frees the output gradient and the
operator's saved tensors; after the last weight it frees the rest.

The programs are those of an ordinary backward (``tape.py``). Leaves out recomputation, and weights that autograd reaches
through other operators: routers and experts under autocast, sinks.
"""

from functools import lru_cache
from typing import NamedTuple

from zeroplan.expr import Values
from zeroplan.ledger import Line
from zeroplan.numeric import Int
from zeroplan.spec.batch import Batch
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.blocks import Compute
from zeroplan.transformer.families.definition import Block, definition_of
from zeroplan.transformer.families.ending import Ending, ending_of, ran_to_the_loss
from zeroplan.transformer.families.highest import highest
from zeroplan.transformer.families.tape import Store, Tape, Value
from zeroplan.transformer.families.traced import (
    Plan,
    Sizes,
    Stores,
    incoming_of,
    numbered,
    of_a_rank,
    run_forward,
    structure_of,
)
from zeroplan.transformer.families.widths import is_masked, values_of, widths
from zeroplan.transformer.parameters import BlockRun, Parameter

SPLIT_BACKWARD = "torch 2.13, torch/distributed/pipelining/_backward.py, stage_backward_input and stage_backward_weight"


class Point(NamedTuple):
    """A point of the first half where memory can peak: the live tensors beyond those that the forward saved."""

    name: str
    lines: tuple[Line, ...]


class Weights(NamedTuple):
    """Weights whose gradients the second half makes together."""

    name: str
    numel: int
    beside: tuple[Line, ...]
    """Temporaries alive while these gradients are made."""
    freed: Int
    """Bytes freed afterwards: the output gradient and the operator's saved tensors."""


class SplitBackward(NamedTuple):
    """The two halves of the backward of one block, or of the layers after the blocks."""

    held: Int
    """Bytes of gradients that live from the first half to the second, including the gradient of the input."""
    points: tuple[Point, ...]
    """Moments of the first half, in order."""
    weights: tuple[Weights, ...]
    """Weights of the second half, in order."""


class _Planned(NamedTuple):
    """The plan of a structure. ``weights``: each operator's name, its temporaries, and the tensors freed after it."""

    plan: Plan
    held: Stores
    weights: tuple[tuple[str, Stores, Stores], ...]


def why_not(model: ModelSpec, compute: Compute) -> tuple[str, str] | None:
    """Return what two-half backwards do not cover in a job, and what to use instead; None if they cover it."""
    for unmodelled, instead in (
        (model.moe is not None and "experts", "a dense model"),
        (
            compute.recompute != "none" and f"recompute {compute.recompute!r} (which would run for each weight)",
            "recompute none",
        ),
    ):
        if unmodelled:
            return unmodelled, instead
    return None


def split_block(model: ModelSpec, run: BlockRun, compute: Compute, batch: Batch) -> SplitBackward:
    """Return the two halves of one block in a run of dense blocks."""
    x = widths(model, compute, batch)
    planned = _plan_of(*structure_and_order(model, run, compute, batch))
    numel = tuple(_modules(run.parameters).values())
    return _split_backward(planned, values_of(model, x, compute.tp if planned.plan.split else 1), numel)


def structure_and_order(model: ModelSpec, run: BlockRun, compute: Compute, batch: Batch) -> tuple[Block, tuple[int, ...]]:
    """Return a block's structure, and the forward position of each module in the order of the second half."""
    x = widths(model, compute, batch)
    structure = structure_of(model, run.kind, compute, x, masked=_for_all(is_masked(model, x, run.kind)))
    modules = _modules(run.parameters)
    as_run = [name for name in definition_of(structure.family).modules if name in modules]
    return structure, tuple([as_run.index(name) for name in modules])


def split_ending(model: ModelSpec, tail: tuple[Parameter, ...], compute: Compute, batch: Batch) -> SplitBackward:
    """Return the two halves of final norm, head and loss, whose parameters are ``tail``."""
    x = widths(model, compute, batch)
    modules = _modules(tail)
    planned = _plan_of(ending_of(model, compute, x, "full"), tuple(range(len(modules))))
    return _split_backward(planned, values_of(model, x, compute.tp if planned.plan.split else 1), tuple(modules.values()))


def _modules(parameters: tuple[Parameter, ...]) -> dict[str, int]:
    """Return the elements of every module, in the order of ``parameters()``. A weight and its bias get their gradients together."""
    numel: dict[str, int] = {}
    for one in parameters:
        name = one.name.rpartition(".")[0]
        numel[name] = numel.get(name, 0) + one.numel
    return numel


def _for_all(found: object) -> bool:
    """Whether something holds for every batch. No search mixes lengths for which it holds with lengths for which it does not."""
    return bool(found.all()) if hasattr(found, "all") else bool(found)


def _split_backward(planned: _Planned, values: Values, numel: tuple[int, ...]) -> SplitBackward:
    sizes = Sizes(planned.plan, values)
    points = tuple([Point(one.name, sizes.lines(one.stores)) for one in planned.plan.points])
    weights = tuple(
        [
            Weights(name, elements, sizes.lines(beside), sizes.total(freed))
            for elements, (name, beside, freed) in zip(numel, planned.weights, strict=True)
        ]
    )
    return SplitBackward(sizes.total(planned.held), points, weights)


@lru_cache(maxsize=256)
def _plan_of(structure: Block | Ending, order: tuple[int, ...]) -> _Planned:
    """Run a structure's program forward, backward to its input, and then through its weights in this ``order``."""
    tape, given, output, incoming = ran_program(structure)
    if isinstance(structure, Block):
        tape.release(output)
        tape.drop(given)
    kept = {*tape.saved, incoming}
    tape.run_to_inputs(output, incoming)
    moments = [one._replace(stores=tuple([store for store in one.stores if store not in kept])) for one in tape.moments]
    points = numbered(highest(moments, wide=structure.wide, autocast=False))
    held, left = tuple([store for store in tape.alive if store not in kept]), tape.deferred[::-1]
    weights = tuple([(left[at].operator.name, *tape.run_weights(left[at])) for at in order])
    others = (*held, *(store for _, *both in weights for some in both for store in some))
    plan = Plan(SPLIT_BACKWARD, {}, points, others=others)
    return _Planned(of_a_rank(plan, whole=False) if structure.sharded else plan, held, weights)


def ran_program(structure: Block | Ending) -> tuple[Tape, Store, Value, Store]:
    """Return a program's tape after its forward, its input, its output, and the output's gradient."""
    if isinstance(structure, Ending):
        tape, loss = ran_to_the_loss(structure)
        _, first = tape.history.actions[0]
        assert isinstance(first, Store)  # noqa: S101  the input is requested first
        return tape, first, loss, loss.store
    tape, given, output = run_forward(structure, saving=True)
    return tape, given.store, output, incoming_of(output, structure)
