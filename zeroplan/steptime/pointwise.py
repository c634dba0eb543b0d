"""Bytes moved by memory-bound operators: norms, rotary positions, activations, residual sums, the loss, copies of weights.

Every operator reads its inputs and writes its outputs once. The kernels decide how many operators there are: ``eager`` runs each
operator of the module's Python, ``fused`` runs one kernel for a norm, for rotary positions, for a gated activation and for the
loss (Transformer Engine, Liger), ``compiled`` fuses neighbours as well (torch.compile).

The counts are those of transformers 5.23 (``models/llama/modeling_llama.py``) and of the derivatives of its operators (torch 2.13,
``tools/autograd/derivatives.yaml``), at two bytes per element, and four where a norm or a loss computes in fp32. For operators
timed on an H100, the bytes are those that it moves in that time at 80 % of its bandwidth (tests/on_gpus/records/h100-operators.csv,
its largest shapes): eager norms, LayerNorm, rotary positions, gated products, GELU and loss. Eager rotary positions take twice the
time of their reads and writes, the loss 1.5 times; other GPUs are assumed to do the same.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from zeroplan.numeric import Float
from zeroplan.spec.family import LEARNED_POSITIONS, UNROTATED
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import StepKernels
from zeroplan.transformer.parameters import Parameter

#: Activation functions that transformers writes out in Python.
_WRITTEN_OUT = ("gelu_new", "gelu_fast")


class Moved(NamedTuple):
    """Bytes and kernels of a forward and a backward: of one micro-batch on a rank, or of an operator per element."""

    forward: Float = 0.0
    backward: Float = 0.0
    kernels: Float = 0.0
    backward_kernels: Float = 0.0

    def plus(self, one: "Moved", width: Float, times: float = 1.0) -> "Moved":
        """Return the sum with ``times`` operators on ``width`` elements."""
        return Moved(
            self.forward + times * width * one.forward, self.backward + times * width * one.backward,
            self.kernels + times * one.kernels, self.backward_kernels + times * one.backward_kernels,
        )  # fmt: skip

    def and_of(self, other: "Moved") -> "Moved":
        """Return the sum."""
        return Moved(*(one + two for one, two in zip(self, other, strict=True)))


#: Bytes per element of each operator, by kernels.
RMS_NORM: dict[StepKernels, Moved] = {
    "eager": Moved(41, 98, 8, 18), "fused": Moved(4, 8, 1, 2), "compiled": Moved(4, 8, 1, 2),
}  # fmt: skip
LAYER_NORM_MOVED = Moved(5.3, 14.5, 1, 2)
_RESIDUAL: dict[StepKernels, Moved] = {"eager": Moved(6, 6, 1, 1), "fused": Moved(6, 6, 1, 1), "compiled": Moved(2, 2, 0, 0)}
ROTARY: dict[StepKernels, Moved] = {"eager": Moved(33, 35, 10, 14), "fused": Moved(4, 4, 1, 1), "compiled": Moved(4, 4, 1, 1)}
GATED: dict[StepKernels, Moved] = {"eager": Moved(9, 17, 2, 3), "fused": Moved(6, 10, 1, 1), "compiled": Moved(6, 10, 1, 1)}
ACTIVATION = Moved(4, 5.5, 1, 1)
_WRITTEN = Moved(34, 50, 8, 12)
LOGITS: dict[StepKernels, Moved] = {"eager": Moved(23, 24, 3, 4), "fused": Moved(2, 6, 1, 1), "compiled": Moved(4, 4, 2, 1)}
#: A bias's gradient reads the gradient of the output again. [bytes per element]
_BIAS_BACKWARD = 2.0
#: Tokens are gathered for experts and scattered back: 2.9 ps per element each way on a B200 (github.com/MooreThreads/SimuMax at
#: 4dcaae51, configs/system/b200_bf16_ceperm.json, permute_fwd and permute_bwd; Transformer Engine 2.11).
_ROUTED = Moved(17.8, 17.5, 6, 6)
#: Under expert parallelism, the dispatcher sorts received tokens by expert, and results back (Megatron-LM 2026-08,
#: megatron/core/transformer/moe/token_dispatcher.py, ``sort_chunks_by_idxs`` for several experts on a rank).
_SORTED = Moved(8, 8, 2, 2)
#: Transposes between the layouts of heads.
#: Least time of a fused loss per logit: on a B200 it reaches 2.4 TB/s (the same file, ce_fusion). [s]
_FUSED_LOSS_S = 3.3e-12
_LAYOUT: dict[StepKernels, Moved] = {"eager": Moved(4, 4, 1, 1), "fused": Moved(0, 0, 0, 0), "compiled": Moved(0, 0, 0, 0)}


#: The embedding; its kernels include those that make the tables of positions and the mask.
_EMBEDDING = Moved(4, 4, 22, 2)


class Split(NamedTuple):
    """How ranks share a micro-batch: the tokens on this rank, and the ranks that split widths and norms."""

    tokens: Float
    tp: int = 1
    sequence: bool = False
    """Tensor-parallel ranks split norms and residual sums too."""
    ep: int = 1
    bytes_per_s: float = 0.0
    """Rate of memory-bound operators, for those that cannot use all of it."""


def _of_part(kernels: StepKernels, part: str, fused: tuple[str, ...]) -> StepKernels:
    """Return ``fused`` for a part in ``RecipeSpec.fused_parts``, else the step's kernels."""
    return "fused" if part in fused and kernels == "eager" else kernels


