"""The time that a GPU computes in the forwards and backwards of one step."""

from collections.abc import Callable, Hashable
from typing import Literal, NamedTuple

from zeroplan.engines.precisions import widths
from zeroplan.errors import SpecError
from zeroplan.memo import recalled
from zeroplan.numeric import Distinct, Float, Int, distinct, longest
from zeroplan.spec.batch import Batch, BatchSpec, Columns
from zeroplan.spec.hardware import Dtype, GpuSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec, StepKernels
from zeroplan.steptime.efficiency import Efficiency, matrices_share
from zeroplan.steptime.launches import SOURCE as LAUNCHES
from zeroplan.steptime.launches import Launched, host_speed, launching
from zeroplan.steptime.parts import Part
from zeroplan.steptime.pointwise import Moved
from zeroplan.steptime.products import Machine, Passes, Product, casts, seconds
from zeroplan.steptime.scans import scanning
from zeroplan.steptime.tables import (
    CUDNN_BACKWARD_SHARE,
    WIDE_BACKWARD,
    attention_share,
    b200_backward,
    cudnn_forward,
    table_of,
)
from zeroplan.steptime.tables import SOURCE as TABLES
from zeroplan.steptime.work import Copies, Work, copies_of, of_one

#: A fused attention kernel multiplies five times in backward, twice in forward (Dao 2023, arXiv:2307.08691, section 4.1).
ATTENTION_BACKWARD = 2.5
#: Rate of its backward as a share of the forward's: 0.80 to 0.98 of 312 against 1.07 to 1.13 on A100 (github.com/MooreThreads/
#: SimuMax at 4dcaae51, configs/system, sdp_bwd and sdp_fwd, heads of 128 and more than 8 of them).
ATTENTION_BACKWARD_SHARE = 0.85
#: A matrix product's backward multiplies twice; with frozen weights once.
MATRIX_BACKWARD = 2.0
#: Rate of an older FlashAttention as a share of the table's, which has FlashAttention 2 on Ampere and Ada, 3 on Hopper.
#: FlashAttention 2 on Hopper: 370 of 650 TFLOP/s with heads of 128 (Shah et al. 2024, arXiv:2407.08608, figure 5). FlashAttention
#: 1 on Ampere: half of 2 (Dao 2023, arXiv:2307.08691, figure 4). FlashAttention 1 on Hopper: Triton's kernel of 2022, which does
#: not use Hopper's own instructions; fitted to MPT's 11 runs of the open half.
_OLDER = {("Hopper", 2): 0.57, ("Hopper", 1): 0.30, ("Ampere", 1): 0.62}
#: Rates of forward and backward in MXFP8 relative to bf16: heads of 192 and 4,096 tokens on GB300 (github.com/NVIDIA/cudnn-frontend
#: at 3929da2e, benchmark/sdpa_benchmark_training/results/dsv3/gb300, cuDNN 9.22).
_FP8_ATTENTION = (1.58, 1.33)
#: Architectures whose attention is cuDNN's where ``Running.flash`` is 3, and the widest head of their tables.
_BY_CUDNN, _NARROW_HEAD = ("Hopper", "Blackwell", "Blackwell Ultra"), 128
_POINTWISE = "reads and writes of each operator, counted: zeroplan/steptime/pointwise.py"


class Running(NamedTuple):
    """The kernels and overlaps of a step."""

    kernels: StepKernels = "eager"
    """How far memory-bound operators are fused."""
    flash: int = 2
    """The generation of FlashAttention; cuDNN's fused attention counts as the third."""
    operands: Dtype | None = None
    """The dtype of the blocks' products, if it is not that of the weights: fp8, fp4."""
    tensor_overlap: Literal["none", "backward", "all"] = "backward"
    """Which of Megatron's tensor-parallel collectives run beside products: those of column-parallel inputs in the backward (since
    2022), all (``--tp-comm-overlap``), or none."""
    block_scaled: bool = False
    """Products in fp8 use MXFP8, with a scale for every 32 elements."""
    expert_overlap: bool = False
    """The experts' all-to-alls overlap with another micro-batch's passes, as with ``--overlap-moe-expert-parallel-comm``."""
    fp8_attention: bool = False
    """Attention multiplies in MXFP8 on Blackwell, as with ``--fp8-dot-product-attention``."""


