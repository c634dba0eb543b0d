"""Linear layers that torchao runs in float8: the tensors that they allocate beside those of a plain layer.

A layer saves the same tensors as without float8: its input and its weight in 16 bits. Each of its three products casts both
factors again, so a backward casts the output's gradient twice. A cast goes through fp32. A product of the backward copies its
second factor into column-major order; with row-wise scales it also multiplies its result by a matrix of scales.

Sizes are those of torchao 0.18 without ``torch.compile``, which fuses the steps of a cast.

Its prototypes for Blackwell cast in one kernel each. MXFP8 saves as the others do. NVFP4 saves the input and the weight in four
bits, each with a scale of a byte for 16 elements: so a layer keeps its weight beside the shards. Both are read, not run.
"""

from functools import partial

from zeroplan.expr import Size, ceil
from zeroplan.ledger import Kind, Role, Tag
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.operators import TEMPORARY, TENSOR
from zeroplan.transformer.families.tape import Arriving, Beside, Mode, Site, Store, Tape, Value
from zeroplan.transformer.symbols import T, e, h

CAST = "torchao 0.18, float8/float8_training_tensor.py, _ToFloat8ConstrFunc.forward"
PRODUCT = "torchao 0.18, float8/float8_ops.py, float8_mm"
BLOCKS = "torchao 0.18, prototype/moe_training/mxfp8_linear.py, mx_mm (read, not run)"
FOUR_BITS = "torchao 0.18, prototype/moe_training/nvfp4_training/nvfp4_linear.py, nvfp4_mm_triton"
LAYER = "torchao 0.18, float8/float8_linear.py, matmul_with_hp_or_float8_args"


def mode_of(recipe: str) -> Mode:
    """Return how linear layers run with a recipe of torchao; ``-gathered``: ranks gather their weights in float8."""
    if recipe in ("mxfp8", "nvfp4"):
        return Mode(partial(_linear_in_blocks, four=recipe == "nvfp4"))
    return Mode(partial(_linear, by_rows=recipe == "rowwise", gathered=recipe.endswith("-gathered")))


def _linear(
    tape: Tape, value: Value, width: Size, site: Site, *, reads: Size = h, bias: bool = False, by_rows: bool, gathered: bool
) -> Value:  # fmt: skip
    name, matrix, inputs, outputs = site.name, reads * width, T * reads, T * width
    given = op.cast(tape, value, e, Site(f"input of the {name}", site.source))
    factors = _in_float8(tape, f"input of the {name}", inputs, T if by_rows else None)
    if not gathered:
        factors += _in_float8(tape, f"weight of the {name}", matrix, width if by_rows else None)
    factors += _reciprocals(tape, T + width, by_rows=by_rows)
    made = op.tensor(tape, f"output of the {name}", e, outputs, site.source, Tag(Role.OUTPUT, site.module))
    tape.matrix_product(made.store)
    tape.drop(*factors)

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        kept = _in_float8(tape, f"gradient of the {name}'s output", outputs, T if by_rows else None)
        if not gathered:
            kept += _in_float8(tape, f"weight of the {name}", matrix, reads if by_rows else None)
        copies = [tape.make(TEMPORARY, f"weight of the {name} in float8, column by column", matrix, PRODUCT)]
        copies += _reciprocals(tape, T + reads, by_rows=by_rows, of_result=inputs)
        arriving = [(given, op.gradient(tape, given, f"gradient through the {name}", LAYER))]
        tape.drop(*copies)
        kept += _in_float8(tape, f"gradient of the {name}'s output", outputs, width if by_rows else None)
        kept += _in_float8(tape, f"input of the {name}", inputs, reads if by_rows else None)
        for what, size in ((f"gradient of the {name}'s output", outputs), (f"input of the {name}", inputs)):
            kept.append(tape.make(TEMPORARY, f"{what} in float8, in another order", size, PRODUCT))
        kept += _reciprocals(tape, width + reads, by_rows=by_rows, of_result=matrix)
        tape.weight_gradient(matrix)
        tape.scratch += kept
        return arriving

    read = Beside(f"weight of the {name}", matrix if gathered else e * matrix, strided=True)
    tape.add(name, (made,), (given,), backward, of=None, place=site.place, beside=(read,))
    tape.release(given)
    return _plus_bias(tape, made, width, site) if bias else made


