"""Linear layers of quantisation-aware training: torchao rounds inputs to 8 bits and weights to 4 bits, and back, in every forward.

The arithmetic is that of separate operators. For a tensor with a gradient autograd saves an fp32 tensor of its size, from which the
backward makes the mask of what was clamped. The product saves the rounded input and the rounded weight in the compute dtype. So
a layer keeps its weight even where an engine shards it, and six bytes for each of its inputs and weights in 16 bits.

Sizes are those of torchao 0.18 without ``torch.compile``, with 256 weights to a scale. A frozen weight beside an adapter
(torchtune 0.7, ``modules/peft/lora.py``, ``QATLoRALinear``) keeps its rounded copy alone.

Axolotl rounds weights as torchao's kernels for four bits do (``Int4WeightFakeQuantizer``). Gradients flow to the scales and zero
points of a weight, too, so that autograd saves four tensors in fp32 instead of one.
"""

from functools import partial

from zeroplan.expr import Size, ceil
from zeroplan.ledger import Kind, Line, Role, Tag
from zeroplan.spec.batch import Batch
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.definition import Training
from zeroplan.transformer.families.operators import TEMPORARY, TENSOR
from zeroplan.transformer.families.tape import Arriving, Backward, Mode, Site, Store, Tape, Value
from zeroplan.transformer.params import layout
from zeroplan.transformer.symbols import T, V, e, h

ROUNDED = "torchao 0.18, quantization/quant_primitives.py, _do_fake_quantize_affine"
LAYER = "torchao 0.18, quantization/qat/linear.py, FakeQuantizedLinear.forward"
KEPT = "torchao 0.18, quantization/qat/fake_quantizer.py, IntxFakeQuantizer"
BY_KERNELS = "torchao 0.18, quantization/qat/fake_quantizer.py, Int4WeightFakeQuantizer"
GROUP = 256
"""Weights that share a scale: torchao 0.18, Int8DynActInt4WeightQATQuantizer."""
SMALL_GROUP = 32
"""The same in Axolotl 0.17, utils/schemas/quantization.py, if a file has no ``group_size``; larger groups take less."""


def mode_of(mode: Mode, training: Training | None, name: str) -> Mode:
    """Return how linear layers run: all of them, or beside adapters those that have one. ``name``: of the fused kernel."""
    return mode._replace(linear=partial(_linear, training=training, others=mode, by_kernels=name == "axolotl-qat"))


def _linear(
    tape: Tape, value: Value, width: Size, site: Site, *, reads: Size = h, bias: bool = False, training: Training | None,
    others: Mode, by_kernels: bool,
) -> Value:  # fmt: skip
    """Run a linear layer with rounded factors. The bias is added as it is."""
    if training is not None and others.linear is not None and not training.adapts(site):
        return others.linear(tape, value, width, site, reads=reads, bias=bias)
    made = product(tape, value, width, site, reads=reads, bias=bias, frozen=training is not None, by_kernels=by_kernels)
    if training is None:
        return made
    from zeroplan.transformer.families.frozen import plus_adapter  # noqa: PLC0415  few jobs have it

    tape.hold(value.store)
    return plus_adapter(tape, value, made, site, training, width=width, reads=reads)


def product(
    tape: Tape, value: Value, width: Size, site: Site, *, reads: Size, bias: bool, frozen: bool, by_kernels: bool
) -> Value:  # fmt: skip
    """Return the product of a rounded input and a rounded weight, whose copies it saves."""
    name, matrix = site.name, reads * width
    given = rounded(tape, value, f"input of the {name}", T * reads, T)
    what = f"weight of the {name}"
    weight = _weight_by_kernels(tape, what, matrix) if by_kernels else _weight(tape, what, matrix, frozen=frozen)
    made = op.tensor(tape, f"output of the {name}", e, T * width, site.source, Tag(Role.OUTPUT, site.module))

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        arriving: Arriving = []
        if not frozen:
            arriving = [(weight, tape.make(TEMPORARY, f"gradient of the rounded weight of the {name}", e * matrix, LAYER))]
        if tape.follows(given):
            arriving.append((given, op.gradient(tape, given, f"gradient through the {name}", LAYER)))
        if bias and not frozen:
            tape.weight_gradient(width)
        return arriving

    saved = (weight,) if frozen else (given, weight)
    tape.add(name, (made,), saved, backward, of=(given,) if frozen else None, place=site.place)
    tape.release(given, weight)
    return made


def rounded(tape: Tape, value: Value, what: str, elements: Size, scales: Size) -> Value:
    """Return a copy of an activation, rounded; autograd saves what the mask reads, and reciprocals of the scales."""
    made, saved = _made(tape, what, elements, scales, tracked=tape.follows(value))
    through = op.makes(f"gradient through the rounding of the {what}", ROUNDED, value)
    tape.add(f"rounding of the {what}", (made,), saved, op.in_turn(_steps_back(what, elements), through), of=(value,))
    tape.drop(*saved)
    return made