def running_of(recipe: RecipeSpec, architecture: str) -> Running:
    """Return the kernels that an engine runs by default.

    Transformer Engine fuses operators, and uses cuDNN's attention from Hopper on (pytorch/attention/dot_product_attention/utils.py,
    get_attention_backend). torch's ``scaled_dot_product_attention`` prefers cuDNN's kernel on Hopper, with cuDNN 9.15.1 or later,
    as wheels for CUDA 13 bring it (torch 2.13, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, check_prefer_cudnn_attention),
    and is FlashAttention 2 otherwise (aten/src/ATen/native/transformers/cuda/flash_attn).
    """
    if recipe.engine != "megatron":
        flash = 3 if architecture == "Hopper" and recipe.attention != "flash" else 2
        operands: Dtype | None = None if recipe.float8_recipe is None else "fp4" if recipe.float8_recipe == "nvfp4" else "fp8"
        kernels: StepKernels = "compiled" if "compiled-blocks" in recipe.fused_parts else "eager"
        return Running(recipe.step_kernels or kernels, flash, operands, block_scaled=recipe.float8_recipe == "mxfp8")
    return Running(recipe.step_kernels or "fused", 2 if architecture in ("Ampere", "Volta", "Turing", "Ada Lovelace") else 3)


class Computing(NamedTuple):
    """The parts that compute, and the windows in which collectives may overlap. [s]"""

    parts: tuple[Part, ...]
    forward_s: Float
    """The forwards of all micro-batches."""
    backward_s: Float
    """The backwards of all micro-batches, with recomputation."""
    model_flops: Float
    """Operations of one micro-batch's forward and backward, without recomputation. [FLOPs]"""
    columns_s: Float = 0.0
    """The forwards of the blocks' matrix products."""
    attention_s: Float = 0.0
    """The forwards of attention."""
    ends_s: Float = 0.0
    """The forwards outside blocks: the embedding, the last norm, the head and the loss."""
    ends_backward_s: Float = 0.0
    """The backwards outside blocks."""


def peak_flops_per_s(gpu: GpuSpec, recipe: RecipeSpec, operands: Dtype | None = None) -> float:
    """Return the dense peak in the dtype of matrix products; raises SpecError if the GPU has none. [FLOPs/s]"""
    name = operands or widths(recipe.precision).name
    figure = gpu.dense_flops_per_s.get(name)  # type: ignore[call-overload]  # the names of two tables
    if figure is None:
        there = ", ".join(one for one in ("bf16", "fp16", "fp32") if gpu.dense_flops_per_s.get(one))
        raise SpecError(f"GPU {gpu.name!r} does not multiply in {name}, but in {there}: use another --precision")
    return float(figure.value)


class Rates(NamedTuple):
    """A GPU's rates, the shares of them that a step reaches, and its kernels."""

    gpu: GpuSpec
    share: Efficiency
    running: Running
    recipe: RecipeSpec

    def machine(self, operands: Dtype | None) -> Machine:
        """Return the table, the peak and the shares for products in a dtype."""
        narrow = widths(self.recipe.precision).name != "fp32"
        dtype = operands or ("bf16" if narrow else "fp32")
        peak = peak_flops_per_s(self.gpu, self.recipe, operands)
        scaled = "mxfp8" if operands == "fp8" and self.running.block_scaled else operands
        reached = matrices_share(self.share, self.gpu.architecture, scaled, self.gpu.name)
        return Machine(self.table, dtype, peak, self.bandwidth, reached)

    def wide_machine(self) -> Machine:
        """Return the same for products in fp32; raises SpecError if the GPU has no such peak."""
        figure = self.gpu.dense_flops_per_s.get("fp32")
        if figure is None:
            raise SpecError(f"GPU {self.gpu.name!r} has no rate of products in fp32, which this model needs; use another --gpu")
        return Machine(self.table, "fp32", float(figure.value), self.bandwidth, self.share.matrices)

    @property
    def table(self) -> str:
        """The GPU whose measured tables stand for this one."""
        return table_of(self.gpu.name, self.gpu.architecture)

    @property
    def bandwidth(self) -> float:
        """The rate of memory-bound operators. [bytes/s]"""
        return self.share.bandwidth * self.gpu.memory_bandwidth_bytes_per_s.value


