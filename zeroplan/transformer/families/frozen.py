"""Linear layers that are frozen, have a low-rank adapter from peft, or are held in four bits by bitsandbytes.

A frozen linear layer needs only its weight to make the gradient of its input. It saves its input only if an adapter reads it
too. A layer before the first trained weight saves nothing and has no backward, unless the embedding's output requires a gradient.
A layer in four bits saves only its packed weight: with many tokens it dequantises the weight into the compute dtype for the
forward, and again for the backward. A layer in eight bits saves its input, and dequantises the weight only for the backward.
"""

from contextlib import nullcontext
from functools import partial

from zeroplan.expr import Size, ceil
from zeroplan.ledger import Kind, Module, Role, Tag
from zeroplan.spec.adapter import Quantize
from zeroplan.spec.traits import MLP
from zeroplan.transformer.blocks import At
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.definition import Training
from zeroplan.transformer.families.operators import TEMPORARY
from zeroplan.transformer.families.sharded import between_matrices, ranks_of_adapter
from zeroplan.transformer.families.tape import Arriving, Beside, Mode, Site, Store, Tape, Value
from zeroplan.transformer.symbols import T, e, k, q, v, z

AUTOCAST = "torch 2.13, aten/src/ATen/autocast_mode.cpp, cached_cast"
LORA = "peft 0.21, tuners/lora/layer.py, Linear.forward"
FOLLOWED = "bitsandbytes 0.43.3, nn/modules.py, Linear4bit.set_compute_type; autograd/_functions.py, MatMul4Bit.forward"
LAYER_4BIT = "bitsandbytes 0.50, nn/modules.py, Linear4bit.forward"
FORWARD = "bitsandbytes 0.50, backends/cuda/ops.py, _dequant_linear_fallback"
BACKWARD = "bitsandbytes 0.50, autograd/_functions.py, MatMul4Bit.backward"
TORCHAO = "torchao 0.18, quantization/quantize_/workflows/nf4/nf4_tensor.py, NF4Tensor.get_original_weight"
GPTQ = "fms-acceleration 876e2ed, fms_acceleration_peft/gptqmodel/nn_modules/triton_utils/dequant.py, QuantLinearFunction"
QUANT_8BIT = "bitsandbytes 0.50, backends/cuda/ops.py, int8_vectorwise_quant"
PRODUCT_8BIT = "bitsandbytes 0.50, backends/default/ops.py, int8_scaled_mm; backends/cuda/ops.py, int8_mm_dequant"
LAYER_8BIT = "bitsandbytes 0.50, autograd/_functions.py, MatMul8bitLt"
DROPOUT = "torch 2.13, aten/src/ATen/native/cuda/Dropout.cu, native_dropout_cuda"
CLONE = "peft 0.21, tuners/lora/bnb.py, Linear4bit.forward"


def freeze(tape: Tape, given: Value, training: Training) -> None:
    """Set how the tape runs a block's linear layers and norms, as ``training`` describes, before the program runs on ``given``."""
    tape.mode = Mode(
        partial(linear, training=training),
        training.weights != "trained",
        training.stacked,
        wide_adapters=training.wide_adapters,
        quantised_experts=training.quantize if training.quantised_experts else "none",
    )
    if training.fused and {"q_proj", "k_proj", "v_proj"} <= set(training.layers):
        tape.mode = tape.mode._replace(projections=partial(_projections, training=training))
    if training.fused == "axolotl-lora" and set(MLP) <= set(training.layers):
        from zeroplan.transformer.families.fused_lora import gated_mlp  # noqa: PLC0415  few jobs have it

        tape.mode = tape.mode._replace(mlp=partial(gated_mlp, training=training))
    if not training.tracked:
        tape.untracked.add(given)


def _projections(tape: Tape, normal: Value, training: Training) -> tuple[Value, ...]:
    """Run the q, k and v projections as one autograd function."""
    from zeroplan.transformer.families.fused_lora import Projection, by_axolotl, projections  # noqa: PLC0415  few jobs have it

    layers = Projection("q projection", q), Projection("k projection", k), Projection("v projection", v)
    with tape.owning():
        run = by_axolotl if training.fused == "axolotl-lora" else projections
        return run(tape, normal, layers, training)


