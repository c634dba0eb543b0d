"""A Megatron-Core layer's norms and matrices: column-parallel, row-parallel, or whole on every rank."""

from typing import NamedTuple

from zeroplan.expr import NOTHING, Size
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.frozen import dropped
from zeroplan.transformer.families.megatron.sources import CORE, LATENT
from zeroplan.transformer.families.megatron.structure import Layer
from zeroplan.transformer.families.megatron.symbols import T_m, T_n, T_t, T_u, T_v, T_w, X_u, w_n, x_8, y_8
from zeroplan.transformer.families.tags import STATISTICS
from zeroplan.transformer.families.tape import Arriving, Site, Store, Tape, Value
from zeroplan.transformer.symbols import e, h, z

NORM = "Transformer Engine 2026-08, pytorch/module/layernorm_linear.py, _LayerNormLinear.forward"
FP8 = "Transformer Engine 2026-08, pytorch/module/linear.py, _linear_forward_impl (read, not run)"
COLUMN = f"{CORE}/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication"
ROW = f"{CORE}/tensor_parallel/layers.py, RowParallelLinear.forward"
ADAPTED = "mcore-bridge 1.6.5, tuners/lora.py, LoraParallelLinear.forward"
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


class Around(NamedTuple):
    """Temporaries (reason, size) beside a product: in its forward, in its backward, and there for the weight's gradient alone."""

    forward: tuple[tuple[str, Size], ...] = ()
    backward: tuple[tuple[str, Size], ...] = ()
    of_weight: tuple[tuple[str, Size], ...] = ()


_ALONE = Around()


def matrix(
    tape: Tape, value: Value, name: str, source: str, *, shape: Size, weight: Size, shared: bool = False, around: Around = _ALONE,
    after_norm: bool = False, also: tuple[Store, ...] = (),
) -> Value:  # fmt: skip
    """Multiply by ``weight`` elements. ``shared``: see :func:`_read`. ``also``: what it keeps beside its input.

    A frozen matrix makes no gradient of its weight and keeps no input, but for the output of a norm that it contains.
    """
    if tape.mode.low_rank is None:
        kept = (*_read(tape, value, name, shared=shared), *map(tape.hold, also))
        return _product(tape, value, name, source, kept, shape=shape, weight=weight, around=around)
    kept = (tape.hold(value.store),) if after_norm and tape.mode.low_rank.keeps_normal else ()
    return _product(tape, value, name, source, kept, shape=shape, weight=None, around=around)


def _product(
    tape: Tape, value: Value, name: str, source: str, kept: tuple[Store, ...], *, shape: Size, weight: Size | None, around: Around
) -> Value:  # fmt: skip
    """Multiply by a matrix, which is trained if its elements ``weight`` are given. ``kept``: what it keeps of its input."""
    passing = [tape.make(op.TEMPORARY, *one, source) for one in around.forward]
    made = op.tensor(tape, f"output of {name}", e, shape, source)
    tape.drop(*passing)

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        narrow = y_8 * shape.replacing(_BY_32) if tape.in_fp8 else NOTHING
        tape.temporary(f"gradient of the output of {name}, in FP8", narrow, FP8)
        for one in (*(around.of_weight if weight is not None else ()), *around.backward):
            tape.temporary(*one, source)
        arriving = [(value, op.gradient(tape, value, f"gradient of the input of {name}", source))]
        if weight is not None:
            tape.weight_gradient(weight)
        return arriving

    tape.add(name, (made,), kept, backward, of=None)
    tape.drop(*kept)
    return made