class Pieces(NamedTuple):
    """Times of one micro-batch before recomputation is added. [s]"""

    blocks: Float
    blocks_backward: Float
    last: Float
    """Forward of the last product of every block."""
    head: Float
    head_backward: Float
    attention: Float
    attention_backward: Float
    moved: Float
    moved_backward: Float
    ends: Float
    ends_backward: Float
    elements: Float
    """Elements of the matrices."""
    trained: Float
    """Elements that get a gradient."""
    model_flops: Float
    """Operations of forward and backward, without recomputation. [FLOPs]"""
    again: Float = 0.0
    """Forward of the modules in Megatron's ``--recompute-modules``."""
    layers: Float = 0.0
    launched: Float = 0.0
    """Kernels launched in the blocks' forward; the next three count theirs likewise."""
    launched_backward: Float = 0.0
    launched_ends: Float = 0.0
    launched_ends_backward: Float = 0.0
    tensors: Float = 0.0
    trained_tensors: Float = 0.0


class _Times(NamedTuple):
    """Times of one micro-batch; columns if there are several sizes. [s]"""

    matrices: Float
    matrices_backward: Float
    attention: Float
    attention_backward: Float
    moved: Float
    moved_backward: Float
    again: Float
    model_flops: Float
    columns: Float
    ends: Float
    ends_backward: Float
    launching: Float
    """The CPU's time of a forward, and of a backward."""
    launching_backward: Float


def computing(
    work_of: Callable[[Batch], Work], model: ModelSpec, recipe: RecipeSpec, batch: Batch, rates: Rates,
    mfu: float | None = None, *, key: Hashable = None,
) -> Computing:  # fmt: skip
    """Return the time of forward, backward and recomputation of a step; ``work_of``: the work of a batch of one micro-batch.

    ``mfu`` replaces the measured rates: all operations, including recomputed ones, run at that share of the dense peak. ``key``
    holds all inputs of the work except the batch; with a key, results are reused for other recipes.
    """
    again, steps, (sizes, batch_of) = _recomputation(model, recipe), batch.grad_accum_steps, _distinct_batches(batch)

    def pieces() -> tuple[Float, ...]:
        if len(sizes.values) < _COLUMN or not isinstance(batch.seq_len, int):
            return sizes.each(lambda size: _pieces(work_of(batch_of(size)), rates, mfu))
        return sizes.at_once(lambda column: _pieces(work_of(Columns(column, batch.seq_len, 1)), rates, mfu))

    found = pieces() if key is None else recalled(lambda: (computing, key, mfu, sizes.values, sizes.positions is None), pieces)
    one = _times(Pieces(*found), recipe, rates, again, mfu)
    one = _Times(*(sizes.spread(time) for time in one))
    forward = one.matrices + one.attention + one.moved
    back = one.matrices_backward + one.attention_backward + one.moved_backward + one.again
    if mfu is not None:
        return _computing(_given(one, steps, mfu), steps, forward, back, one)
    waits = longest(one.launching - forward, 0.0 * forward), longest(one.launching_backward - back, 0.0 * back)
    forward, back = forward + waits[0], back + waits[1]
    hidden = one.launching + one.launching_backward - waits[0] - waits[1]
    reason = "the CPU launches kernels ahead of the GPU, or makes it wait"
    launches = Part("launching kernels", steps * (waits[0] + waits[1]), steps * hidden, reason, LAUNCHES)
    return _computing((*_measured(one, steps, again, rates), launches), steps, forward, back, one)


