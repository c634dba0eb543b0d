"""The time that a GPU computes in one step, in forward, backward and the optimizer's step."""

from typing import NamedTuple

from zeroplan.engines.account import Account
from zeroplan.engines.optimizers import implementation_of
from zeroplan.engines.precisions import widths
from zeroplan.errors import SpecError
from zeroplan.ledger import Kind, bytes_by_kind
from zeroplan.numeric import Float, Int, longest
from zeroplan.spec.batch import Batch
from zeroplan.spec.hardware import GpuSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import ADAM, RecipeSpec
from zeroplan.steptime.efficiency import HOST_BYTES_PER_S, HOST_SOURCE, Efficiency
from zeroplan.steptime.parts import Does, Part
from zeroplan.steptime.work import ATTENTION_BACKWARD, MATRIX_BACKWARD, SAVED_BACKWARD, SAVED_FORWARD, Work

#: Reads and writes of one element in a step of Adam. Fused: weight, both moments read and written, gradient read. In lists or
#: tensor by tensor every operator goes through memory (torch 2.13, optim/adamw.py, _multi_tensor_adamw: decay 2, lerp 3, mul 2,
#: addcmul 3, sqrt 2, div 2, add 2, addcdiv 4).
_FUSED_ACCESSES, _UNFUSED_ACCESSES = 7.0, 20.0
_STEP_SOURCE = "torch 2.13, torch/optim/adamw.py, _multi_tensor_adamw and _fused_adamw"
_PASSES = "forward writes and reads each saved tensor, backward reads it and moves two gradients"


class Kernel(NamedTuple):
    """How attention computes."""

    fused: bool
    backward: float
    """The time of its backward, in forwards."""
    reason: str


#: Dao 2023, arXiv:2307.08691, section 4.1.
FUSED = Kernel(fused=True, backward=ATTENTION_BACKWARD, reason="without what a causal mask hides, a backward of 2.5 forwards")
#: Eager attention: matrix products like others, without regard to the mask.
WRITTEN_OUT = Kernel(
    fused=False, backward=MATRIX_BACKWARD, reason="scores written out, those that a mask hides too, a backward of 2 forwards"
)


class Computing(NamedTuple):
    """The parts that compute, and the windows in which collectives may overlap. [s]"""

    parts: tuple[Part, ...]
    forward_s: Float
    """The forwards of all micro-batches."""
    backward_s: Float
    """The backwards of all micro-batches, with recomputation."""


def peak_flops_per_s(gpu: GpuSpec, recipe: RecipeSpec) -> float:
    """Return the dense peak in the dtype of matrix products; raises SpecError if the GPU has none. [FLOPs/s]"""
    name = widths(recipe.precision).name
    figure = gpu.dense_flops_per_s.get(name)  # type: ignore[call-overload]  # the names of two tables
    if figure is None:
        raise SpecError(f"GPU {gpu.name!r} has no {name} rate in its entry, so no time can be given; use another --precision")
    return float(figure.value)


def computing(
    asked: Work, model: ModelSpec, recipe: RecipeSpec, batch: Batch, gpu: GpuSpec, share: Efficiency, mfu: float | None,
    *, kernel: Kernel = FUSED,
) -> Computing:  # fmt: skip
    """Return the time of forward, backward and recomputation of a step.

    ``mfu`` replaces the fitted shares: all operations, including recomputed ones, at that share of the dense peak.
    """
    backward = MATRIX_BACKWARD if model.adapter is None else MATRIX_BACKWARD - 1  # frozen weights have no gradients
    peak, again = peak_flops_per_s(gpu, recipe), _recomputation(model, recipe)
    if mfu is not None:
        said = f"at {mfu:.0%} of the dense peak, as asked"
        return _at_given_mfu(asked, (backward, kernel.backward), again, mfu * peak, batch.grad_accum_steps, said)
    rates = _Rates(peak, gpu.memory_bandwidth_bytes_per_s.value, share)
    return _at_fitted_shares(asked, (backward, kernel), again, rates, batch.grad_accum_steps)


class _Recomputation(NamedTuple):
    """What of the blocks' forward the backward recomputes."""

    blocks: float
    """The share of the blocks that it recomputes."""
    multiplies: bool
    """It recomputes matrix products and attention too."""
    reason: str
    core: bool = False
    """It recomputes all of attention, and nothing else."""


def _recomputation(model: ModelSpec, recipe: RecipeSpec) -> _Recomputation:
    if recipe.engine == "megatron" and recipe.recompute == "selective":
        return _Recomputation(0.0, multiplies=False, reason="attention once more", core=True)
    said, layers, of = _WHAT_AGAIN[recipe.recompute], recipe.recompute_layers, model.num_hidden_layers
    multiplies = recipe.recompute == "full"
    if layers is None or layers >= of:
        return _Recomputation(float(recipe.recompute != "none"), multiplies, said)
    return _Recomputation(
        layers / of, multiplies, f"{said}, in {layers} of {of} blocks" if not multiplies else _FIRST.format(layers, of)
    )


