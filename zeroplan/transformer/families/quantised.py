"""A frozen linear layer in bitsandbytes' four bits: what it makes of its weight to compute with, forward and backward.

It saves nothing but its packed weight. With many tokens the weight is written out in the compute dtype for every product, and
again for the gradient of the input; what a layer is given and returns is cast on the way where it is wider.
"""

from zeroplan.expr import Size, ceil
from zeroplan.ledger import Role, Tag
from zeroplan.spec.adapter import Quantize
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.operators import TEMPORARY
from zeroplan.transformer.families.tape import Arriving, Site, Store, Tape, Value
from zeroplan.transformer.symbols import T, e

LAYER = "bitsandbytes 0.50, nn/modules.py, Linear4bit.forward"
FORWARD = "bitsandbytes 0.50, backends/cuda/ops.py, _dequant_linear_fallback"
BACKWARD = "bitsandbytes 0.50, autograd/_functions.py, MatMul4Bit.backward"
CLONE = "peft 0.21, tuners/lora/bnb.py, Linear4bit.forward"


def quantised_linear(
    tape: Tape, value: Value, site: Site, quantize: Quantize, *, width: Size, reads: Size, clone: bool
) -> Value:
    """Run the layer; ``clone`` where it has an adapter, which copies what the layer returns."""
    name = site.name
    given = op.cast(tape, value, e, Site(f"input of the {name}", LAYER))
    made = _product(tape, given, site, quantize, width=width, reads=reads)
    returned = op.cast(tape, made, value.dtype, Site(f"output of the {name}", LAYER))
    tape.release(made, given)
    return _cloned(tape, returned, name) if clone else returned


def _product(tape: Tape, given: Value, site: Site, quantize: Quantize, *, width: Size, reads: Size) -> Value:
    """The weight is written out whole; only with fewer than 1,537 tokens may a kernel do without."""
    name, matrix = site.name, reads * width
    written = [*_scales(tape, name, matrix, quantize, copies=2), _weight(tape, name, matrix, FORWARD)]
    made = op.tensor(tape, f"output of the {name}", e, T * width, FORWARD, Tag(Role.OUTPUT, site.module))
    tape.drop(*written)

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        scales = _scales(tape, name, matrix, quantize, copies=1)
        tape.scratch.append(_weight(tape, name, matrix, BACKWARD))
        tape.drop(*scales)
        return [(given, op.gradient(tape, given, f"gradient through the {name}", BACKWARD))]

    tape.add(name, (made,), (), backward, of=(given,), place=site.place)
    return made


def _weight(tape: Tape, name: str, matrix: Size, source: str) -> Store:
    return tape.make(TEMPORARY, f"weight of the {name}, written out of 4 bits", e * matrix, source)


def _scales(tape: Tape, name: str, matrix: Size, quantize: Quantize, *, copies: int) -> list[Store]:
    """Scales that are themselves quantised are written out; the forward adds their mean to a copy."""
    if quantize != "nf4-double":
        return []
    reason, formula = f"scales of the {name}'s weight, fp32", 4 * ceil(matrix, 64)
    return [tape.make(TEMPORARY, reason, formula, FORWARD if copies == 2 else BACKWARD) for _ in range(copies)]


def _cloned(tape: Tape, value: Value, name: str) -> Value:
    made = op.tensor(tape, f"output of the {name}, copied", value.dtype, value.shape, CLONE)
    tape.add(f"{name}: copy", (made,), (), op.passes(value), of=(value,))
    tape.release(value)
    return made
