"""The operators of a block that ``torch.compile`` compiles by itself: what its graphs keep, and at most hold in the backward.

Inductor fuses pointwise operators and sums into few kernels, so that no fp32 tensor of a norm, rotary position or activation is
written. Its partitioner keeps what matrix products and attention read and return. Which kernels the backward fuses, and in which
order they run, depends on the sizes. So the backward here is a bound: what a norm's kernels read lives until the block ends.

Source: torch 2.13, ``_functorch/partitioners.py`` (``min_cut_rematerialization_partition``) and ``_inductor/scheduler.py``.
"""

from functools import partial

from zeroplan.expr import Size, ceil
from zeroplan.ledger import Kind, Module, Role, Tag
from zeroplan.transformer.families.float8 import FOUR_BITS, in_blocks
from zeroplan.transformer.families.operators import (
    TEMPORARY,
    TENSOR,
    gradient,
    in_turn,
    makes,
    makes_weight_gradient,
    needs,
    run,
    tensor,
    through,
)
from zeroplan.transformer.families.tape import Arriving, Mode, Site, Store, Tape, Value
from zeroplan.transformer.symbols import T, c, e, f, h

COMPILED = "torch 2.13, _functorch/partitioners.py and _inductor/scheduler.py"
FLOAT8 = "torchao 0.18, float8/float8_linear.py, as torch 2.13's compiler runs it"
_ROWS = 128
"""Rows that one part of a norm's weight gradient sums up, in fp32."""


def norm(tape: Tape, value: Value, weight: Size, rows: Size, site: Site) -> Value:
    """Run an RMSNorm as one kernel. It saves its input and a number per row."""
    made = tensor(tape, f"output of the {site.name}", value.dtype, value.shape, COMPILED)
    root = tape.make(TENSOR, f"{site.name}: reciprocal root mean square", 4 * rows, COMPILED)
    tape.in_parts.add(made)

    def backward(tape: Tape, grad_outputs: list[Store]) -> Arriving:
        tape.hold_to_the_end(grad_outputs[0], value.store)
        tape.temporary(f"{site.name}: partial sums of its weight's gradient", 4 * ceil(rows, _ROWS) * weight, COMPILED)
        tape.weight_gradient(weight)
        return [(value, gradient(tape, value, f"gradient through the {site.name}", COMPILED))]

    tape.add(site.name, (made,), (value, root), backward, of=None, place=site.place)
    tape.drop(root)
    return made


def rotary(tape: Tape, value: Value, site: Site) -> Value:
    """Rotate queries or keys in one kernel, which saves nothing. ``value`` stays."""
    return run(tape, value, site.name, COMPILED, gradient=f"gradient of the {site.name}")


def gated(tape: Tape, gate: Value, up: Value, reason: str) -> Value:
    """``act(gate) * up`` in one kernel. It saves both. The backward writes one gradient over ``up``, and the other anew.

    In a block that is recomputed, one kernel makes the product and both gradients, each anew.
    """
    made = _over_a_factor(tape, gate, up) or tensor(tape, reason, gate.dtype, gate.shape, COMPILED)

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        of_gate = gradient(tape, gate, f"gradient of the gate of the {reason}", COMPILED)
        if not tape.recomputed:
            return [(gate, of_gate), through(up, up.store)]
        tape.temporary(f"{reason}, recomputed", gate.dtype * gate.shape, COMPILED)
        return [(gate, of_gate), (up, gradient(tape, up, f"gradient of the other factor of the {reason}", COMPILED))]

    tape.add(reason, (made,), (gate, up), backward, of=(gate, up))
    return made


def _over_a_factor(tape: Tape, gate: Value, up: Value) -> Value | None:
    """Return the product where it overwrites a factor: in the forward of a graph that contains its checkpoint, which keeps one."""
    if tape.demand is None or tape.saving:
        return None
    factor = gate if tape.selected.keeps and up.store in tape.selected.stores() else up
    return Value(tape.hold(factor.store), factor.dtype, factor.shape)


COMPILED_BLOCK = Mode(norm=norm, rotary=rotary, gate=gated)

# --- float8 ------------------------------------------------------------------------------------------------------------------


def in_float8(recipe: str) -> Mode:
    """Return how a block that contains its checkpoint runs with a recipe of torchao. ``-gathered``: weights come in float8.

    A checkpoint by operator sees products of float8 tensors as products, and keeps the same ones as in 16 bits.
    """
    by_rows, gathered = recipe == "rowwise", recipe.endswith("-gathered")
    if recipe == "nvfp4":
        return COMPILED_BLOCK._replace(linear=_linear_in_four_bits)
    in_mxfp8 = recipe == "mxfp8"
    linear = partial(_float8_linear, by_rows=by_rows, gathered=gathered, in_mxfp8=in_mxfp8)
    return COMPILED_BLOCK._replace(linear=linear, gate=partial(_float8_gated, by_rows=by_rows, in_mxfp8=in_mxfp8))