def _computing(parts: tuple[Part, ...], steps: Int, forward: Float, back: Float, one: _Times) -> Computing:
    rest = (steps * each for each in (one.columns, one.attention, one.ends, one.ends_backward))
    return Computing(parts, steps * forward, steps * back, one.model_flops, *rest)


#: From so many sizes of micro-batch on, a column takes less time than one size after the other.
_COLUMN = 8
#: Larger than any sequence's number of tokens.
_TOKENS = 1 << 32


def _distinct_batches(batch: Batch) -> tuple[Distinct, Callable[[int], BatchSpec]]:
    """Return a column's distinct batch sizes, and a function to the batch of each; with several lengths, a size encodes both."""
    tokens = batch.seq_len
    if isinstance(tokens, int):
        return distinct(batch.micro_batch_size), lambda size: of_one(size, tokens)
    return distinct(batch.micro_batch_size * _TOKENS + tokens), lambda code: of_one(*divmod(code, _TOKENS))


def _given(one: _Times, steps: Int, mfu: float) -> tuple[Part, ...]:
    reason = f"at {mfu:.0%} of the dense peak, as asked"
    named = (
        ("forward", one.matrices + one.attention), ("backward", one.matrices_backward + one.attention_backward),
        ("recomputation", one.again),
    )  # fmt: skip
    return tuple(_part(name, steps * took, reason, "--mfu") for name, took in named)


def _measured(one: _Times, steps: Int, again: "_Recomputation", rates: Rates) -> tuple[Part, ...]:
    share, recipe = rates.share, rates.recipe
    peak = peak_flops_per_s(rates.gpu, recipe, rates.running.operands) / 1e12
    matrices = f"by shape, {share.matrices:.0%} of what products measured alone reach of {peak:,.0f} TFLOP/s"
    attention = "written out, with the scores that a mask hides" if recipe.attention == "eager" else _FLASH
    bandwidth = rates.gpu.memory_bandwidth_bytes_per_s.value / 1e12
    moves = f"{rates.running.kernels} kernels at {share.bandwidth:.0%} of {bandwidth:,.2f} TB/s"
    return (
        _part("matrix multiplications", steps * (one.matrices + one.matrices_backward), matrices, f"{TABLES}; {share.source}"),
        _part("attention", steps * (one.attention + one.attention_backward), attention, TABLES),
        _part("operators bound by memory", steps * (one.moved + one.moved_backward), moves, _POINTWISE),
        _part("recomputation", steps * one.again, again.reason, share.source),
    )


_FLASH = "a fused kernel by shape, without what a causal mask hides, a backward of 2.5 forwards"


class _Recomputation(NamedTuple):
    """How much of the blocks' forward the backward recomputes.

    torch's checkpoints stop once everything saved is there again, before the last product of a block (torch 2.13,
    torch/utils/checkpoint.py, ``early_stop``); Megatron-Core's run the whole forward.
    """

    blocks: float
    """Share of the blocks."""
    multiplies: bool
    """Matrix products and attention are recomputed too."""
    reason: str
    modules: tuple[str, ...] = ()
    """If not empty, only these modules are recomputed, in all blocks."""


def recomputed_modules(recipe: RecipeSpec) -> tuple[str, ...]:
    """Return the modules that Megatron's selective recomputation runs again; empty for other kinds of recomputation."""
    selective = recipe.engine == "megatron" and recipe.recompute == "selective"
    return tuple(recipe.megatron.recompute_modules.split(",")) if selective else ()


def _recomputation(model: ModelSpec, recipe: RecipeSpec) -> _Recomputation:
    if modules := recomputed_modules(recipe):
        named = "attention" if modules == ("core_attn",) else ", ".join(modules)
        return _Recomputation(0.0, multiplies=False, reason=f"{named} once more", modules=modules)
    again, layers, of = _WHAT_AGAIN[recipe.recompute], recipe.recompute_layers, model.num_hidden_layers
    multiplies = recipe.recompute == "full"
    if layers is None or layers >= of:
        return _Recomputation(float(recipe.recompute != "none"), multiplies, again)
    return _Recomputation(
        layers / of, multiplies, f"{again}, in {layers} of {of} blocks" if not multiplies else _FIRST.format(layers, of)
    )


