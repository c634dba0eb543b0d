"""A Megatron-Core layer's norms and matrices: column-parallel, row-parallel, or whole on every rank."""

from zeroplan.expr import NOTHING, Size
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.megatron.sources import CORE, LATENT
from zeroplan.transformer.families.megatron.structure import Layer
from zeroplan.transformer.families.megatron.symbols import T_m, T_n, T_t, T_u, T_v, T_w, X_u, w_n, x_8, y_8
from zeroplan.transformer.families.tags import STATISTICS
from zeroplan.transformer.families.tape import Arriving, Store, Tape, Value
from zeroplan.transformer.symbols import e, h

NORM = "Transformer Engine 2026-08, pytorch/module/layernorm_linear.py, _LayerNormLinear.forward"
FP8 = "Transformer Engine 2026-08, pytorch/module/linear.py, _linear_forward_impl (read, not run)"
COLUMN = f"{CORE}/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication"
ROW = f"{CORE}/tensor_parallel/layers.py, RowParallelLinear.forward"
DROPOUT = f"{CORE}/fusions/fused_bias_dropout.py, _bias_dropout_add_func"


def norm(tape: Tape, value: Value, name: str, *, shape: Size = T_n * h, rows: Size = T_n) -> Value:
    """A norm in one operator. The matrix after it reads the norm's output, and keeps it for its weight gradient."""
    made = op.tensor(tape, f"output of {name}", e, shape, NORM)
    kept = tape.make(op.TENSOR, f"statistics of {name}, fp32", w_n * rows, NORM, STATISTICS)
    tape.add(name, (made,), (value.store, kept), op.makes(f"gradient through {name}", NORM, value), of=None)
    tape.drop(kept)
    return made


_BY_32 = {"T_n": T_u, "T_m": T_v, "T_w": T_t, "X_r": X_u}


def _read(tape: Tape, value: Value, name: str, *, shared: bool = False) -> tuple[Store, ...]:
    """Return what a matrix keeps of its input: the tensor itself, or an FP8 copy.

    With ``shared`` another operator keeps the tensor, and current scaling makes no copy.
    """
    if not tape.in_fp8 or (shared and tape.in_fp8 == "current"):
        return (tape.hold(value.store),)
    return (tape.make(op.TENSOR, f"input of {name}, in FP8", x_8 * value.shape.replacing(_BY_32), FP8),)


def _through(tape: Tape, elements: Size) -> Size:
    """Return the gathered size of a matrix's input or gradient. [bytes]"""
    return y_8 * elements.replacing(_BY_32) if tape.in_fp8 else e * elements


def matrix(
    tape: Tape, value: Value, name: str, source: str, *, shape: Size, weight: Size, shared: bool = False,
    beside: tuple[tuple[str, Size], ...] = (), beside_back: tuple[tuple[str, Size], ...] = (),
) -> Value:  # fmt: skip
    """Multiply by ``weight`` elements. Temporaries (reason, size) exist in the forward, and others in the backward.

    ``shared``: see :func:`_read`.
    """
    kept = _read(tape, value, name, shared=shared)
    passing = [tape.make(op.TEMPORARY, *one, source) for one in beside]
    made = op.tensor(tape, f"output of {name}", e, shape, source)
    tape.drop(*passing)

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        narrow = y_8 * shape.replacing(_BY_32) if tape.in_fp8 else NOTHING
        tape.temporary(f"gradient of the output of {name}, in FP8", narrow, FP8)
        for one in beside_back:
            tape.temporary(*one, source)
        arriving = [(value, op.gradient(tape, value, f"gradient of the input of {name}", source))]
        tape.weight_gradient(weight)
        return arriving

    tape.add(name, (made,), kept, backward, of=None)
    tape.drop(*kept)
    return made


def column(tape: Tape, value: Value, width: Size, name: str, *, reads: Size = h, tokens: Size = T_m) -> Value:
    """A column-parallel matrix. Sequence parallelism gathers its input in the forward, and again for the weight gradient."""
    gathered = f"gathered input of {name}", _through(tape, T_w * reads)
    gradient = f"gradient of the gathered input of {name}", e * T_w * reads
    return matrix(
        tape,
        value,
        name,
        COLUMN,
        shape=tokens * width,
        weight=reads * width,
        beside=(gathered,),
        beside_back=(gathered, gradient),
    )


def duplicated(tape: Tape, value: Value, width: Size, name: str) -> Value:
    """A matrix that every rank has whole, and multiplies with its own tokens."""
    return matrix(tape, value, name, LATENT, shape=T_n * width, weight=h * width)


def row(tape: Tape, value: Value, width: Size, name: str, *, shared: bool = False) -> Value:
    """A row-parallel matrix. The ranks sum its outputs; with sequence parallelism each rank gets only its own tokens."""
    whole = f"output of {name} before ranks add it up", e * T_w * h
    gradient = f"gathered gradient of the output of {name}", _through(tape, T_w * h)
    return matrix(
        tape, value, name, ROW, shape=T_n * h, weight=width * h, shared=shared, beside=(whole,), beside_back=(gradient,)
    )


def added(tape: Tape, branch: Value, residual: Value, reason: str, structure: Layer) -> Value:
    """Bias, dropout and the residual addition in one operator."""
    made = op.tensor(tape, reason, e, T_n * h, DROPOUT)
    mask = (
        (tape.make(op.TENSOR, f"mask of the dropout before the {reason}", T_n * h, DROPOUT),)
        if structure.hidden_dropout
        else ()
    )

    def backward(tape: Tape, taken: list[Store]) -> Arriving:
        if not mask:
            return [op.through(residual, taken[0]), op.through(branch, taken[0])]
        return [op.through(residual, taken[0]), (branch, op.gradient(tape, branch, "gradient through dropout", DROPOUT))]

    tape.add("dropout and residual addition", (made,), mask, backward, of=None)
    tape.drop(*mask)
    return made