def linear(
    tape: Tape, value: Value, width: Size, site: Site, *, reads: Size, bias: bool, training: Training
) -> Value:  # fmt: skip
    """Run a linear layer of a block that is trained as ``training`` describes."""
    site = site if site.at else site._replace(at=At.LINEAR)
    if training.weights == "trained":
        return op.trained_linear(tape, value, width, site, reads=reads, bias=bias)
    if training.weights == "frozen" and training.narrow:
        given = op.cast(tape, value, e, Site(f"input of the {site.name}", site.source))
        made = frozen_linear(tape, given, width, site, reads=reads, bias=bias, keeps_input=training.keeps_inputs)
        tape.release(given)
        return made
    if training.weights == "frozen" and tape.autocast:
        return copied_linear(tape, value, width, site, reads=reads, bias=bias)
    with tape.inside(site.module):
        if training.fused and site.module is Module.O and training.adapts(site):
            from zeroplan.transformer.families.fused_lora import output  # noqa: PLC0415  few jobs have it

            return output(tape, value, width, site, training, reads=reads)
        if training.quantize != "none" and site.is_linear_layer:
            return _quantised(tape, value, site, training, width=width, reads=reads, bias=bias)
        return _adapted(tape, value, site, training, width=width, reads=reads, bias=bias)


def _adapted(tape: Tape, value: Value, site: Site, training: Training, *, width: Size, reads: Size, bias: bool) -> Value:
    """Run a frozen linear layer and its adapter, if any. peft casts, scales and adds in separate operators."""
    adapts = training.adapts(site)
    if adapts and training.runs:
        from zeroplan.transformer.families.many_adapters import beside_frozen  # noqa: PLC0415  few jobs have it

        return beside_frozen(tape, value, site, training, width=width, reads=reads, bias=bias)
    with tape.owning() if adapts else nullcontext():
        if training.copied:
            made = copied_linear(tape, value, width, site, reads=reads, bias=bias)
        else:
            made = frozen_linear(tape, value, width, site, reads=reads, bias=bias, keeps_input=training.keeps_inputs)
    if not adapts:
        return made
    read = Site(f"input of the {site.name}'s adapter", LORA, site.module, At.ADAPTED)
    given = op.cast(tape, value, 4 if tape.autocast or training.wide_adapters else e, read)
    return plus_adapter(tape, given, made, site, training, width=width, reads=reads, bias=bias)


def frozen_linear(
    tape: Tape, value: Value, width: Size, site: Site, *, reads: Size, bias: bool, keeps_input: bool
) -> Value:  # fmt: skip
    """Run a frozen linear layer, which saves only its weight. DeepSpeed's stage-3 layer also saves its input, after its product."""
    made = op.tensor(tape, f"output of the {site.name}", e, tape.rows * width, site.source, Tag(Role.OUTPUT, site.module))
    if not bias:
        tape.matrix_product(made.store)
    weight = Beside(f"weight of the {site.name}", e * reads * width, strided=True)
    tape.add(
        site.name, (made,), (value,) if keeps_input else (), op.makes_of_product(value, site), of=(value,), place=site.place,
        saves_weight=True, late=keeps_input, beside=(weight,),
    )  # fmt: skip
    return made


def copied_linear(tape: Tape, value: Value, width: Size, site: Site, *, reads: Size, bias: bool) -> Value:
    """Run a frozen fp32 layer under autocast, which copies the weight for every product. Autograd saves the copy."""
    wanted = (width, reads * width) if bias else (reads * width,)
    copies = [tape.make(Kind.WEIGHT_CASTS, f"16-bit copy of the frozen {site.name}", e * one, AUTOCAST) for one in wanted]
    given = op.cast(tape, value, e, Site(f"input of the {site.name}", site.source))
    made = op.tensor(tape, f"output of the {site.name}", e, tape.rows * width, site.source)
    if not bias:
        tape.matrix_product(made.store)
    backward = op.makes(f"gradient through the {site.name}", site.source, given)
    weight = (copies[-1],) if not tape.offloading else ()
    beside = (Beside(f"16-bit copy of the frozen {site.name}", e * reads * width, strided=True),)
    tape.add(site.name, (made,), weight, backward, of=(value,), beside=beside)
    tape.drop(*copies)
    tape.release(given)
    return made


def _quantised(tape: Tape, value: Value, site: Site, training: Training, *, width: Size, reads: Size, bias: bool) -> Value:
    """Run a layer in four bits and its adapter, if any. Autocast casts the adapter's input."""
    adapted = training.adapts(site)
    with tape.owning() if adapted else nullcontext():
        made = packed_linear(tape, value, site, training, width=width, reads=reads)
        made = _cloned(tape, made, site.name) if adapted and training.quantize not in ("gptq", "int8") else made
    if not adapted:
        return made
    tape.hold(value.store)
    return plus_adapter(tape, value, made, site, training, width=width, reads=reads, bias=bias)


def packed_linear(tape: Tape, value: Value, site: Site, training: Training, *, width: Size, reads: Size) -> Value:
    """Run a frozen layer in four or in eight bits. bitsandbytes casts to the compute dtype and back."""
    if training.quantize == "gptq":
        return _product_of_4_bits(tape, value, site, training, width=width, reads=reads, read=value)
    if training.quantize == "int8":
        return _in_8_bits(tape, value, site, width=width, reads=reads)
    given = op.cast(tape, value, e, Site(f"input of the {site.name}", LAYER_4BIT))
    made = _product_of_4_bits(tape, given, site, training, width=width, reads=reads, read=value)
    returned = op.cast(tape, made, value.dtype, Site(f"output of the {site.name}", LAYER_4BIT))
    tape.release(made, given)
    return returned