_WHAT_AGAIN = {
    "none": "nothing is recomputed",
    "selective": "all but matrix multiplications and attention once more",
    "full": "the forward of every block once more",
}
_FIRST = "the forward of the first {} of {} blocks once more"


def _pieces(work: Work, rates: Rates, mfu: float | None) -> Pieces:
    """Return the times of products, attention and memory-bound operators from measured rates, or all at ``mfu``."""
    if mfu is not None:
        return _at_given_mfu(work, mfu * peak_flops_per_s(rates.gpu, rates.recipe, rates.running.operands), rates.recipe)
    on, head_on = rates.machine(rates.running.operands), rates.machine(None)
    accumulates = rates.recipe.engine == "megatron" and rates.recipe.megatron.gradient_accumulation_fusion
    blocks, head = (
        seconds(products, work.tokens, where, accumulates=accumulates)
        for products, where in ((work.products, on), (work.head, head_on))
    )
    last = seconds((one for one in work.products if one.last), work.tokens, on, accumulates=accumulates)
    rest = _shapeless(work.other_head_flops, head_on)
    other = _twice(_shapeless(work.other_flops, on)) if work.scan is None else scanning(work.scan, _of_scan(work, rates))
    scores = _shapeless(work.wide_flops, rates.wide_machine()) if _is_some(work.wide_flops) else 0.0
    cast = (0.0, 0.0) if rates.running.operands is None else casts(work.products, work.tokens)
    core, moved, ends = _core_seconds(work, rates), _moved(work.moved, rates), _moved(work.ends_moved, rates)
    return Pieces(
        blocks.forward + other.forward + cast[0] / rates.bandwidth + scores,
        blocks.backward + other.backward + cast[1] / rates.bandwidth,
        last.forward, head.forward + rest, head.backward + MATRIX_BACKWARD * rest, core.forward, core.backward, moved.forward,
        moved.backward, ends.forward, ends.backward, work.elements, work.trained, work.model_flops,
        seconds(work.again, work.tokens, on, accumulates=False).forward + _moved(work.again_moved, rates).forward,
        work.layers, *work.moved[2:], *work.ends_moved[2:], *work.tensors,
    )  # fmt: skip


def _of_scan(work: Work, rates: Rates) -> Machine:
    """Return the rates of linear attention: transformers' own code multiplies in fp32."""
    return rates.wide_machine() if work.scan is not None and work.scan.in_torch else rates.machine(None)


def _at_given_mfu(work: Work, rate: float, recipe: RecipeSpec) -> Pieces:
    """Return the times with every operation at one rate; recomputation includes the last product."""
    back = MATRIX_BACKWARD if recipe.attention == "eager" and recipe.engine == "megatron" else ATTENTION_BACKWARD
    blocks, head, core = work.blocks_flops / rate, work.head_flops / rate, work.core.flops / rate
    frozen = sum(one.flops for one in work.products if one.frozen) * work.tokens / rate
    frozen_head = sum(one.flops for one in work.head if one.frozen) * work.tokens / rate
    return Pieces(
        blocks, MATRIX_BACKWARD * blocks - frozen, 0.0, head, MATRIX_BACKWARD * head - frozen_head, core, back * core,
        0.0, 0.0, 0.0, 0.0, 0.0, 0.0, work.model_flops,
    )  # fmt: skip


