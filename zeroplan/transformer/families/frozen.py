"""Linear layers that are frozen, have a low-rank adapter from peft, or are held in four bits by bitsandbytes.

A frozen linear layer needs only its weight to make the gradient of its input. It saves its input only where an adapter reads it
too. A layer before the first trained weight saves nothing and has no backward, unless autograd follows the embedding's output. A
layer in four bits saves nothing but its packed weight: with many tokens it dequantises the weight into the compute dtype for the
forward, and again for the backward.
"""

from contextlib import nullcontext
from functools import partial

from zeroplan.expr import Size, ceil
from zeroplan.ledger import Kind, Role, Tag
from zeroplan.spec.adapter import Quantize
from zeroplan.transformer.blocks import At
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.definition import Training
from zeroplan.transformer.families.operators import TEMPORARY
from zeroplan.transformer.families.tape import Arriving, Mode, Site, Store, Tape, Value
from zeroplan.transformer.symbols import T, e, z

AUTOCAST = "torch 2.13, aten/src/ATen/autocast_mode.cpp, cached_cast"
LORA = "peft 0.21, tuners/lora/layer.py, Linear.forward"
LAYER_4BIT = "bitsandbytes 0.50, nn/modules.py, Linear4bit.forward"
FORWARD = "bitsandbytes 0.50, backends/cuda/ops.py, _dequant_linear_fallback"
BACKWARD = "bitsandbytes 0.50, autograd/_functions.py, MatMul4Bit.backward"
CLONE = "peft 0.21, tuners/lora/bnb.py, Linear4bit.forward"


def freeze(tape: Tape, given: Value, training: Training) -> None:
    """Make the tape run a block's linear layers and norms as ``training`` describes, before its program runs over ``given``."""
    tape.mode = Mode(partial(linear, training=training), norms_frozen=training.weights != "trained")
    if not training.tracked:
        tape.untracked.add(given)


def linear(
    tape: Tape, value: Value, width: Size, site: Site, *, reads: Size, bias: bool, training: Training
) -> Value:  # fmt: skip
    """Run a linear layer of a block that is trained as ``training`` describes."""
    site = site if site.at else site._replace(at=At.LINEAR)
    if training.weights == "trained":
        return op.trained_linear(tape, value, width, site, reads=reads, bias=bias)
    if training.weights == "frozen" and tape.autocast:
        return _copied_linear(tape, value, width, site, reads=reads, bias=bias)
    with tape.inside(site.module):
        if training.quantize != "none":
            return _quantised(tape, value, site, training, width=width, reads=reads)
        return _adapted(tape, value, site, training, width=width, reads=reads, bias=bias)


def _adapted(tape: Tape, value: Value, site: Site, training: Training, *, width: Size, reads: Size, bias: bool) -> Value:
    """Run a frozen linear layer and its adapter, if any. peft casts, scales and adds in separate operators."""
    adapts = training.adapts(site.module)
    with tape.owning() if adapts else nullcontext():
        made = _frozen_linear(tape, value, width, site, bias=bias, keeps_input=training.keeps_inputs)
    if not adapts:
        return made
    read = Site(f"input of the {site.name}'s adapter", LORA, site.module, At.ADAPTED)
    given = op.cast(tape, value, 4 if tape.autocast else e, read)
    return _plus_adapter(tape, given, made, site, width=width, reads=reads)


def _frozen_linear(tape: Tape, value: Value, width: Size, site: Site, *, bias: bool, keeps_input: bool) -> Value:
    """Run a frozen linear layer, which saves only its weight. DeepSpeed's stage-3 layer saves its input too, after its product."""
    made = op.tensor(tape, f"output of the {site.name}", e, T * width, site.source, Tag(Role.OUTPUT, site.module))
    if not bias:
        tape.matrix_product(made.store)
    backward = op.makes(f"gradient through the {site.name}", site.source, value)
    saved = (value.store,) if keeps_input else ()
    tape.add(
        site.name, (made,), saved, backward, of=(value,), place=site.place, saves_weight=True, late=keeps_input
    )  # fmt: skip
    return made


