"""The memory of whole 4-bit or 8-bit weights, with everything that is needed to dequantise them.

bitsandbytes packs two weights to a byte and keeps a scale for every 64 weights. With double quantisation scales take a byte
each, and 256 of them share one fp32 scale. Every weight has tables of codes. transformers leaves the head and the embeddings
unquantised. Biases and norms are never quantised.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from zeroplan.engines.account import Symbol
from zeroplan.engines.formulas import sized
from zeroplan.ledger import Kind, Line
from zeroplan.numeric import ceil_div
from zeroplan.spec.adapter import Quantize
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.parameters import Layout, Parameter
from zeroplan.transformer.params import layout

PACKED = "bitsandbytes 0.50, functional.py, quantize_4bit"
TABLES = "bitsandbytes 0.50, functional.py, QuantState"
PREPARED = "peft 0.21, utils/other.py, prepare_model_for_kbit_training"
NARROWED = "trl 0.11.4, trainer/utils.py, peft_module_casting_to_bf16"
GPTQ = "fms-acceleration 876e2ed, fms_acceleration_peft/gptqmodel/nn_modules/qlinear/qlinear_tritonv2.py, QuantLinear"
EIGHT = "bitsandbytes 0.50, nn/modules.py, Int8Params._quantize"
BIAS = "bitsandbytes 0.50, nn/modules.py, Linear4bit.forward"

_CODE = 16 * 4  # the sixteen values of NF4, fp32, for every weight (functional.py, get_4bit_type)
_SCALES_CODE = 256 * 4  # the value of each byte among scales, fp32 (create_dynamic_map)
_MEAN = 4  # of the scales, subtracted before they are quantised


class Counts(NamedTuple):
    """Sizes of a model's frozen parameters: weights in four bits, and elements of the others."""

    packed: int
    """Bytes."""
    blocks: int
    """Number of blocks of 64 elements, each with a scale."""
    scales_blocks: int
    """Number of blocks of 256 scales."""
    weights: int
    biases: int
    """Biases of quantised layers, which bitsandbytes casts to the compute dtype."""
    norms: int
    others: int
    """Elements of embedding and head."""
    groups: int = 0
    """GPTQ's groups: each has a scale and a zero."""
    inputs: int = 0
    """Input features of GPTQ's layers, each with its group's number."""
    elements: int = 0
    """Elements of quantised weights."""
    rows: int = 0
    """Rows of quantised weights, each with a scale in 8 bits."""