def plus_adapter(
    tape: Tape, given: Value, made: Value, site: Site, training: Training, *, width: Size, reads: Size, bias: bool = False
) -> Value:  # fmt: skip
    """Run the adapter on ``given`` and add its scaled output to ``made``; release both."""
    if training.dora != "none":
        from zeroplan.transformer.families.dora import plus_dora  # noqa: PLC0415  few jobs have it

        return plus_dora(tape, given, made, site, training, width=width, reads=reads, bias=bias)
    name, module = site.name, site.module
    read = dropped(tape, given, site) if training.dropout else given
    outer = low_rank(tape, read, site, training, width=width, reads=reads, only=training.dropout)
    scale = Site(f"{name}'s adapter: scale", LORA, module, At.ADAPTED)
    scaled = op.scaled(tape, outer, f"output of the {name}'s adapter, scaled", scale)
    add = op.add_in_place if training.quantize == "gptq" else op.add  # peft 0.13, tuners/lora/gptq.py, QuantLinear.forward
    total = add(tape, made, scaled, f"output of the {name} and its adapter", scale._replace(name=f"{name} and its adapter"))
    tape.release(made, scaled, given)
    if not training.wide_adapters:
        return total
    narrow = op.cast(tape, total, e, scale._replace(name=f"output of the {name} and its adapter"))
    tape.release(total)
    return narrow


def low_rank(
    tape: Tape, read: Value, site: Site, training: Training, *, width: Size, reads: Size, only: bool
) -> Value:  # fmt: skip
    """Run both matrices of an adapter. ``only``: no variable but the first product's argument holds ``read``."""
    name, module = site.name, site.module
    product = op.wide_linear if training.wide_adapters else op.trained_linear
    first, second = ranks_of_adapter(site) if tape.mode.sharded else (z, z)
    with tape.owning():
        inner = product(tape, read, first, Site(f"{name}'s adapter, A", LORA, module, At.ADAPTER_A), reads=reads)
    if only:
        tape.release(read)
    inner, beside = between_matrices(tape, inner, site) if tape.mode.sharded else (inner, ())
    with tape.owning():
        outer = product(tape, inner, width, Site(f"{name}'s adapter, B", LORA, module, At.ADAPTER_B), reads=second)
    tape.release(inner)
    tape.drop(*beside)
    return outer


def dropped(tape: Tape, given: Value, site: Site) -> Value:
    """Apply dropout to an adapter's input, in a copy. CUDA's kernel saves only a boolean mask."""
    name = f"input of the {site.name}'s adapter"
    made = op.tensor(tape, f"{name}, after dropout", given.dtype, given.shape, DROPOUT)
    mask = tape.make(op.TENSOR, f"{name}: mask of the dropout", given.shape, DROPOUT)
    backward = op.makes(f"gradient through the dropout of the {name}", DROPOUT, given)
    at = Site(f"{name}: dropout", DROPOUT, site.module, At.ADAPTED)
    tape.add(at.name, (made,), (mask,), backward, of=(given,), place=at.place)
    tape.drop(mask)
    return made


# --- four bits ---------------------------------------------------------------------------------------------------------------


def _product_of_4_bits(
    tape: Tape, given: Value, site: Site, training: Training, *, width: Size, reads: Size, read: Value
) -> Value:  # fmt: skip
    """Dequantise the whole weight and multiply; save nothing. A fused kernel can replace this only below 1,537 tokens.

    ``read``: the layer's input, whose 16-bit copy is ``given``.
    """
    name, matrix, quantize, packed = site.name, reads * width, training.quantize, training.quantize == "gptq"
    forward, back = (GPTQ, GPTQ) if packed else (FORWARD, BACKWARD)
    written = [dequantised(tape, name, matrix, GPTQ)] if packed else _written_for_product(tape, name, matrix, read, training)
    made = op.tensor(tape, f"output of the {name}", e, tape.rows * width, forward, Tag(Role.OUTPUT, site.module))
    tape.drop(*written)

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        for store in op.stores_of(kept):  # an attribute of the operator, which lives as long as the graph
            tape.hold(store)
        scales = scales_written_out(tape, name, matrix, quantize, copies=1)
        tape.scratch.append(dequantised(tape, name, matrix, back, quantize))
        tape.drop(*scales)
        return [(given, op.gradient(tape, given, f"gradient through the {name}", back))]

    kept = () if packed else _kept_of_4_bits(tape, read, given, training)
    tape.add(name, (made,), kept, backward, of=(given,), place=site.place)
    return made


