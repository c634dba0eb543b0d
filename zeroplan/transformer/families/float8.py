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
from zeroplan.ledger import Role, Tag
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
    backward = op.in_turn(op.makes_weight_gradient(width), op.same_gradient(product))
    made = op.run(
        tape, product, f"output of the {site.name}, with its bias", LAYER, dtype=e,
        backward=backward, weights="trained", tag=Tag(Role.OUTPUT, site.module),
    )  # fmt: skip
    tape.release(product)
    return made


def _linear_in_blocks(
    tape: Tape, value: Value, width: Size, site: Site, *, reads: Size = h, bias: bool = False, four: bool
) -> Value:  # fmt: skip
    if bias:
        raise AssertionError("layers with a bias are refused")
    name, matrix, inputs, outputs = site.name, reads * width, T * reads, T * width
    source = FOUR_BITS if four else BLOCKS
    given = op.cast(tape, value, e, Site(f"input of the {name}", site.source))
    factors, kept = list[Store](), list[Store]()
    for what, size in (("input", inputs), ("weight", matrix)):
        if four and what == "weight":
            wide = (f"{part} of the {name}'s weight in fp32" for part in ("copy", "absolute values"))
            tape.drop(*[tape.make(TEMPORARY, reason, 4 * matrix, FOUR_BITS) for reason in wide])
        factors.append(tape.make(TEMPORARY, *in_blocks(f"{what} of the {name}", size, four=four), source))
        if four:
            kept.append(tape.make(TENSOR, *in_blocks(f"{what} of the {name}, by columns", size, four=True), source))
    made = op.tensor(tape, f"output of the {name}", e, outputs, site.source, Tag(Role.OUTPUT, site.module))
    tape.matrix_product(made.store)
    tape.drop(*factors)
    cast = partial(in_blocks, four=four)
    by_columns = cast(f"gradient, by columns, of the {name}", outputs)
    before = (
        cast(f"gradient of the output of the {name}", outputs),
        by_columns if four else cast(f"weight of the {name}", matrix),
    )
    after = () if four else (by_columns, cast(f"input, by columns, of the {name}", inputs))
    through = op.makes(f"gradient through the {name}", source, given)
    backward = op.in_turn(op.needs(source, *before), through, op.needs(source, *after), op.makes_weight_gradient(matrix))
    read = () if four else (Beside(f"weight of the {name}", e * matrix, strided=True),)
    saved = tuple(kept) if four else (given,)
    tape.add(name, (made,), saved, backward, of=(given,) if four else None, place=site.place, beside=read)
    tape.drop(*kept)
    tape.release(given)
    return made


def in_blocks(what: str, elements: Size, *, four: bool) -> op.Named:
    """Codes of 8 or 4 bits, and a byte for the scale of 32 or 16 of them."""
    size = ceil(elements, 2) + ceil(elements, 16) if four else elements + ceil(elements, 32)
    return f"{what} in {'NVFP4' if four else 'MXFP8'}", size


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