def _copied_linear(tape: Tape, value: Value, width: Size, site: Site, *, reads: Size, bias: bool) -> Value:
    """Run a frozen fp32 layer under autocast, which copies the weight for every product. The product saves the copy."""
    wanted = (width, reads * width) if bias else (reads * width,)
    copies = [tape.make(Kind.WEIGHT_CASTS, f"16-bit copy of the frozen {site.name}", e * one, AUTOCAST) for one in wanted]
    given = op.cast(tape, value, e, Site(f"input of the {site.name}", site.source))
    made = op.tensor(tape, f"output of the {site.name}", e, T * width, site.source)
    if not bias:
        tape.matrix_product(made.store)
    backward = op.makes(f"gradient through the {site.name}", site.source, given)
    tape.add(site.name, (made,), (copies[-1],), backward, of=(value,))
    tape.drop(*copies)
    tape.release(given)
    return made


def _quantised(tape: Tape, value: Value, site: Site, training: Training, *, width: Size, reads: Size) -> Value:
    """Run a layer in four bits and its adapter, if any, whose input autocast casts."""
    adapted = training.adapts(site.module)
    with tape.owning() if adapted else nullcontext():
        made = _in_4_bits(tape, value, site, training.quantize, width=width, reads=reads, clone=adapted)
    if not adapted:
        return made
    tape.hold(value.store)
    return _plus_adapter(tape, value, made, site, width=width, reads=reads)


def _plus_adapter(tape: Tape, given: Value, made: Value, site: Site, *, width: Size, reads: Size) -> Value:
    """Run the adapter on ``given`` and add its scaled output to ``made``; release both."""
    name, module = site.name, site.module
    with tape.owning():
        inner = op.trained_linear(tape, given, z, Site(f"{name}'s adapter, A", LORA, module, At.ADAPTER_A), reads=reads)
    with tape.owning():
        outer = op.trained_linear(tape, inner, width, Site(f"{name}'s adapter, B", LORA, module, At.ADAPTER_B), reads=z)
    tape.release(inner)
    scale = Site(f"{name}'s adapter: scale", LORA, module, At.ADAPTED)
    scaled = op.scaled(tape, outer, f"output of the {name}'s adapter, scaled", scale)
    total = op.add(tape, made, scaled, f"output of the {name} and its adapter", scale._replace(name=f"{name} and its adapter"))
    tape.release(made, scaled, given)
    return total


# --- four bits ---------------------------------------------------------------------------------------------------------------


def _in_4_bits(
    tape: Tape, value: Value, site: Site, quantize: Quantize, *, width: Size, reads: Size, clone: bool
) -> Value:  # fmt: skip
    """Run a layer in four bits. ``clone``: it has an adapter, so that peft copies the layer's output."""
    name = site.name
    given = op.cast(tape, value, e, Site(f"input of the {name}", LAYER_4BIT))
    made = _product_of_4_bits(tape, given, site, quantize, width=width, reads=reads)
    returned = op.cast(tape, made, value.dtype, Site(f"output of the {name}", LAYER_4BIT))
    tape.release(made, given)
    return _cloned(tape, returned, name) if clone else returned


def _product_of_4_bits(tape: Tape, given: Value, site: Site, quantize: Quantize, *, width: Size, reads: Size) -> Value:
    """Dequantise the whole weight and multiply; save nothing. Only below 1,537 tokens may a kernel do without that."""
    name, matrix = site.name, reads * width
    written = [*_scales(tape, name, matrix, quantize, copies=2), _dequantised(tape, name, matrix, FORWARD)]
    made = op.tensor(tape, f"output of the {name}", e, T * width, FORWARD, Tag(Role.OUTPUT, site.module))
    tape.drop(*written)

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        scales = _scales(tape, name, matrix, quantize, copies=1)
        tape.scratch.append(_dequantised(tape, name, matrix, BACKWARD))
        tape.drop(*scales)
        return [(given, op.gradient(tape, given, f"gradient through the {name}", BACKWARD))]

    tape.add(name, (made,), (), backward, of=(given,), place=site.place)
    return made


def _dequantised(tape: Tape, name: str, matrix: Size, source: str) -> Store:
    return tape.make(TEMPORARY, f"weight of the {name}, written out of 4 bits", e * matrix, source)


def _scales(tape: Tape, name: str, matrix: Size, quantize: Quantize, *, copies: int) -> list[Store]:
    """Dequantise scales that are themselves quantised. The forward adds their mean in a copy."""
    if quantize != "nf4-double":
        return []
    reason, formula = f"scales of the {name}'s weight, fp32", 4 * ceil(matrix, 64)
    return [tape.make(TEMPORARY, reason, formula, FORWARD if copies == 2 else BACKWARD) for _ in range(copies)]


def _cloned(tape: Tape, value: Value, name: str) -> Value:
    made = op.run(tape, value, f"output of the {name}, copied", Site(f"{name}: copy", CLONE))
    tape.release(value)
    return made
