"""Activation functions of an MLP, by transformers' names. Their sizes were measured on fake tensors of a fake GPU.

Most are one operator that saves its input or its result. Three kinds of GELU consist of many single operators, some of which
save their factors.
"""

from collections.abc import Callable

from zeroplan.ledger import Module
from zeroplan.transformer.blocks import At
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.tape import CAST_BY_CUDA, Site, Tape, Value

ACTIVATIONS = "transformers 5.23, activations.py"
#: Functions whose derivative is computed from their result.
_SAVES_RESULT = ("relu", "sigmoid", "tanh")


def activated(tape: Tape, value: Value, name: str, reason: str, source: str) -> Value:
    """Run the activation function ``name``; ``reason`` names its result. ``value`` stays."""
    in_single_operators = _IN_SINGLE_OPERATORS.get(name)
    if in_single_operators is not None:
        return in_single_operators(tape, value, reason)
    site = _site(name)._replace(source=source)
    return op.pointwise(tape, value, reason, site, saves_result=name in _SAVES_RESULT)


# --- GELU in single operators ------------------------------------------------------------------------------------------------


def _gelu_new(tape: Tape, value: Value, reason: str) -> Value:
    """``0.5·x·(1 + tanh(0.798·(x + 0.045·x³)))``. CUDA's autocast computes the cube, and what follows from it, in fp32."""
    half = _times_constant(tape, value, "half of x")
    small = _small_cube(tape, value)
    inside = op.add(tape, value, small, "gelu: x + 0.045·x³", _site("gelu: x + 0.045·x³"))
    tape.release(small)
    return _of_tanh(tape, op.scaled(tape, inside, "gelu: argument of tanh", _site("gelu: argument of tanh")), half, reason)


def _gelu_fast(tape: Tape, value: Value, reason: str) -> Value:
    """``0.5·x·(1 + tanh(0.798·x·(1 + 0.045·x·x)))``. Four operators save their factors."""
    half, steep, small = (_times_constant(tape, value, name) for name in ("half of x", "0.798·x", "0.045·x"))
    square = op.product(tape, small, value, "gelu: 0.045·x·x", _site("gelu: 0.045·x·x"))
    tape.release(small)
    more = op.plus_constant(tape, square, "gelu: 1 + 0.045·x·x", _site("gelu: 1 + 0.045·x·x"))
    tape.release(square)
    inside = op.product(tape, steep, more, "gelu: argument of tanh", _site("gelu: argument of tanh"))
    tape.release(steep, more)
    return _of_tanh(tape, inside, half, reason)


def _of_tanh(tape: Tape, inside: Value, half: Value, reason: str) -> Value:
    """``half·(1 + tanh(inside))``. It releases both arguments."""
    bent = op.pointwise(tape, inside, "gelu: tanh", _site("gelu: tanh"), saves_result=True)
    tape.release(inside)
    more = op.plus_constant(tape, bent, "gelu: 1 + tanh", _site("gelu: 1 + tanh"))
    tape.release(bent)
    made = op.product(tape, half, more, reason, _site("gelu"))
    tape.release(half, more)
    return made


def _small_cube(tape: Tape, value: Value) -> Value:
    """``0.045·x³``. ``pow`` saves its base, of which CUDA's autocast makes an fp32 copy."""
    base = op.cast(tape, value, CAST_BY_CUDA, _site("gelu: x, base of pow"))
    cube = _power(tape, base, "gelu: x³", _site("gelu: x³"), ("x²", "3·x²"))
    tape.release(base)
    return op.scaled(tape, cube, "gelu: 0.045·x³", _site("gelu: 0.045·x³"))


def _quick_gelu(tape: Tape, value: Value, reason: str) -> Value:
    """``x·sigmoid(1.702·x)``."""
    steep = _times_constant(tape, value, "1.702·x")
    bent = op.pointwise(tape, steep, "gelu: sigmoid", _site("gelu: sigmoid"), saves_result=True)
    tape.release(steep)
    made = op.product(tape, value, bent, reason, _site("gelu"))
    tape.release(bent)
    return made


def _relu2(tape: Tape, value: Value, reason: str) -> Value:
    """``square(relu(x))``. ``pow`` saves its base, of which CUDA's autocast makes an fp32 copy."""
    bent = op.pointwise(tape, value, "relu2: relu", _site("relu2: relu"), saves_result=True)
    base = op.cast(tape, bent, CAST_BY_CUDA, _site("relu2: relu, base of pow"))
    made = _power(tape, base, reason, _site("relu2: square"), ("x", "2·x"))
    tape.release(base, bent)
    return made


def _power(tape: Tape, base: Value, reason: str, site: Site, factors: tuple[str, ...]) -> Value:
    """``pow``, which saves its base. Its backward makes ``factors`` before the gradient."""
    steps = [(f"derivative of pow, {factor}", base.dtype * base.shape) for factor in factors]
    backward = op.in_turn(op.needs(ACTIVATIONS, *steps), op.makes("gradient of the base of pow", ACTIVATIONS, base))
    return op.run(tape, base, reason, site, saved=(base,), backward=backward)


def _times_constant(tape: Tape, value: Value, name: str) -> Value:
    return op.multiplied(tape, value, f"gelu: {name}", _site(f"gelu: {name}"))


def _site(name: str) -> Site:
    return Site(name, ACTIVATIONS, Module.ACTIVATION, At.MODULE)


_IN_SINGLE_OPERATORS: dict[str, Callable[[Tape, Value, str], Value]] = {
    "gelu_new": _gelu_new,
    "gelu_fast": _gelu_fast,
    "quick_gelu": _quick_gelu,
    "relu2": _relu2,
}