def _times(one: Pieces, recipe: RecipeSpec, rates: Rates, again: _Recomputation, mfu: float | None) -> _Times:
    """Return the times of one micro-batch, with recomputation and the engine's copies added."""
    repeated: Float = again.blocks * one.moved
    if again.multiplies:
        repeated = repeated + again.blocks * (one.blocks + one.attention - _stops_early(recipe) * one.last)
    if again.modules:
        repeated = one.again + ("core_attn" in again.modules) * one.attention
    copied = Copies() if mfu is not None else copies_of(recipe)
    launched = Launched(one.layers, *one[-6:])
    quicker = rates.share.launching * host_speed(rates.gpu.name)
    cpu = launching(launched, recipe, rates.running.kernels, quicker, again=again.blocks)
    copying = copied.forward * one.elements + copied.trained_forward * one.trained
    copying_backward = copied.backward * one.elements + copied.trained_backward * one.trained
    return _Times(
        one.blocks + one.head, one.blocks_backward + one.head_backward, one.attention, one.attention_backward,
        one.moved + one.ends + copying / rates.bandwidth,
        one.moved_backward + one.ends_backward + copying_backward / rates.bandwidth,
        repeated, one.model_flops, one.blocks, one.head + one.ends, one.head_backward + one.ends_backward, *cpu,
    )  # fmt: skip


def _stops_early(recipe: RecipeSpec) -> bool:
    """Whether a recomputation ends before the last product; torchtitan's own checkpoints do not (``early_stop=False``)."""
    return recipe.engine != "megatron" and not (recipe.engine == "fsdp2" and recipe.fsdp2.are_torchtitans)


def _twice(forward: Float) -> Passes:
    return Passes(forward, MATRIX_BACKWARD * forward)


def _is_some(operations: Float) -> bool:
    """Whether there are operations; a column of sizes is all zero or nowhere."""
    return bool(operations if isinstance(operations, (int, float)) else operations.any())


def _shapeless(flops: Float, on: Machine) -> Float:
    """Return the time of operations without known shapes, at the rate of products of 4,096 on each side. [s]"""
    if not _is_some(flops):
        return 0.0
    one = Product(4096.0, 4096.0, 1.0, frozen=True)
    return flops / (one.flops * 4096.0) * seconds((one,), 4096.0, on, accumulates=False).forward


#: Depth at which a product's time is bound by computing.
_DEEP = 1024.0


def _core_seconds(work: Work, rates: Rates) -> Passes:
    """Return the time of attention. Eager attention runs narrow matrix products, and its scores go through memory. [s]"""
    core = work.core
    if not _is_some(core.flops):
        return Passes(0.0, 0.0)
    on = rates.machine(None)
    if _is_some(core.moved.kernels):
        one = Product(core.tokens, _DEEP, 1.0, frozen=True)  # its reads and writes are in ``core.moved``
        each = seconds((one,), core.tokens, on, accumulates=False).forward
        products = core.flops / (one.flops * core.tokens) * each
        moved = _moved(core.moved, rates)
        return Passes(products + moved.forward, MATRIX_BACKWARD * products + moved.backward)
    older = _OLDER.get((rates.gpu.architecture, rates.running.flash), 1.0)
    share = rates.share.attention * older * attention_share(rates.table, core.width, core.tokens, core.heads)
    forward, backward = core.flops / (share * on.peak), ATTENTION_BACKWARD * core.flops / (share * on.peak)
    if rates.running.flash < 3 or rates.gpu.architecture not in _BY_CUDNN:
        return Passes(forward, backward / ATTENTION_BACKWARD_SHARE)
    wide = WIDE_BACKWARD if core.width > _NARROW_HEAD else 1.0
    if rates.gpu.architecture == "Hopper":
        return Passes(forward / cudnn_forward(core.tokens), backward / (wide * CUDNN_BACKWARD_SHARE))
    quicker = _FP8_ATTENTION if rates.running.fp8_attention else (1.0, 1.0)
    back = wide * b200_backward(core.tokens, core.heads)  # Blackwell Ultra's is assumed to gain as much as its forward
    return Passes(forward / quicker[0], backward / (back * quicker[1]))


def _moved(traffic: Moved, rates: Rates) -> Passes:
    return Passes(traffic.forward / rates.bandwidth, traffic.backward / rates.bandwidth)


def _part(name: str, seconds: Float, reason: str, source: str) -> Part:
    return Part(name, seconds, 0.0, reason, source)