def _norm(model: ModelSpec, kernels: StepKernels, fused: tuple[str, ...]) -> Moved:
    if model.traits.layer_norms:
        return LAYER_NORM_MOVED
    part = "liger-rms-norm" if "liger-rms-norm" in fused else "rms-norm"
    return RMS_NORM[_of_part(kernels, part, fused)]


def of_block(
    model: ModelSpec,
    kernels: StepKernels,
    split: Split,
    *,
    experts: bool,
    gated: bool | None = None,
    fused: tuple[str, ...] = (),
) -> Moved:
    """Return the bytes of one block's operators except products and attention; ``fused``: parts with their own fused kernel."""
    tokens, tp = split.tokens, split.tp
    hidden = tokens * model.hidden_size / (tp if split.sequence else 1)
    norm = _norm(model, kernels, fused)
    queries = tokens * model.num_attention_heads * model.head_dim / tp
    keys = tokens * model.num_key_value_heads * model.head_dim / tp
    total = Moved().plus(norm, hidden, model.traits.norms).plus(_RESIDUAL[kernels], hidden, 2)
    total = total.plus(_LAYOUT[kernels], queries)
    if model.head_norms:
        total = total.plus(norm, queries).plus(norm, keys)
    if model.family not in UNROTATED:
        total = total.plus(ROTARY[_of_part(kernels, "rope", fused)], queries + keys)
    if model.mla is not None:
        total = total.plus(_RESIDUAL[kernels], queries, 2)  # heads are concatenated from two parts
    if model.attention_bias or model.family in LEARNED_POSITIONS:
        total = total._replace(backward=total.backward + _BIAS_BACKWARD * (queries + 2 * keys + hidden))
    return total.and_of(_mlp(model, _of_part(kernels, "liger-swiglu", fused), split, experts=experts, gated=gated))


def _mlp(model: ModelSpec, kernels: StepKernels, split: Split, *, experts: bool, gated: bool | None) -> Moved:
    moe = model.moe if experts else None
    if gated is None:
        gated = model.traits.gated
    act = GATED[kernels] if gated else _WRITTEN if kernels == "eager" and model.activation in _WRITTEN_OUT else ACTIVATION
    if moe is None:
        width = split.tokens * model.intermediate_size / split.tp
        biases = _BIAS_BACKWARD * (width + split.tokens * model.hidden_size) if model.mlp_bias else 0.0
        found = Moved().plus(act, width)
        return found._replace(backward=found.backward + biases)
    routed = split.tokens * moe.num_experts_per_tok / (split.tp if split.sequence else 1)
    shared = split.tokens * moe.num_shared_experts / split.tp
    found = Moved().plus(act, (routed + shared) * moe.moe_intermediate_size)
    found = found.plus(_ROUTED, routed * model.hidden_size)
    return found.plus(_SORTED, routed * model.hidden_size) if 1 < split.ep < moe.num_experts else found