@lru_cache(maxsize=256)
def counts(model: ModelSpec) -> Counts:
    """Count the frozen parameters. [bytes of packed weights, else numbers]"""
    tree, size = layout(model), 128 if model.adapter is None else model.adapter.group_size
    every = [(one, 1) for one in (*tree.embeddings, *tree.tail)]
    every += [(one, run.layers) for run in tree.runs for one in run.parameters]
    frozen = [(one, times) for one, times in every if one.frozen]
    blocks = [(ceil_div(one.numel, 64), times) for one, times in frozen if one.quantised]
    return Counts(
        sum(times * packed_bytes(one) for one, times in frozen if one.quantised),
        sum(times * block for block, times in blocks),
        sum(times * ceil_div(block, 256) for block, times in blocks),
        sum(times for _, times in blocks),
        sum(times * one.numel for one, times in frozen if is_bias(one)),
        sum(times * one.numel for one, times in frozen if _is_norm(one)),
        sum(times * one.numel for one, times in frozen if not one.quantised and not is_bias(one) and not _is_norm(one)),
        sum(times * _groups(one, size) for one, times in frozen if one.quantised),
        sum(times * one.shape[-1] for one, times in frozen if one.quantised),
        sum(times * one.numel for one, times in frozen if one.quantised),
        sum(times * one.numel // one.shape[-1] for one, times in frozen if one.quantised),
    )


def quantised_lines(
    model: ModelSpec, quantize: Quantize, *, element_bytes: int, norm_bytes: int, end_bytes: int
) -> tuple[Line, ...]:  # fmt: skip
    """Return the frozen parameters, whole. An element of a norm has ``norm_bytes``, one of embedding and head ``end_bytes``."""
    found = counts(model)
    if quantize == "gptq":
        return (
            Line(Kind.PARAMETERS, found.packed, "frozen weights in 4 bits, eight to a number", "Ψ_4/2", GPTQ),
            Line(Kind.PARAMETERS, found.groups // 2, "zeros of groups, in 4 bits", "B_g/2", GPTQ),
            *scales(found, quantize),
            *_others(found, norm_bytes, end_bytes),
        )
    if quantize == "int8":
        whole = Line(Kind.PARAMETERS, found.elements, "frozen weights in 8 bits", "Ψ_4", EIGHT)
        element_bytes = norm_bytes  # biases have the dtype of what their layer reads (nn/modules.py, Linear8bitLt.forward)
    else:
        whole = Line(Kind.PARAMETERS, found.packed, "frozen weights in 4 bits, two to a byte", "Ψ_4/2", PACKED)
    return (
        whole,
        *scales(found, quantize),
        sized(Kind.PARAMETERS, element_bytes, found.biases, "frozen biases", BIAS, "Ψ_bias"),
        *_others(found, norm_bytes, end_bytes),
    )


def _others(found: Counts, norm_bytes: int, end_bytes: int) -> tuple[Line, ...]:
    if norm_bytes == end_bytes:
        n_bytes = norm_bytes * (found.norms + found.others)
        return (Line(Kind.PARAMETERS, n_bytes, "frozen embedding, norms and head", f"{norm_bytes}·Ψ_frozen", PREPARED),)
    norms = sized(Kind.PARAMETERS, norm_bytes, found.norms, "frozen norms, fp32", PREPARED, "Ψ_norms")
    ends = sized(Kind.PARAMETERS, end_bytes, found.others, "frozen embedding and head", NARROWED, "(Ψ_frozen - Ψ_norms)")
    return norms, ends


def _is_norm(parameter: Parameter) -> bool:
    """Whether it is a norm's weight: one-dimensional and no bias."""
    return len(parameter.shape) == 1 and not is_bias(parameter) and not parameter.quantised


@lru_cache(maxsize=256)
def packed_layout(model: ModelSpec, element_bytes: int) -> Layout:
    """Return the parameters as FSDP2 shards them: packed weights are columns of numbers in the compute dtype."""
    tree, adapter = layout(model), model.adapter
    size = adapter.group_size if adapter is not None and adapter.quantize == "gptq" else 0
    return tree._replace(
        embeddings=tuple(_packed(tree.embeddings, element_bytes, size)),
        runs=tuple(run._replace(parameters=tuple(_packed(run.parameters, element_bytes, size))) for run in tree.runs),
    )


def _packed(parameters: tuple[Parameter, ...], element_bytes: int, group_size: int) -> Iterator[Parameter]:
    """``group_size``: GPTQ's, whose zeros are a parameter too (``PATCH_FOR_FSDP_TRITON_V2``); 0 for other methods."""
    for one in parameters:
        if not one.quantised:
            yield one
            continue
        yield one._replace(shape=((one.numel + 1) // (2 * element_bytes), 1))
        if group_size:
            zeros = ((_groups(one, group_size) + 1) // (2 * element_bytes), 1)
            yield one._replace(name=f"{one.name}_zeros", shape=zeros)


def _groups(one: Parameter, size: int) -> int:
    """Return the number of GPTQ groups of a weight; a group has ``size`` inputs of one output."""
    outputs, inputs = one.numel // one.shape[-1], one.shape[-1]
    return outputs * (1 if size == -1 else ceil_div(inputs, size))


def scales_of(model: ModelSpec) -> tuple[Line, ...]:
    """Return scales and tables of a quantised model. FSDP2 does not manage them, so every rank has all of them. [bytes]"""
    return () if model.adapter is None else scales(counts(model), model.adapter.quantize)


def scales(found: Counts, quantize: Quantize) -> tuple[Line, ...]:
    """Return the tensors that dequantise weights, whole on every rank. [bytes]"""
    if quantize == "int8":
        return (sized(Kind.PARAMETERS, 4, found.rows, "scales of rows, fp32", EIGHT, "R_8"),)
    if quantize == "gptq":
        return (
            sized(Kind.PARAMETERS, 2, found.groups, "scales of groups, fp16", GPTQ, "B_g"),
            sized(Kind.PARAMETERS, 4, found.inputs, "number of each input's group", GPTQ, "I_4"),
        )
    if quantize == "nf4":
        return (
            sized(Kind.PARAMETERS, 4, found.blocks, "scales of blocks of 64 weights, fp32", PACKED, "B_64"),
            sized(Kind.PARAMETERS, _CODE, found.weights, "tables of the 4-bit codes", TABLES, "U_4"),
        )
    each = _CODE + _SCALES_CODE + _MEAN
    return (
        Line(Kind.PARAMETERS, found.blocks, "scales of blocks of 64 weights, in 8 bits", "B_64", PACKED),
        sized(Kind.PARAMETERS, 4, found.scales_blocks, "scales of blocks of 256 scales, fp32", PACKED, "B_256"),
        Line(
            Kind.PARAMETERS,
            each * found.weights + _SCALES_CODE,
            "tables of the 4-bit and 8-bit codes, one more shared",
            f"{each}·U_4 + {_SCALES_CODE}",
            TABLES,
        ),
    )


def scales_of_each(parameters: Iterable[Parameter], quantize: Quantize) -> Iterator[Line]:
    """Yield the tensors that dequantise each weight, and the table that all share. [bytes]"""
    quantised = [one for one in parameters if one.quantised]
    for one in quantised:
        blocks = ceil_div(one.numel, 64)
        *others, tables = scales(Counts(0, blocks, ceil_div(blocks, 256), 1, 0, 0, 0), quantize)
        yield from others
        yield tables if quantize == "nf4" else tables._replace(n_bytes=tables.n_bytes - _SCALES_CODE)
    if quantised and quantize != "nf4":
        yield Line(Kind.PARAMETERS, _SCALES_CODE, "the shared table of 8-bit codes", f"{_SCALES_CODE}", TABLES)


def packed_bytes(parameter: Parameter) -> int:
    """Return the size of a 4-bit weight without its scales. [bytes]"""
    return ceil_div(parameter.numel, 2)


def is_bias(parameter: Parameter) -> bool:
    """Whether it is a linear layer's bias, which bitsandbytes casts to the compute dtype."""
    return parameter.autocast and parameter.name.endswith("bias")


def quantised_symbols(model: ModelSpec) -> tuple[Symbol, ...]:
    """Return the symbols in the formulas of these lines."""
    found = counts(model)
    return (
        Symbol("Ψ_4", found.elements, "parameters in few bits"),
        Symbol("R_8", found.rows, "rows of the weights that have them"),
        Symbol("B_g", found.groups, "groups of them, where GPTQ made them"),
        Symbol("I_4", found.inputs, "inputs of the layers that have them"),
        Symbol("B_64", found.blocks, "blocks of 64 of them"),
        Symbol("B_256", found.scales_blocks, "blocks of 256 of their scales"),
        Symbol("U_4", found.weights, "weights in 4 bits"),
        Symbol("Ψ_bias", found.biases, "biases of quantised layers"),
        Symbol("Ψ_norms", found.norms, "frozen parameters of norms"),
        Symbol("Ψ_frozen", found.norms + found.others, "frozen parameters that are not quantised"),
    )