def with_adapter(
    tape: Tape, value: Value, made: Value, name: str, layer: str, first: tuple[Size, Size, Around],
    second: tuple[Size, Size, Around],
) -> Value:  # fmt: skip
    """Add the output of a matrix's adapter, if it has one: two products of ``value``, scaled. ``made`` is released.

    ``first``, ``second``: the elements of the product's output and of its weight, and what is beside it.
    """
    low = tape.mode.low_rank
    if low is None or layer not in low.layers:
        return made
    site = Site(name, ADAPTED)
    outer = dropped(tape, value, site) if low.dropout else value
    if outer is value:
        tape.hold(value.store)
    for letter, (shape, weight, around) in (("A", first), ("B", second)):
        inner, kept = outer, (tape.hold(outer.store),)
        outer = _product(tape, inner, f"{name}'s adapter, {letter}", ADAPTED, kept, shape=shape, weight=weight, around=around)
        tape.release(inner)
    scaled = op.scaled(tape, outer, f"output of {name}'s adapter, scaled", site._replace(name=f"{name}'s adapter: scale"))
    total = op.add(tape, made, scaled, f"output of {name} and its adapter", site._replace(name=f"{name} and its adapter"))
    tape.release(made, scaled)
    return total


def column(
    tape: Tape, value: Value, width: Size, name: str, *, reads: Size = h, tokens: Size = T_m, layer: str = "",
    keeps_gathered: bool = False,
) -> Value:  # fmt: skip
    """A column-parallel matrix. Sequence parallelism gathers its input in the forward, and again for the weight gradient.

    ``layer``: Megatron-Core's name of it, if it may have an adapter. ``keeps_gathered``: its input is gathered once, and kept.
    """
    around = _gathering(tape, name, reads)
    gathered = tuple([tape.make(op.TENSOR, *one, COLUMN) for one in around.forward]) if keeps_gathered else ()
    around = around._replace(forward=(), of_weight=()) if keeps_gathered else around
    made = matrix(
        tape, value, name, COLUMN, shape=tokens * width, weight=reads * width, around=around, after_norm=True, also=gathered
    )
    tape.drop(*gathered)
    second = tokens * width, z * width, _gathering(tape, f"{name}'s adapter, B", z)
    return with_adapter(tape, value, made, name, layer, (T_n * z, reads * z, _ALONE), second)


def _gathering(tape: Tape, name: str, reads: Size) -> Around:
    gathered = f"gathered input of {name}", _through(tape, T_w * reads)
    gradient = f"gradient of the gathered input of {name}", e * T_w * reads
    return Around((gathered,), (gradient,), (gathered,))


def duplicated(tape: Tape, value: Value, width: Size, name: str) -> Value:
    """A matrix that every rank has whole, and multiplies with its own tokens."""
    return matrix(tape, value, name, LATENT, shape=T_n * width, weight=h * width)


def row(tape: Tape, value: Value, width: Size, name: str, *, shared: bool = False, layer: str = "") -> Value:
    """A row-parallel matrix. The ranks sum its outputs; with sequence parallelism each rank gets only its own tokens.

    ``layer``: see :func:`column`.
    """
    around = _summing(tape, name, h)
    made = matrix(tape, value, name, ROW, shape=T_n * h, weight=width * h, shared=shared, around=around)
    first = T_n * z, width * z, _summing(tape, f"{name}'s adapter, A", z)
    return with_adapter(tape, value, made, name, layer, first, (T_n * h, z * h, _ALONE))


def _summing(tape: Tape, name: str, makes: Size) -> Around:
    whole = f"output of {name} before ranks add it up", e * T_w * makes
    gradient = f"gathered gradient of the output of {name}", _through(tape, T_w * makes)
    return Around((whole,), (gradient,))


def added(tape: Tape, branch: Value, residual: Value, reason: str, structure: Layer) -> Value:
    """Bias, dropout and the residual addition in one operator."""
    mask = f"mask of the dropout before the {reason}", T_n * h
    through = op.makes("gradient through dropout", DROPOUT, branch) if structure.hidden_dropout else op.same_gradient(branch)
    return op.run(
        tape, branch, reason, Site("dropout and residual addition", DROPOUT), dtype=e, shape=T_n * h,
        keeps=(mask,) if structure.hidden_dropout else (), backward=op.in_turn(op.same_gradient(residual), through),
        weights="trained",
    )  # fmt: skip