def of_joining(model: ModelSpec, kernels: StepKernels, split: Split) -> Moved:
    """Return the bytes of what a module for later tokens does before its layer: two norms, and its two inputs side by side."""
    hidden = split.tokens * model.hidden_size / (split.tp if split.sequence else 1)
    return Moved().plus(_norm(model, kernels, ()), hidden, 2).plus(_RESIDUAL[kernels], 2 * hidden)


def of_modules(
    model: ModelSpec, kernels: StepKernels, split: Split, modules: tuple[str, ...], *, experts: bool, gated: bool
) -> Moved:  # fmt: skip
    """Return the bytes that Megatron's recomputed modules move in one block, except products and attention."""
    total = Moved()
    if "layernorm" in modules:
        total = total.plus(_norm(model, kernels, ()), split.tokens * model.hidden_size / (split.tp if split.sequence else 1), 2)
    if ("moe" if experts else "mlp") in modules:
        return total.and_of(_mlp(model, kernels, split, experts=experts, gated=gated))
    if model.moe is not None and experts and "moe_act" in modules:
        routed = split.tokens * model.moe.num_experts_per_tok / (split.tp if split.sequence else 1)
        total = total.plus(GATED[kernels] if gated else ACTIVATION, routed * model.moe.moe_intermediate_size)
    return total


class Adapting(NamedTuple):
    """peft's operators around one LoRA layer, per element of the layer's input and output."""

    input: Moved
    output: Moved


#: Counted in peft 0.21 (``tuners/lora/layer.py``, ``Linear.forward``) and its derivatives, without the products. In 16 bits: peft
#: scales the result and adds it; the backward scales again, and sums two gradients of the input. Under autocast the input is cast
#: to fp32 and back, and both matrices and their gradients are cast. In fp32: casts around fp32 products.
_ADAPTING = {
    "plain": Adapting(Moved(0, 6, 0, 1), Moved(10, 4, 2, 1)),
    "autocast": Adapting(Moved(12, 18, 3, 4), Moved(10, 4, 3, 2)),
    "fp32": Adapting(Moved(6, 12, 1, 2), Moved(24, 20, 3, 3)),
}
#: Dropout of the input: a read, a write, and a mask of one byte.
_DROPPED = {"plain": Moved(5, 5, 1, 1), "autocast": Moved(9, 9, 1, 1), "fp32": Moved(9, 9, 1, 1)}
#: DoRA's operators beside these (peft 0.21, ``tuners/lora/dora.py``; read, not run), per element of the layer's output, of its
#: weight, and of the square of its inputs: five pointwise operators on the output and their derivatives; the change of the weight,
#: which is made, scaled, added and reduced to norms; and the identity.
_DORA_OUTPUT = {"plain": Moved(14, 34, 3, 6), "autocast": Moved(38, 60, 4, 8)}
_DORA_WEIGHT = {"plain": Moved(14, 0, 8, 2), "autocast": Moved(38, 0, 11, 2)}
_DORA_IDENTITY = {"plain": Moved(4, 0, 2, 0), "autocast": Moved(12, 0, 3, 0)}
#: bitsandbytes dequantises a 4-bit weight to 16 bits, with a scale per 64 elements, in the forward and again in the backward (0.50,
#: ``autograd/_functions.py``, MatMul4Bit). Such a layer took 5 launches more than a plain one in the forward and 8 more in the
#: backward: QLoRA beside LoRA of Llama 3.1 8B, 224 layers, DDP and FSDP2 (tests/on_gpus/records). With 8-bit scales, two kernels
#: dequantise these first. An 8-bit weight is dequantised in the backward only (read, not run).
#: torchao's NF4 runs one operator after the other, on codes of 64 bits (read, not run).
_UNPACKED = {"nf4": Moved(2.57, 2.57, 5, 8), "nf4-double": Moved(2.7, 2.7, 7, 10), "gptq": Moved(2.57, 2.57, 5, 8),
             "nf4-torchao": Moved(29, 29, 18, 21),
             "int8": Moved(0, 3, 7, 3)}  # fmt: skip
