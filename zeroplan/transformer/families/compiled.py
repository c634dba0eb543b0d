"""The operators of a block that ``torch.compile`` compiles by itself: what its graphs keep, and at most hold in the backward.

Inductor fuses pointwise operators and sums into few kernels, so that no fp32 tensor of a norm, rotary position or activation is
written. Its partitioner keeps what matrix products and attention read and return. Which kernels the backward fuses, and in which
order they run, depends on the sizes. So the backward here is a bound: what a norm's kernels read lives until the block ends.

Source: torch 2.13, ``_functorch/partitioners.py`` (``min_cut_rematerialization_partition``) and ``_inductor/scheduler.py``.
"""

from zeroplan.expr import Size, ceil
from zeroplan.transformer.families.operators import TENSOR, gradient, tensor, through
from zeroplan.transformer.families.tape import Arriving, Mode, Site, Store, Tape, Value

COMPILED = "torch 2.13, _functorch/partitioners.py and _inductor/scheduler.py"
_ROWS = 128
"""Rows that one part of a norm's weight gradient sums up, in fp32."""


def norm(tape: Tape, value: Value, weight: Size, rows: Size, site: Site) -> Value:
    """Run an RMSNorm as one kernel. It saves its input and a number per row."""
    made = tensor(tape, f"output of the {site.name}", value.dtype, value.shape, COMPILED)
    root = tape.make(TENSOR, f"{site.name}: reciprocal root mean square", 4 * rows, COMPILED)
    tape.in_parts.add(made)

    def backward(tape: Tape, taken: list[Store]) -> Arriving:
        tape.hold_to_the_end(taken[0], value.store)
        tape.temporary(f"{site.name}: partial sums of its weight's gradient", 4 * ceil(rows, _ROWS) * weight, COMPILED)
        tape.weight_gradient(weight)
        return [(value, gradient(tape, value, f"gradient through the {site.name}", COMPILED))]

    tape.add(site.name, (made,), (value, root), backward, of=None, place=site.place)
    tape.drop(root)
    return made


def rotary(tape: Tape, value: Value, site: Site) -> Value:
    """Rotate queries or keys in one kernel, which saves nothing. ``value`` stays."""
    made = tensor(tape, site.name, value.dtype, value.shape, COMPILED)

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        return [(value, gradient(tape, value, f"gradient of the {site.name}", COMPILED))]

    tape.add(f"rotary positions of the {site.name}", (made,), (), backward, of=(value,))
    return made


def gated(tape: Tape, gate: Value, up: Value, reason: str, name: str) -> Value:
    """``act(gate) * up`` in one kernel. It saves both. The backward writes one gradient over ``up``, and the other anew.

    In a block that is recomputed, one kernel makes the product and both gradients, each anew.
    """
    made = _over_a_factor(tape, gate, up) or tensor(tape, reason, gate.dtype, gate.shape, COMPILED)

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        of_gate = gradient(tape, gate, f"gradient of the gate of the {reason}", COMPILED)
        if not tape.recomputed:
            return [(gate, of_gate), through(up, up.store)]
        tape.temporary(f"{reason}, recomputed", gate.dtype * gate.shape, COMPILED)
        return [(gate, of_gate), (up, gradient(tape, up, f"gradient of the other factor of the {reason}", COMPILED))]

    tape.add(name, (made,), (gate, up), backward, of=(gate, up))
    return made


def _over_a_factor(tape: Tape, gate: Value, up: Value) -> Value | None:
    """Return the product where it overwrites a factor: in the forward of a graph that contains its checkpoint, which keeps one."""
    if tape.demand is None or tape.saving:
        return None
    factor = gate if tape.selected.keeps and up.store in tape.selected.stores() else up
    return Value(tape.hold(factor.store), factor.dtype, factor.shape)


COMPILED_BLOCK = Mode(norm=norm, rotary=rotary, gate=gated)