def _written_for_product(tape: Tape, name: str, matrix: Size, read: Value, training: Training) -> list[Store]:
    """Dequantise a weight to 16 bits for the forward; return the tensors alive during the product.

    A layer that follows an fp32 input makes an fp32 weight, which autocast casts again.
    """
    scales = scales_written_out(tape, name, matrix, training.quantize, copies=2)
    written = [*scales, dequantised(tape, name, matrix, FORWARD, training.quantize)]
    if not _follows(tape, read, training):
        return written
    wide = tape.make(TEMPORARY, f"weight of the {name}, in fp32", 4 * matrix, FOLLOWED)
    tape.drop(*written)
    return [wide, tape.make(TEMPORARY, f"weight of the {name}, in fp32: cast by autocast", e * matrix, AUTOCAST)]


def _kept_of_4_bits(tape: Tape, read: Value, given: Value, training: Training) -> tuple[Value, ...]:
    """Return the input that bitsandbytes before 0.43.2 saves needlessly for a layer in four bits, in the compute dtype."""
    return ((read if _follows(tape, read, training) else given),) if training.four_bits_keep_inputs else ()


def _follows(tape: Tape, read: Value, training: Training) -> bool:
    return training.four_bits_follow_inputs and tape.autocast and tape.is_wide(read.dtype)


def dequantised(tape: Tape, name: str, matrix: Size, source: str, quantize: Quantize = "nf4") -> Store:
    """Return a weight dequantised from four bits.

    torchao's codes are then 64 bits wide, and variables hold their values before and after these are scaled, in 16 bits.
    """
    reason = f"weight of the {name}, written out of 4 bits"
    if quantize != "nf4-torchao":
        return tape.make(TEMPORARY, reason, e * matrix, source)
    steps = tape.make(TEMPORARY, f"{reason}: codes, values and scales", 12 * matrix + 4 * ceil(matrix, 64), TORCHAO)
    written = tape.make(TEMPORARY, reason, e * matrix, TORCHAO)
    tape.drop(steps)
    return written


def scales_written_out(tape: Tape, name: str, matrix: Size, quantize: Quantize, *, copies: int) -> list[Store]:
    """Dequantise the scales, if they are quantised themselves. The forward adds their mean in a copy."""
    if quantize != "nf4-double":
        return []
    reason, formula = f"scales of the {name}'s weight, fp32", 4 * ceil(matrix, 64)
    return [tape.make(TEMPORARY, reason, formula, FORWARD if copies == 2 else BACKWARD) for _ in range(copies)]


def _cloned(tape: Tape, value: Value, name: str) -> Value:
    made = op.run(tape, value, f"output of the {name}, copied", CLONE)
    tape.release(value)
    return made


# --- eight bits --------------------------------------------------------------------------------------------------------------


def _in_8_bits(tape: Tape, value: Value, site: Site, *, width: Size, reads: Size) -> Value:
    """Run a layer in eight bits: its input is quantised for the product, and kept as it is for the backward.

    Columns of inputs beyond the threshold, which are also multiplied in 16 bits, are left out: values decide how many there are.
    """
    name, matrix = site.name, reads * width
    half = tape.make(TEMPORARY, f"input of the {name}, in fp16", 2 * T * reads, LAYER_8BIT)
    numbers = [
        tape.make(TEMPORARY, f"input of the {name}: scales of its rows, fp32", 4 * T, QUANT_8BIT),
        tape.make(TEMPORARY, f"input of the {name}, in 8 bits", T * reads, QUANT_8BIT),
    ]
    absolute = tape.make(TEMPORARY, f"input of the {name}: absolute values", 2 * T * reads, QUANT_8BIT)
    beyond = tape.make(TEMPORARY, f"input of the {name}: what is beyond the threshold", T * reads, QUANT_8BIT)
    tape.drop(absolute, beyond, half)
    whole = tape.make(TEMPORARY, f"output of the {name}, in 32 bits", 4 * T * width, PRODUCT_8BIT)
    narrow = tape.make(TEMPORARY, f"output of the {name}, in fp16", 2 * T * width, PRODUCT_8BIT)
    made = op.tensor(tape, f"output of the {name}", value.dtype, T * width, PRODUCT_8BIT, Tag(Role.OUTPUT, site.module))
    tape.drop(whole, narrow, *numbers)

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        tape.hold(value.store)  # an attribute of the operator, which lives as long as the graph
        tape.scratch.append(
            tape.make(TEMPORARY, f"weight of the {name}, written out of 8 bits", value.dtype * matrix, LAYER_8BIT)
        )
        return [(value, op.gradient(tape, value, f"gradient through the {name}", LAYER_8BIT))]

    tape.add(name, (made,), (value,), backward, of=(value,), place=site.place)
    return made