def _plus_bias(tape: Tape, product: Value, width: Size, site: Site) -> Value:
    """Add the bias to a product in a tensor of its own, as torchao's layer does."""
    made = op.tensor(tape, f"output of the {site.name}, with its bias", e, product.shape, LAYER, Tag(Role.OUTPUT, site.module))

    def backward(tape: Tape, grad_outputs: list[Store]) -> Arriving:
        tape.weight_gradient(width)
        return [op.through(product, grad_outputs[0])]

    tape.add(f"{site.name}: bias", (made,), (), backward, of=None)
    tape.release(product)
    return made


def _linear_in_blocks(
    tape: Tape, value: Value, width: Size, site: Site, *, reads: Size = h, bias: bool = False, four: bool
) -> Value:  # fmt: skip
    if bias:
        raise AssertionError("layers with a bias are refused")
    name, matrix, inputs, outputs = site.name, reads * width, T * reads, T * width
    given = op.cast(tape, value, e, Site(f"input of the {name}", site.source))
    factors, kept = list[Store](), list[Store]()
    for what, size in (("input", inputs), ("weight", matrix)):
        if four and what == "weight":
            wide = (f"{part} of the {name}'s weight in fp32" for part in ("copy", "absolute values"))
            tape.drop(*[tape.make(TEMPORARY, reason, 4 * matrix, FOUR_BITS) for reason in wide])
        factors.append(_in_blocks(tape, f"{what} of the {name}", size, four=four))
        if four:
            kept.append(_in_blocks(tape, f"{what} of the {name}, by columns", size, four=True, saved=True))
    made = op.tensor(tape, f"output of the {name}", e, outputs, site.source, Tag(Role.OUTPUT, site.module))
    tape.matrix_product(made.store)
    tape.drop(*factors)

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        def cast(what: str, size: Size) -> Store:
            return _in_blocks(tape, f"{what} of the {name}", size, four=four)

        here = [
            cast("gradient of the output", outputs),
            cast("gradient, by columns," if four else "weight", outputs if four else matrix),
        ]
        arriving = [(given, op.gradient(tape, given, f"gradient through the {name}", FOUR_BITS if four else BLOCKS))]
        if not four:
            here += [cast("gradient, by columns,", outputs), cast("input, by columns,", inputs)]
        tape.weight_gradient(matrix)
        tape.scratch += here
        return arriving

    read = () if four else (Beside(f"weight of the {name}", e * matrix, strided=True),)
    tape.add(
        name, (made,), tuple(kept) if four else (given,), backward, of=(given,) if four else None, place=site.place, beside=read
    )
    tape.drop(*kept)
    tape.release(given)
    return made


def _in_blocks(tape: Tape, what: str, elements: Size, *, four: bool, saved: bool = False) -> Store:
    """Codes of 8 or 4 bits, and a byte for the scale of 32 or 16 of them."""
    kind = TENSOR if saved else TEMPORARY
    if four:
        return in_four_bits(tape, what, elements, kind)
    return tape.make(kind, f"{what} in MXFP8", elements + ceil(elements, 32), BLOCKS)


def in_four_bits(tape: Tape, what: str, elements: Size, kind: Kind) -> Store:
    """Codes of 4 bits, and a byte for the scale of 16 of them."""
    return tape.make(kind, f"{what} in NVFP4", ceil(elements, 2) + ceil(elements, 16), FOUR_BITS)


def _in_float8(tape: Tape, what: str, elements: Size, scales: Size | None) -> list[Store]:
    """Cast a tensor to float8 through its scale and fp32 copies. ``scales``: one per row; None: one for the tensor."""
    tape.drop(tape.make(TEMPORARY, f"{what}: absolute values", e * elements, CAST))
    found = [] if scales is None else [tape.make(TEMPORARY, f"{what}: scales of its rows", 4 * scales, CAST)]
    wide = tape.make(TEMPORARY, f"{what} in fp32", 4 * elements, CAST)
    scaled = tape.make(TEMPORARY, f"{what} in fp32, scaled", 4 * elements, CAST)
    tape.drop(wide)
    clamped = tape.make(TEMPORARY, f"{what} in fp32, clamped", 4 * elements, CAST)
    made = tape.make(TEMPORARY, f"{what} in float8", elements, CAST)
    tape.drop(scaled, clamped)
    return [made, *found]


def _reciprocals(tape: Tape, scales: Size, *, by_rows: bool, of_result: Size | None = None) -> list[Store]:
    """Return the reciprocals of both factors' row scales, and the matrix of scales for a product without fast accumulation."""
    if not by_rows:
        return []
    made = [tape.make(TEMPORARY, "reciprocals of the scales", 4 * scales, PRODUCT)]
    if of_result is not None:
        made.append(tape.make(TEMPORARY, "products of the scales, one for each element of a result", 4 * of_result, PRODUCT))
    return made