def _at_given_mfu(
    asked: Work, backward: tuple[float, float], again: _Recomputation, rate: float, steps: Int, reason: str
) -> Computing:  # fmt: skip
    """Return the time with every operation at one rate; ``backward``: the time of matrices and of attention in forwards."""
    matrices, attention = asked.blocks_flops + asked.head_flops, asked.attention_flops
    times = again.blocks if again.multiplies else 0.0
    forward = steps * (matrices + attention) / rate
    back = steps * (backward[0] * matrices + backward[1] * attention) / rate
    repeated = steps * (times * (asked.blocks_flops + attention) + again.core * attention) / rate
    named = (("forward", forward), ("backward", back), ("recomputation", repeated))
    return Computing(tuple(_part(name, took, reason, "--mfu") for name, took in named), forward, back + repeated)


class _Rates(NamedTuple):
    """Rates of a data sheet, and the shares of them that a GPU reaches."""

    peak: float
    bandwidth: float
    share: Efficiency


def _at_fitted_shares(asked: Work, how: tuple[float, Kernel], again: _Recomputation, rates: _Rates, steps: Int) -> Computing:
    """Return the time of matrix products, attention and memory-bound operators, each at its share of the data sheet's rate."""
    share, bandwidth = rates.share, rates.share.bandwidth * rates.bandwidth
    backward, kernel = how
    reached = share.attention if kernel.fused else share.matrices
    matrices = longest((asked.blocks_flops + asked.head_flops) / (share.matrices * rates.peak), asked.weights_bytes / bandwidth)
    attention = asked.attention_flops / (reached * rates.peak)
    moved = (asked.blocks_bytes + asked.head_bytes) / bandwidth
    repeated: Float = again.blocks * SAVED_FORWARD * asked.blocks_bytes / bandwidth
    if again.multiplies:
        repeated = again.blocks * (asked.blocks_flops / (share.matrices * rates.peak) + attention) + repeated
    if again.core:
        repeated = attention + SAVED_FORWARD * asked.core_bytes / bandwidth
    at = f"of the dense peak of {rates.peak / 1e12:,.0f} TFLOP/s"
    moves = f"{_PASSES}; {share.bandwidth:.0%} of {rates.bandwidth / 1e12:,.2f} TB/s"
    parts = (
        _part("matrix multiplications", steps * (1 + backward) * matrices, f"{share.matrices:.0%} {at}", share.source),
        _part("attention", steps * (1 + kernel.backward) * attention, f"{reached:.0%} {at}, {kernel.reason}", share.source),
        _part("operators bound by memory", steps * (SAVED_FORWARD + SAVED_BACKWARD) * moved, moves, share.source),
        _part("recomputation", steps * repeated, again.reason, share.source),
    )
    forward = matrices + attention + SAVED_FORWARD * moved
    back = backward * matrices + kernel.backward * attention + SAVED_BACKWARD * moved + repeated
    return Computing(parts, steps * forward, steps * back)


_WHAT_AGAIN = {
    "none": "nothing is recomputed",
    "selective": "all but matrix multiplications and attention once more",
    "full": "the forward of every block once more",
}
_FIRST = "the forward of the first {} of {} blocks once more"


def _part(name: str, seconds: Float, reason: str, source: str) -> Part:
    return Part(name, seconds, 0.0, reason, source)


def stepping(
    account: Account, recipe: RecipeSpec, gpu: GpuSpec, share: Efficiency, *, on_host: bool, ranks_per_node: int
) -> Part:
    """Return the time of the optimizer's step: what it reads and writes, at the rate of that memory.

    Optimizers other than Adam read and write their states and the weights once, and read the gradients.
    """
    lines = account.host if on_host else account.states
    sizes = bytes_by_kind(lines)
    states = sizes.get(Kind.OPTIMIZER_STATE, 0) + sizes.get(Kind.PARAMETERS, 0)
    once = 2.0 * states + sizes.get(Kind.GRADIENTS, 0)
    impl = implementation_of(recipe)
    times = 1.0 if impl == "fused" or recipe.optimizer not in ADAM else _UNFUSED_ACCESSES / _FUSED_ACCESSES
    if on_host:
        rate, where, source = HOST_BYTES_PER_S / ranks_per_node, "on the CPU, bound by the host's memory", HOST_SOURCE
    else:
        reached = share.bandwidth if share.stepping is None else share.stepping
        rate, where, source = reached * gpu.memory_bandwidth_bytes_per_s.value, "bound by memory", _STEP_SOURCE
    part = _part("optimizer step", times * once / rate, f"{recipe.optimizer} ({impl}), {where}", source)
    return part._replace(does=Does.STEPPING)