def _linear_in_four_bits(
    tape: Tape, value: Value, width: Size, site: Site, *, reads: Size = h, bias: bool = False
) -> Value:  # fmt: skip
    """Run a product in NVFP4. A checkpoint by operator keeps no such product: torch has another operator for it than ``mm``.

    One kernel makes the codes of a matrix by rows, for this product, and by columns, which the backward reads. Products of the same
    input share them.
    """
    if bias:
        raise AssertionError("layers with a bias are refused")
    name, matrix, demand = site.name, reads * width, tape.demand
    rows = [
        _in_four_bits(tape, f"{what} of the {name}", n, TEMPORARY) for what, n in (("input", T * reads), ("weight", matrix))
    ]
    of_input = None if demand is None else demand.in_four_bits.get(value.store)
    if of_input is None:
        of_input = _in_four_bits(tape, f"input of the {name}, by columns", T * reads, TENSOR)
    else:
        tape.hold(of_input)
    of_weight = _in_four_bits(tape, f"weight of the {name}, by columns", matrix, TENSOR)
    made = tensor(tape, f"output of the {name}", e, T * width, FOUR_BITS, Tag(Role.OUTPUT, site.module))
    if demand is not None:
        demand.in_four_bits[value.store] = of_input
        demand.made_from[made.store] = (value.store, of_input, of_weight)
    tape.drop(*rows)

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        for order in ("rows", "columns"):
            codes = _in_four_bits(tape, f"gradient of the {name}'s output, by {order}", T * width, TEMPORARY)
            tape.scratch.append(codes)
        if site.module is Module.DOWN:  # the graph makes this weight's gradient last of the branch
            tape.hold_to_the_end(codes)
        tape.weight_gradient(matrix)
        return [(value, gradient(tape, value, f"gradient through the {name}", FOUR_BITS))]

    tape.add(name, (made,), (of_input, of_weight), backward, of=(value,), place=site.place)
    tape.drop(of_input, of_weight)
    return made


def _in_four_bits(tape: Tape, what: str, elements: Size, kind: Kind) -> Store:
    return tape.make(kind, *in_blocks(what, elements, four=True), FOUR_BITS)


def _float8_linear(
    tape: Tape, value: Value, width: Size, site: Site, *, reads: Size = h, bias: bool = False, by_rows: bool, gathered: bool,
    in_mxfp8: bool,
) -> Value:  # fmt: skip
    """Run a product in float8, whose casts are fused. A bias is added in the kernel of a later operator.

    ``in_mxfp8``: MXFP8, whose casts are kernels of torchao's.
    """
    name, matrix, codes = site.name, reads * width, partial(_codes, in_mxfp8=in_mxfp8)
    read = (("input", T * reads),) if gathered else (("input", T * reads), ("weight", matrix))
    factors = [tape.make(TEMPORARY, f"{what} of the {name} in float8", codes(n), FLOAT8) for what, n in read]
    made = tensor(tape, f"output of the {name}", e, T * width, FLOAT8, Tag(Role.OUTPUT, site.module))
    if by_rows:
        _keep_scales(tape, value, site, 4 * T)
    if in_mxfp8 and site.module is Module.GATE:  # the next product, which the backward makes again, reads them, too
        _keep_scales(tape, value, site, ceil(T * reads, 32))
    tape.matrix_product(made.store)
    tape.drop(*factors)
    backward = in_turn(
        needs(
            FLOAT8,
            (f"gradient of the {name}'s output in float8, by rows and by columns", codes(2 * T * width)),
            (f"weight of the {name} in float8, by columns", codes(matrix)),
            (f"input of the {name} in float8", codes(T * reads)),
        ),
        makes_weight_gradient(matrix, *((width,) if bias else ())),
        makes(f"gradient through the {name}", FLOAT8, value),
    )  # fmt: skip
    tape.add(name, (made,), (value,), backward, of=None, place=site.place)
    return made


def _codes(elements: Size, *, in_mxfp8: bool) -> Size:
    """Codes of a byte. MXFP8 has a scale of a byte for 32 of them, which a second copy puts into the order that products read."""
    return elements + 2 * ceil(elements, 32) if in_mxfp8 else elements


def _keep_scales(tape: Tape, value: Value, site: Site, size: Size) -> None:
    """Keep the scales of a kept product's input, once for each input. No down projection's output is kept."""
    demand = tape.demand
    is_kept = len(tape.selected.products) % 2 == 0 and site.module is not Module.DOWN
    if demand is None or not is_kept or value.store in demand.scaled:
        return
    demand.scaled.add(value.store)
    scales = tape.make(TENSOR, f"scales of the {site.name}'s input", size, FLOAT8)
    tape.kernel_output(scales)
    tape.drop(scales)


def _float8_gated(
    tape: Tape, gate: Value, up: Value, reason: str, *, by_rows: bool, in_mxfp8: bool
) -> Value:  # fmt: skip
    """``act(gate) * up``. The graph makes float8 weights of products of the backward where it makes those of the recomputation.

    With scales per row, the kernels also write a gradient in fp32, and float8 copies of the product and of a gradient.
    """
    made = _over_a_factor(tape, gate, up) or tensor(tape, reason, gate.dtype, gate.shape, COMPILED)

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        of_weights = _codes(h * c, in_mxfp8=in_mxfp8) + _codes(h * f, in_mxfp8=in_mxfp8)
        tape.temporary("weights of two recomputed products in float8, by columns", of_weights, FLOAT8)
        tape.temporary(f"{reason}, recomputed", gate.dtype * gate.shape, COMPILED)
        if by_rows:
            tape.temporary(f"{reason}: its gradients in fp32 and float8", 3 * gate.shape, FLOAT8)
        of_gate = gradient(tape, gate, f"gradient of the gate of the {reason}", COMPILED)
        return [(gate, of_gate), (up, gradient(tape, up, f"gradient of the other factor of the {reason}", COMPILED))]

    tape.add(reason, (made,), (gate, up), backward, of=(gate, up))
    return made
