"""From a block's program to what it costs: the program runs once per structure, its formulas once per batch."""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import NamedTuple

from zeroplan.ledger import Kind, Line, total_bytes
from zeroplan.numeric import Bool, Int, maximum, where
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.blocks import BackwardPoint, BlockPass
from zeroplan.transformer.families import bloom, gemma, gpt_neox, opt, phi3
from zeroplan.transformer.families.attend import Attention, capped_eager, eager, efficient, flash, in_32_bits_grouped, with_mask
from zeroplan.transformer.families.llama import ATTENTION_EXCESS
from zeroplan.transformer.families.program import Block
from zeroplan.transformer.families.sizes import quantities, worked_out
from zeroplan.transformer.families.tape import Alive, Store, Tape, Value
from zeroplan.transformer.families.widths import Widths


class Program(NamedTuple):
    """A family's block and final norm, and the source of what they are."""

    block: Callable[[Tape, Value, Block], Value]
    final: Callable[[Tape, Value], Value]
    source: str


PROGRAMS: dict[str, Program] = {
    "phi3": Program(phi3.phi3, phi3.final_norm, phi3.LAYER),
    "gpt_neox": Program(gpt_neox.gpt_neox, gpt_neox.final_norm, gpt_neox.LAYER),
    "opt": Program(opt.opt, opt.final_norm, opt.LAYER),
    "bloom": Program(bloom.bloom, bloom.final_norm, bloom.LAYER),
    "gemma2": Program(gemma.gemma, gemma.final_norm, gemma.LAYER),
    "gemma3_text": Program(gemma.gemma, gemma.final_norm, gemma.LAYER),
}


class Structure(NamedTuple):
    """Everything a program branches on."""

    family: str
    wide: bool
    autocast: bool
    attention: str
    masked: bool
    """``scaled_dot_product_attention`` is given a mask."""
    grouped: bool
    one_key: bool
    attention_bias: bool


class Plan(NamedTuple):
    """What a structure's runs came to: who is alive when, with formulas for sizes."""

    saved: tuple[Store, ...]
    given: Store
    forward: tuple[Alive, ...]
    recompute: tuple[Alive, ...]
    points: tuple[Alive, ...]
    casts: tuple[str, ...]
    selective: tuple[Store, ...]
    """What per-operation recomputation keeps: every second plain matrix product, and the outputs of attention's kernel."""
    family: str


def traced_block(model: ModelSpec, x: Widths, *, windowed: bool = False) -> BlockPass:
    """One block of a family that is written as a program; ``windowed`` says that it sees a sliding window only.

    A window shorter than the sequence, or as long, is a mask (transformers 5.23, masking_utils.py, _ignore_causal_mask_sdpa).
    """
    whole = _of(model, x, masked=False)
    if not windowed or model.sliding_window is None or x.attention != "sdpa":
        return whole
    if isinstance(x.seq_len, int):
        return _of(model, x, masked=True) if x.seq_len >= model.sliding_window else whole
    return _either(x.seq_len >= model.sliding_window, _of(model, x, masked=True), whole)


def _of(model: ModelSpec, x: Widths, *, masked: bool) -> BlockPass:
    structure = Structure(
        model.family,
        x.element == 4,
        x.autocast,
        x.attention,
        masked,
        x.key != x.query,
        x.key == x.head_dim,
        model.attention_bias,
    )
    return _worked_out(_plan(structure), Sizes(quantities(x, model.intermediate_size)), autocast=x.autocast)


def _either(condition: Bool, yes: BlockPass, no: BlockPass) -> BlockPass:
    """One pass for a column of batches, some of which are of one kind and some of the other: lines of both, those of one nought."""

    def lines(first: tuple[Line, ...], second: tuple[Line, ...]) -> tuple[Line, ...]:
        return (
            *(line._replace(n_bytes=where(condition, line.n_bytes, 0)) for line in first),
            *(line._replace(n_bytes=where(condition, 0, line.n_bytes)) for line in second),
        )

    return BlockPass(
        lines(yes.saved, no.saved),
        yes.checkpoint,
        lines(yes.selective, no.selective),
        lines(yes.forward, no.forward),
        lines(yes.forward_recompute, no.forward_recompute),
        (
            *(point._replace(lines=lines(point.lines, ())) for point in yes.points),
            *(point._replace(lines=lines((), point.lines)) for point in no.points),
        ),
        yes.cast_elements,
        yes.checkpoint_in_backward,
    )


class FinalNorm(NamedTuple):
    """What a norm outside the blocks saves, and the moments of its backward."""

    saved: tuple[Line, ...]
    points: tuple[BackwardPoint, ...]


def final_norm(model: ModelSpec, x: Widths) -> FinalNorm:
    """The final norm of a family that is written as a program; its gradients count the norm's own weight only."""
    wide = x.element == 4
    saved, moments = _final_plan(model.family, wide=wide, autocast=x.autocast)
    sizes = Sizes(quantities(x, model.intermediate_size))
    return FinalNorm(sizes.lines(saved), tuple(sizes.point(moment) for moment in moments))


