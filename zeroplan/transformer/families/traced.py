"""From a block's program to what it costs: the program runs once per structure, its formulas once per batch."""

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from zeroplan.ledger import Kind, Line, total_bytes
from zeroplan.numeric import Int, maximum
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.blocks import BackwardPoint, BlockPass
from zeroplan.transformer.families.attention import EAGER
from zeroplan.transformer.families.llama import ATTENTION_EXCESS
from zeroplan.transformer.families.operators import Attention, eager, flash
from zeroplan.transformer.families.phi3 import phi3
from zeroplan.transformer.families.sizes import quantities, worked_out
from zeroplan.transformer.families.tape import Alive, Store, Tape, Value
from zeroplan.transformer.families.widths import Widths

Program = Callable[..., Value]
PROGRAMS: dict[str, Program] = {"phi3": phi3}
LAYERS = {"phi3": "transformers 5.23, models/phi3/modeling_phi3.py, Phi3DecoderLayer.forward"}


class Structure(NamedTuple):
    """Everything a program branches on."""

    family: str
    wide: bool
    autocast: bool
    eager: bool
    grouped: bool
    one_key: bool


class Plan(NamedTuple):
    """What a structure's runs came to: who is alive when, with formulas for sizes."""

    saved: tuple[Store, ...]
    given: Store
    forward: tuple[Alive, ...]
    recompute: tuple[Alive, ...]
    points: tuple[Alive, ...]
    casts: tuple[str, ...]
    products: tuple[Store, ...]


def traced_block(model: ModelSpec, x: Widths) -> BlockPass:
    """One block of a family that is written as a program."""
    structure = Structure(
        model.family,
        x.element == 4,  # noqa: PLR2004  bytes
        x.autocast,
        x.attention == "eager",
        x.key != x.query,
        x.key == x.head_dim,
    )
    return _worked_out(_plan(structure), quantities(x, model.intermediate_size), autocast=x.autocast)


@lru_cache(maxsize=256)
def _plan(structure: Structure) -> Plan:
    saving, given = _run(structure, saving=True)
    forward = _highest(saving.moments)
    saved, casts = tuple(saving.saved), tuple(saving.casts)
    output = next(iter(saving.operators[-1].outputs))
    saving.release(output, given)
    source = LAYERS[structure.family]
    saving.run_backward(output, Store(Kind.ACTIVATIONS, "gradient of the residual stream", f"r·{output.shape}", source))
    recompute, _ = _run(structure, saving=False)
    return Plan(saved, given.store, forward, _highest(recompute.moments), _highest(saving.moments), casts, tuple(saving.products))


def _run(structure: Structure, *, saving: bool) -> tuple[Tape, Value]:
    tape = Tape(wide=structure.wide, autocast=structure.autocast, saving=saving)
    given = Value(tape.make(Kind.ACTIVATIONS, "block input", "r·T·h", LAYERS[structure.family]), "r", "T·h")
    attend: Attention = eager if structure.eager else flash
    PROGRAMS[structure.family](tape, given, attend, grouped=structure.grouped, one_key=structure.one_key)
    return tape, given


def _highest(moments: list[Alive]) -> tuple[Alive, ...]:
    """Leave out moments at which no more is alive than at another, formula by formula."""
    counts = [_count(moment) for moment in moments]
    kept: list[int] = []
    for at, count in enumerate(counts):
        later = (other for place, other in enumerate(counts) if place != at and (place > at or other != count))
        if not any(count <= other for other in later):
            kept.append(at)
    return tuple(moments[at] for at in kept)


def _count(moment: Alive) -> Counter[str]:
    count = Counter(store.formula for store in moment.stores)
    for mark, formulas in (("W", moment.gradients), ("G", moment.current), ("C", moment.casts)):
        count.update(mark + formula for formula in formulas)
    return count


def _worked_out(plan: Plan, values: dict[str, Int], *, autocast: bool) -> BlockPass:
    lines: dict[Store, Line] = {}

    def line(store: Store) -> Line:
        found = lines.get(store)
        if found is None:
            found = lines[store] = Line(store.kind, worked_out(store.formula, values), store.reason, store.formula, store.source)
        return found

    def elements(formulas: tuple[str, ...]) -> int:
        total = 0
        for formula in formulas:
            total += worked_out(formula, values)
        return total

    def top(moments: tuple[Alive, ...], kept: frozenset[Store]) -> tuple[Line, ...]:
        """The last moment's tensors beyond those kept, and by how much an earlier one is above."""
        everything = elements(plan.casts)
        last = tuple(line(store) for store in moments[-1].stores if store not in kept)
        at_end = total_bytes(last)
        for store in kept:
            at_end = at_end + line(store).n_bytes
        sums = [
            total_bytes(tuple(line(store) for store in moment.stores))
            - (values["e"] * (everything - elements(moment.casts)) if autocast else 0)
            for moment in moments
        ]
        above = maximum(0, *(total - at_end for total in sums))
        return (*last, Line(Kind.TEMPORARY, above, ATTENTION_EXCESS, source=EAGER))

    saved = tuple(line(store) for store in plan.saved)
    is_saved = plan.given in plan.saved
    block_input = line(plan.given)
    points = tuple(
        BackwardPoint(
            point.name,
            tuple(line(store) for store in point.stores),
            elements(point.gradients),
            elements(point.current),
            elements(point.casts),
        )
        for point in plan.points
    )
    return BlockPass(
        saved,
        (block_input,),
        (block_input,),
        top(plan.forward, frozenset(plan.saved)),
        top(plan.recompute, frozenset((plan.recompute[-1].stores[0],))),
        points,
        elements(plan.casts),
        () if is_saved else (block_input,),
    )