#: peft adds an adapter to the whole weight of all experts, and once more to check its shape; the backward reads the sum's gradient
#: for both matrices (``ParamWrapper``). Read, not run. Both weights are counted where one alone has an adapter.
_MERGED = Moved(16, 4, 6, 7)
#: Autocast's copy of a frozen fp32 weight: it reads four bytes of each number and writes two. Computed, not measured.
_COPIED = Moved(6, 0, 1, 0)
#: With 4-bit weights, norms are fp32: the residual stream takes twice the bytes, and five layers cast their input.
_WIDE_RESIDUAL, _WIDE_INPUT = Moved(12, 12, 0, 0), Moved(30, 30, 5, 5)


def of_adapters(model: ModelSpec, parameters: Iterable[Parameter], tokens: Float, *, autocast: bool) -> Moved:
    """Return the bytes moved by one block's adapters and by dequantising its 4-bit weights."""
    adapter, total = model.adapter, Moved()
    if adapter is None:
        return total
    how = "fp32" if adapter.compute == "fp32" else "autocast" if autocast else "plain"
    each = _ADAPTING[how]
    for one in parameters:
        if model.is_quantised and one.autocast and one.frozen:  # linear weights, with their shape in 16 bits
            total = total.plus(_UNPACKED[adapter.quantize], one.numel)
        elif autocast and model.frozen_as_trained and one.autocast and one.frozen:
            total = total.plus(_COPIED, one.numel)
        elif ".experts." in one.name:
            total = total.plus(_MERGED, one.numel) if ".base_layer." in one.name else total
        elif ".lora_A." in one.name:
            total = total.plus(each.input, tokens * one.shape[1])
            total = total.plus(_DROPPED[how], tokens * one.shape[1]) if adapter.dropout else total
        elif ".lora_B." in one.name:
            total = total.plus(each.output, tokens * one.shape[0])
            total = total.plus(_DORA_OUTPUT[how], tokens * one.shape[0]) if adapter.dora != "none" else total
    total = _of_dora(total, list(parameters), how) if adapter.dora != "none" else total
    if model.upcasts_norms and (autocast or model.is_quantised):
        total = total.plus(_WIDE_RESIDUAL, tokens * model.hidden_size).plus(_WIDE_INPUT, tokens * model.hidden_size)
    return total


def _of_dora(total: Moved, parameters: Sequence[Parameter], how: str) -> Moved:
    """Return ``total`` with the bytes that the changes of adapted weights move."""
    first = next((one for one in parameters if ".lora_A." in one.name), None)
    for one in parameters:
        if ".lora_A." in one.name:
            first = one
            total = total.plus(_DORA_IDENTITY[how], one.shape[1] ** 2)
        elif ".lora_B." in one.name and first is not None:
            total = total.plus(_DORA_WEIGHT[how], one.shape[0] * first.shape[1])
    return total


def of_ends(model: ModelSpec, kernels: StepKernels, split: Split, fused: tuple[str, ...] = ()) -> Moved:
    """Return the bytes that the last norm, the loss and the embedding move."""
    hidden = split.tokens * model.hidden_size / (split.tp if split.sequence else 1)
    how = _of_part(kernels, "cross-entropy", fused)
    logits, loss = split.tokens * model.vocab_size / split.tp, LOGITS[how]
    if how == "fused":
        slower = max(1.0, _FUSED_LOSS_S * split.bytes_per_s / (loss.forward + loss.backward))
        loss = loss._replace(forward=slower * loss.forward, backward=slower * loss.backward)
    return Moved().plus(_norm(model, kernels, fused), hidden).plus(loss, logits).plus(_EMBEDDING, hidden)