def _weight(tape: Tape, what: str, elements: Size, *, frozen: bool) -> Value:
    """Return a rounded copy of a weight; the backward of a trained one makes the weight's gradient."""
    made, saved = _made(tape, what, elements, ceil(elements, GROUP), tracked=not frozen)
    if frozen:
        return made
    backward = op.in_turn(_steps_back(what, elements), op.makes_weight_gradient(elements))
    tape.add(f"rounding of the {what}", (made,), saved, backward, of=None)
    tape.drop(*saved)
    return made


def _weight_by_kernels(tape: Tape, what: str, elements: Size) -> Value:
    """Return a rounded copy of a trained weight whose scales and zero points have gradients. Without them they are two steps less.

    Kept: the weight, its distance from the least of its group, that in units of the scale and rounded, and rounded about zero.
    """
    scales, saved = 4 * ceil(elements, SMALL_GROUP), tuple[Store, ...]()
    if tape.saving:
        names = ("in fp32", "above the least of its group", "in units of its scale", "about zero in these units")
        saved = tuple(tape.make(TENSOR, f"{what} {name}", 4 * elements, BY_KERNELS) for name in names)
        saved = (*saved, *(tape.make(TENSOR, f"{what}: {name}", scales, BY_KERNELS) for name in _OF_A_GROUP))
    steps = 8 if tape.saving else 16
    tape.drop(tape.make(TEMPORARY, f"{what}: steps of the rounding", steps * elements, BY_KERNELS))
    made = Value(tape.make(TENSOR, f"{what}, rounded", e * elements, BY_KERNELS), e, elements)
    backward = op.in_turn(_steps_back(what, elements, each=12, source=BY_KERNELS), op.makes_weight_gradient(elements))
    tape.add(f"rounding of the {what}", (made,), saved, backward, of=None)
    tape.drop(*saved)
    return made


_OF_A_GROUP = ("most of each group", "least of each group", "difference of both", "scales")


def _made(tape: Tape, what: str, elements: Size, scales: Size, *, tracked: bool) -> tuple[Value, tuple[Store, ...]]:
    """Return a rounded copy and, where autograd runs, the tensors that it saves."""
    saved: tuple[Store, ...] = ()
    if tracked and tape.saving:
        wide = tape.make(TENSOR, f"{what} in units of its scale, fp32", 4 * elements, ROUNDED)
        saved = (wide, tape.make(TENSOR, f"{what}: reciprocals of its scales", 4 * scales, ROUNDED))
    tape.drop(tape.make(TEMPORARY, f"{what}: steps of the rounding", (8 + e) * elements, ROUNDED))
    return Value(tape.make(TENSOR, f"{what}, rounded", e * elements, ROUNDED), e, elements), saved


def heads_in_pieces(tape: Tape, pieces: int) -> Store:
    """Return what rounding saves for a head that runs once for each of several pieces of tokens.

    The steps of a piece come on top. Until the backward of all pieces is done it stays whole, which is the most it takes.
    """
    reason = "rounded heads and inputs of all pieces, and what their masks read"
    return tape.make(TENSOR, reason, pieces * (4 + e) * h * V + (4 + e) * T * h, ROUNDED)


def round_head(tape: Tape, *, back: bool) -> None:
    """The steps of one such head; in the backward ten bytes of an element, with the gradient of its rounded copy."""
    what, size = ("rounding's backward", 10 * h * V) if back else ("rounding", (8 + e) * h * V)
    tape.drop(tape.make(TEMPORARY, f"steps of the {what} of a piece's head", size, ROUNDED))


def scales_kept(model: ModelSpec, batch: Batch, name: str) -> tuple[Line, ...]:
    """Return scales and zero points that each layer keeps from its last forward: of its tokens, and of its weight. [bytes]

    With Axolotl's weights (``name``: of the fused kernel) those of tokens alone.
    """
    tree, adapter = layout(model), model.adapter
    ends = [(1, one) for one in tree.tail if adapter is None and one.autocast]
    weights = [*((run.layers, one) for run in tree.runs for one in run.parameters), *ends]
    kept = [(count, one.numel) for count, one in weights if one.name.endswith(".base_layer.weight" if adapter else ".weight")
            and one.autocast and len(one.shape) > 1]  # fmt: skip
    layers, groups = sum(count for count, _ in kept), sum(count * -(-numel // GROUP) for count, numel in kept)
    groups = 0 if name == "axolotl-qat" else groups
    n_bytes = 8 * (layers * batch.micro_batch_size * batch.seq_len + groups)
    reason = "scales and zero points that rounded layers keep from their last forward"
    return (Line(Kind.TEMPORARY, n_bytes, reason, f"8·({layers}·T + {groups})", KEPT),)


def _steps_back(what: str, elements: Size, *, each: int = 10, source: str = ROUNDED) -> Backward:
    """The steps of a backward beside the gradient that it reads: together so many bytes of ``each`` element."""

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        tape.drop(tape.make(TEMPORARY, f"{what}: steps of the rounding's backward", (each - e) * elements, source))
        return []

    return backward