@lru_cache(maxsize=64)
def _final_plan(family: str, *, wide: bool, autocast: bool) -> tuple[tuple[Store, ...], tuple[Alive, ...]]:
    tape = Tape(wide=wide, autocast=autocast, saving=True)
    source = PROGRAMS[family].source
    given = Value(tape.make(Kind.ACTIVATIONS, "final norm: its input", "r·T·h", source), "r", "T·h")
    made = PROGRAMS[family].final(tape, given)
    tape.release(made, given)
    saved = tuple(tape.saved)
    tape.run_backward(made, Store(Kind.ACTIVATIONS, "gradient of the final norm's output", "r·T·h", source))
    return saved, _highest(tape.moments)


@lru_cache(maxsize=256)
def _plan(structure: Structure) -> Plan:
    saving, given = _run(structure, saving=True)
    forward = _highest(saving.moments)
    saved, casts = tuple(saving.saved), tuple(saving.casts)
    output = next(iter(saving.operators[-1].outputs))
    saving.release(output, given)
    source = PROGRAMS[structure.family].source
    saving.run_backward(output, Store(Kind.ACTIVATIONS, "gradient of the residual stream", f"r·{output.shape}", source))
    recompute, _ = _run(structure, saving=False)
    selective = (*saving.products[::2], *saving.kernel_outputs)
    again, back = _highest(recompute.moments), _highest(saving.moments)
    return Plan(saved, given.store, forward, again, back, casts, selective, structure.family)


def _run(structure: Structure, *, saving: bool) -> tuple[Tape, Value]:
    program = PROGRAMS[structure.family]
    tape = Tape(wide=structure.wide, autocast=structure.autocast, saving=saving)
    given = Value(tape.make(Kind.ACTIVATIONS, "block input", "r·T·h", program.source), "r", "T·h")
    program.block(tape, given, _block(structure))
    return tape, given


def _block(structure: Structure) -> Block:
    head_norms = structure.family == "gemma3_text"
    return Block(_attention(structure), structure.grouped, structure.one_key, structure.attention_bias, head_norms)


def _attention(structure: Structure) -> Attention:
    """Which kernel ``scaled_dot_product_attention`` takes on CUDA (torch 2.13, sdp_utils.cpp), or attention written out."""
    if structure.attention == "eager":
        return capped_eager if structure.family == "gemma2" else eager
    if structure.attention == "flash":
        return flash
    if structure.masked:
        return with_mask
    if structure.wide:
        return in_32_bits_grouped if structure.grouped else efficient
    return flash


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


class Sizes:
    """Lines of tapes' stores for one batch, each made once."""

    def __init__(self, values: dict[str, Int]) -> None:
        """Take the value of every symbol."""
        self.values = values
        self._lines: dict[Store, Line] = {}

    def line(self, store: Store) -> Line:
        """Write a store as a line."""
        found = self._lines.get(store)
        if found is None:
            n_bytes = worked_out(store.formula, self.values)
            found = self._lines[store] = Line(store.kind, n_bytes, store.reason, store.formula, store.source)
        return found

    def lines(self, stores: Iterable[Store]) -> tuple[Line, ...]:
        """Write several."""
        return tuple(self.line(store) for store in stores)

    def elements(self, formulas: tuple[str, ...]) -> int:
        """Add up elements of weights, which do not depend on the batch."""
        return sum(int(worked_out(formula, self.values)) for formula in formulas)

    def point(self, moment: Alive) -> BackwardPoint:
        """Write a moment of the backward."""
        elements = self.elements
        return BackwardPoint(
            moment.name,
            self.lines(moment.stores),
            elements(moment.gradients),
            elements(moment.current),
            elements(moment.casts),
        )


def _worked_out(plan: Plan, sizes: Sizes, *, autocast: bool) -> BlockPass:
    (block_input,) = sizes.lines((plan.given,))
    selective = sizes.lines(plan.selective)
    return BlockPass(
        sizes.lines(plan.saved),
        (block_input,),
        (block_input, *selective),
        _top(sizes, plan, plan.forward, plan.saved, autocast=autocast),
        _top(sizes, plan, plan.recompute, (plan.given,), autocast=autocast),
        tuple(sizes.point(moment) for moment in plan.points),
        sizes.elements(plan.casts),
        () if plan.given in plan.saved else (block_input,),
    )


def _top(
    sizes: Sizes, plan: Plan, moments: tuple[Alive, ...], kept: tuple[Store, ...], *, autocast: bool
) -> tuple[Line, ...]:  # fmt: skip
    """List the last moment's tensors beyond those kept, and by how much an earlier moment is above it.

    Autocast has made fewer casts by an earlier moment, while an engine counts them all.
    """
    last = sizes.lines(store for store in moments[-1].stores if store not in kept)
    at_end = total_bytes(last) + total_bytes(sizes.lines(kept))
    width: Int = sizes.values["e"] if autocast else 0
    every = sizes.elements(plan.casts)
    above: Int = 0
    for moment in moments[:-1]:
        missing = width * (every - sizes.elements(moment.casts))
        above = maximum(above, total_bytes(sizes.lines(moment.stores)) - missing - at_end)
    return (*last, Line(Kind.TEMPORARY, above, ATTENTION_EXCESS, source=PROGRAMS[plan.family].source))
