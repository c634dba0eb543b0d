"""Linear layers of a block of which not everything is trained: frozen ones, those with peft's low-rank adapters, 4-bit ones.

A frozen linear layer needs its weight alone to hand a gradient on; what it read is saved only where an adapter reads it too.
Nothing is saved, nor goes backward, before the first weight that is trained, unless autograd is made to follow the
embedding's output.
"""

from contextlib import nullcontext
from functools import partial

from zeroplan.expr import Size
from zeroplan.ledger import Kind, Role, Tag
from zeroplan.transformer.blocks import At
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.program import Training
from zeroplan.transformer.families.quantised import quantised_linear
from zeroplan.transformer.families.tape import Manner, Site, Tape, Value
from zeroplan.transformer.symbols import T, e, z

AUTOCAST = "torch 2.13, aten/src/ATen/autocast_mode.cpp, cached_cast"
LORA = "peft 0.21, tuners/lora/layer.py, Linear.forward"


def freeze(tape: Tape, given: Value, training: Training) -> None:
    """Have a block's program, which has run nothing yet over ``given``, run its linear layers and norms as they are trained."""
    tape.manner = Manner(partial(linear, training=training), norms_frozen=training.weights != "trained")
    if not training.tracked:
        tape.constants.add(given)


def linear(
    tape: Tape, value: Value, width: Size, site: Site, *, reads: Size, bias: bool, training: Training
) -> Value:  # fmt: skip
    """A linear layer, as ``training`` says of its block."""
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
    """A frozen linear layer and, where it has one, its adapter; peft adds up, scales and casts in operators of their own."""
    adapts = training.adapts(site.module)
    with tape.owning() if adapts else nullcontext():
        made = _frozen_linear(tape, value, width, site, bias=bias, keeps_input=training.keeps_inputs)
    if not adapts:
        return made
    read = Site(f"input of the {site.name}'s adapter", LORA, site.module, At.ADAPTED)
    given = op.cast(tape, value, 4 if tape.autocast else e, read)
    return _plus_adapter(tape, given, made, site, width=width, reads=reads)


def _frozen_linear(tape: Tape, value: Value, width: Size, site: Site, *, bias: bool, keeps_input: bool) -> Value:
    """DeepSpeed's own layer for stage 3 saves its input, and does so when it is done."""
    made = op.tensor(tape, f"output of the {site.name}", e, T * width, site.source, Tag(Role.OUTPUT, site.module))
    if not bias:
        tape.product(made.store)
    backward = op.makes(f"gradient through the {site.name}", site.source, value)
    saved = (value.store,) if keeps_input else ()
    tape.add(
        site.name, (made,), saved, backward, of=(value,), place=site.place, saves_weight=True, late=keeps_input
    )  # fmt: skip
    return made


def _copied_linear(tape: Tape, value: Value, width: Size, site: Site, *, reads: Size, bias: bool) -> Value:
    """Autocast copies a frozen weight for every product, which saves the copy where a gradient has to pass."""
    wanted = (width, reads * width) if bias else (reads * width,)
    copies = [tape.make(Kind.WEIGHT_CASTS, f"16-bit copy of the frozen {site.name}", e * one, AUTOCAST) for one in wanted]
    given = op.cast(tape, value, e, Site(f"input of the {site.name}", site.source))
    made = op.tensor(tape, f"output of the {site.name}", e, T * width, site.source)
    if not bias:
        tape.product(made.store)
    backward = op.makes(f"gradient through the {site.name}", site.source, given)
    tape.add(site.name, (made,), (copies[-1],), backward, of=(value,))
    tape.drop(*copies)
    tape.release(given)
    return made


def _quantised(tape: Tape, value: Value, site: Site, training: Training, *, width: Size, reads: Size) -> Value:
    """A layer in four bits; peft leaves it to autocast to cast what its adapter reads."""
    adapted = training.adapts(site.module)
    with tape.owning() if adapted else nullcontext():
        made = quantised_linear(tape, value, site, training.quantize, width=width, reads=reads, clone=adapted)
    if not adapted:
        return made
    tape.hold(value.store)
    return _plus_adapter(tape, value, made, site, width=width, reads=reads)


def _plus_adapter(tape: Tape, given: Value, made: Value, site: Site, *, width: Size, reads: Size) -> Value:
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
