"""Measured rates of single operators on a GPU: matrix products, attention and collectives, interpolated by shape.

The tables hold shares of the dense peak. Between two shapes of the grid a share is interpolated over the logarithms of the sizes.
A GPU without its own table uses that of the nearest GPU, as the same share of its own peak.

Source: github.com/ai-dynamo/aiconfigurator at 095f58a5 (2026-08-21), aic-core/src/aiconfigurator_core/systems/data, ``gemm``,
``attention`` and ``comm/nccl``: forward operators of inference, and collectives inside a node, each measured alone.
``python -m tests.measured.operators`` derives the file from them. Products on Hopper and Blackwell are smoothed over neighbouring
shapes, because their times scatter.
"""

import zlib
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from math import log2
from pathlib import Path
from typing import NamedTuple

from zeroplan.numeric import Float, Int, longest
from zeroplan.numeric import log2 as log2_of

SOURCE = "github.com/ai-dynamo/aiconfigurator at 095f58a5, systems/data: measured by shape"
FILE = Path(__file__).parent / "measured" / "operators.bin"
#: The integer for a share of 1.
ONE = 2**15
#: Sizes of a product's rows; of its columns and its depth.
ROWS = (512, 1024, 1536, 2048, 3072, 4096, 8192, 16384, 32768)
COLUMNS = (
    256, 512, 768, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 10240, 12288, 16384, 51200, 65536,
)  # fmt: skip
PRODUCTS = (
    "a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb", "b200-180gb", "b300-288gb", "gb300-288gb", "l40s-48gb",
    "rtx-pro-6000-blackwell-96gb",
)  # fmt: skip
#: The share of products in fp8 and fp4, relative to products of the same shape in bf16: the median of products with 51,200 and
#: more columns, where quantising the rows takes little of the time.
NARROW = {
    ("h100-sxm-80gb", "fp8"): 0.83, ("h200-sxm-141gb", "fp8"): 1.01, ("b200-180gb", "fp8"): 0.94, ("b200-180gb", "fp4"): 0.69,
    ("b300-288gb", "fp8"): 0.90, ("gb300-288gb", "fp8"): 0.91, ("gb300-288gb", "fp4"): 0.47,
}  # fmt: skip
#: Axes of the table of attention: heads of a whole batch, tokens of a sequence, and widths of a head.
ATTENTION_HEADS = (4, 8, 16, 32, 64, 128, 256, 512)
ATTENTION_TOKENS = (1024, 2048, 4096, 8192, 16384)
ATTENTION_WIDTHS = (64, 128)
ATTENTION_GPUS = (
    "a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb", "b200-180gb", "b300-288gb", "gb300-288gb", "l40s-48gb",
    "rtx-pro-6000-blackwell-96gb",
)  # fmt: skip
#: Collectives inside a node, with their ranks and the bytes of one call.
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
LINKED = (2, 4, 8)
CALL_BYTES = (2**14, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26, 2**28, 2**29)
LINK_GPUS = (
    "a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb", "b200-180gb", "b300-288gb", "l40s-48gb", "rtx-pro-6000-blackwell-96gb",
)  # fmt: skip
#: The GPU whose table another uses, by the first part of its name, or by architecture. GB200 uses B200's: a third of its own
#: products ran at half the rate of the others.
_BY_NAME = {
    "a100": "a100-sxm-80gb", "h100": "h100-sxm-80gb", "h200": "h200-sxm-141gb", "gh200": "h200-sxm-141gb", "b200": "b200-180gb",
    "b300": "b300-288gb", "gb200": "b200-180gb", "gb300": "gb300-288gb",
}  # fmt: skip
_BY_ARCHITECTURE = {
    "Ampere": "a100-sxm-80gb", "Volta": "a100-sxm-80gb", "Turing": "a100-sxm-80gb", "Pascal": "a100-sxm-80gb",
    "Ada Lovelace": "l40s-48gb", "Blackwell": "b200-180gb", "Blackwell Ultra": "b300-288gb", "Hopper": "h100-sxm-80gb",
}  # fmt: skip
#: GeForce sums up in fp32 at half the rate (the data sheets of RTX 40 and 50), below what 350 W let an L40S reach: 193 TFLOP/s.
_GAMERS = ("rtx-40", "rtx-5", "rtx-pro")
_NEAREST = "h100-sxm-80gb"
_OF_ATTENTION = len(ATTENTION_WIDTHS) * len(ATTENTION_TOKENS) * len(ATTENTION_HEADS)
_OF_PRODUCTS = len(ROWS) * len(COLUMNS) ** 2
_LOG_ROWS, _LOG_COLUMNS = tuple(map(log2, ROWS)), tuple(map(log2, COLUMNS))
_LOG_LINKED, _LOG_BYTES = tuple(map(log2, LINKED)), tuple(map(log2, CALL_BYTES))
_LOG_HEADS, _LOG_TOKENS = tuple(map(log2, ATTENTION_HEADS)), tuple(map(log2, ATTENTION_TOKENS))


class Place(NamedTuple):
    """The position of a size on an axis: the node below, and the share of the way to the next node."""

    node: int
    share: float


@lru_cache(maxsize=1)
def _shares() -> array:  # type: ignore[type-arg]  # of sixteen-bit numbers
    shares = array("H")
    shares.frombytes(zlib.decompress(FILE.read_bytes()))
    return shares


def table_of(name: str, architecture: str) -> str:
    """Return the GPU whose tables a GPU uses: itself, or the nearest with tables.

    >>> table_of("a100-pcie-40gb", "Ampere"), table_of("l4-24gb", "Ada Lovelace"), table_of("mi300x-192gb", "CDNA 3")
    ('a100-sxm-80gb', 'l40s-48gb', 'h100-sxm-80gb')
    """
    if name.startswith(_GAMERS):
        return "rtx-pro-6000-blackwell-96gb"
    return _BY_NAME.get(name.partition("-")[0], _BY_ARCHITECTURE.get(architecture, _NEAREST))


def _place(axis: Sequence[float], value: float) -> Place:
    if value <= axis[0]:
        return Place(0, 0.0)
    if value >= axis[-1]:
        return Place(len(axis) - 2, 1.0)
    node = bisect_right(axis, value) - 1
    return Place(node, (value - axis[node]) / (axis[node + 1] - axis[node]))


_PRODUCT_AXES = (_LOG_ROWS, _LOG_COLUMNS, _LOG_COLUMNS)
_PRODUCT_STRIDES = (len(COLUMNS) ** 2, len(COLUMNS), 1)


def product_share(table: str, dtype: str, rows: Float, columns: float, depth: Float) -> Float:
    """Return the rate of a rows x depth times depth x columns product, as a share of the dense peak.

    ``rows`` or ``depth`` may be a column.

    >>> round(product_share("a100-sxm-80gb", "bf16", 4096, 8192, 8192), 2)
    0.8
    """
    first, narrow = PRODUCTS.index(table) * _OF_PRODUCTS, NARROW.get((table, dtype), 1.0)
    sizes = rows, columns, depth
    for axis, size in enumerate(sizes):
        if not isinstance(size, (int, float)):
            others = tuple([0.0 if at == axis else float(one) for at, one in enumerate(sizes)])
            return narrow * _along(_PRODUCT_AXES[axis], _product_curve(first, axis, others), size)
    across = tuple([_place(logs, log2(size)) for logs, size in zip(_PRODUCT_AXES, sizes, strict=True)])
    return narrow * _between(first, _PRODUCT_STRIDES, across)


@lru_cache(maxsize=8192)
def _product_curve(first: int, axis: int, sizes: tuple[float, ...]) -> "_Curve":
    """Return a table's shares along one axis; ``sizes``: the sizes on the others."""
    others = [at for at in range(len(sizes)) if at != axis]
    across = tuple([_place(_PRODUCT_AXES[at], log2(sizes[at])) for at in others])
    strides = tuple([_PRODUCT_STRIDES[at] for at in others])
    nodes = range(len(_PRODUCT_AXES[axis]))
    return _curve([_weighed(first + _PRODUCT_STRIDES[axis] * node, strides, across) for node in nodes])


def attention_share(table: str, width: int, tokens: float, heads: Float) -> Float:
    """Return the rate of causal attention's forward as a share of the dense bf16 peak, without operations that the mask hides.

    ``heads``: the heads of the whole batch, or a column. Narrow heads and short sequences keep fewer tensor cores busy.

    >>> round(attention_share("h100-sxm-80gb", 128, 8192, 32), 2)
    0.6
    """
    first = len(PRODUCTS) * _OF_PRODUCTS
    wide = int(width > sum(ATTENTION_WIDTHS) / 2)
    first += ATTENTION_GPUS.index(table) * _OF_ATTENTION + wide * len(ATTENTION_TOKENS) * len(ATTENTION_HEADS)
    found, place = min(1.0, width / ATTENTION_WIDTHS[0]), _place(_LOG_TOKENS, log2(tokens))
    if isinstance(heads, (int, float)):
        return found * _between(first, (len(ATTENTION_HEADS), 1), (place, _place(_LOG_HEADS, log2(heads))))
    curve = _curve([_weighed(first + node, (len(ATTENTION_HEADS),), (place,)) for node in range(len(ATTENTION_HEADS))])
    return found * _along(_LOG_HEADS, curve, heads)


#: Rate of cuDNN's attention on an H100, relative to the table's: its forward by tokens of a sequence, its backward at any length.
#: Medians of the times in tests/on_gpus/records/h100-operators.csv (torch 2.11, cuDNN 9).
_CUDNN = ((1024, 1.36), (2048, 1.17), (4096, 1.12), (8192, 1.03), (16384, 1.04), (32768, 0.94))
CUDNN_BACKWARD_SHARE = 0.83
_LOG_CUDNN = tuple(log2(tokens) for tokens, _share in _CUDNN)


def cudnn_forward(tokens: float) -> float:
    """Return the rate of the forward of cuDNN's attention on Hopper, as a multiple of the table's.

    >>> cudnn_forward(16384), cudnn_forward(2**20)
    (1.04, 0.94)
    """
    return _read(_LOG_CUDNN, [share for _tokens, share in _CUDNN], log2(tokens))  # type: ignore[return-value]  # of a number


#: Rate of cuDNN's backward with heads of 192 and values of 128 (latent attention), relative to heads of 128: 0.82 to 0.95 on
#: H200, GB200 and GB300. The forward is as fast (github.com/NVIDIA/cudnn-frontend at 3929da2e, benchmark/
#: sdpa_benchmark_training/results).
WIDE_BACKWARD = 0.88
#: Rate of the backward of cuDNN's attention on a B200, as a share of the dense peak, by heads of the batch times thousands of
#: tokens (github.com/MooreThreads/SimuMax at 4dcaae51, configs/system/b200_bf16_ceperm.json, sdp_bwd, without the mask; medians).
_B200_BACKWARD = ((16, 0.173), (32, 0.323), (64, 0.374), (128, 0.396), (256, 0.421), (512, 0.426))
_LOG_B200 = tuple(log2(size) for size, _share in _B200_BACKWARD)


def b200_backward(tokens: float, heads: Float) -> Float:
    """Return the rate of the backward of cuDNN's attention on a B200, as a multiple of the table's forward of the B200.

    Sequences of fewer than 4,096 tokens, which were not measured, have the multiple of 4,096.

    >>> round(b200_backward(4096, 32), 2), round(b200_backward(512, 32), 2), round(b200_backward(4096, 128), 2)
    (1.15, 1.15, 0.93)
    """
    tokens = max(tokens, 4096.0)
    share = _read(_LOG_B200, [share for _size, share in _B200_BACKWARD], log2_of(heads * tokens / 1024))
    return share / attention_share("b200-180gb", ATTENTION_WIDTHS[-1], tokens, heads)


def link_share(table: str, operation: str, ranks: int, call_bytes: Int) -> Float:
    """Return a collective's rate as a share of the node's links, computed from the bytes that one GPU sends in a ring.

    NVSwitch's sums (NVLS) are included where the source's NCCL used them: all-reduces on eight H100 or B200 send less than a ring.

    >>> round(link_share("h100-sxm-80gb", "all_gather", 8, 2**29), 2), round(link_share("h100-sxm-80gb", "all_gather", 8, 2**20), 2)
    (0.74, 0.12)
    """
    curve, least, most = _link_curve(table, operation, ranks), CALL_BYTES[0], CALL_BYTES[-1]
    if isinstance(call_bytes, int):
        size = min(max(call_bytes, least), most)
        share = _read(_LOG_BYTES, curve, log2(size)) * call_bytes / size
        return _beyond(curve, call_bytes) if call_bytes > most else share
    import numpy as np  # noqa: PLC0415  keeps start-up fast

    sizes = np.clip(call_bytes, least, most)
    shares = _read(_LOG_BYTES, curve, np.log2(sizes)) * call_bytes / sizes
    larger: Float = np.where(call_bytes > most, _beyond(curve, np.maximum(call_bytes, most)), shares)
    return larger


def _beyond(curve: tuple[float, ...], call_bytes: Int) -> Float:
    """Return the share of a call above the largest size: a further byte takes as long as between the two largest sizes."""
    before, last = CALL_BYTES[-2:]
    takes = last / curve[-1]
    return call_bytes / (takes + (call_bytes - last) * (takes - before / curve[-2]) / (last - before))


@lru_cache(maxsize=1024)
def _link_curve(table: str, operation: str, ranks: int) -> tuple[float, ...]:
    """Return the shares at the table's sizes for one operation and number of ranks."""
    first = len(PRODUCTS) * _OF_PRODUCTS + len(ATTENTION_GPUS) * _OF_ATTENTION
    first += (LINK_GPUS.index(table) * len(COLLECTIVES) + COLLECTIVES.index(operation)) * len(LINKED) * len(CALL_BYTES)
    place = _place(_LOG_LINKED, log2(ranks))
    return tuple(_between(first + at, (len(CALL_BYTES),), (place,)) for at in range(len(CALL_BYTES)))


def _read(axis: Sequence[float], curve: Sequence[float], at: Float) -> Float:
    """Return a curve's value between its points, and beyond its ends that of the nearest."""
    if isinstance(at, float):
        node, way = _place(axis, at)
        return curve[node] * (1.0 - way) + curve[node + 1] * way
    import numpy as np  # noqa: PLC0415  keeps start-up fast

    return np.interp(at, axis, curve)


class _Curve(NamedTuple):
    """At each node of one axis: the sum of the measured shares, each times its weight, and the sum of these weights."""

    totals: tuple[float, ...]
    weights: tuple[float, ...]


def _curve(nodes: list[tuple[float, float]]) -> _Curve:
    return _Curve(*zip(*nodes, strict=True))


def _along(axis: tuple[float, ...], curve: _Curve, sizes: Float) -> Float:
    """Return the interpolated shares of a column of sizes, from measured nodes only; 0 where none is measured."""
    at = log2_of(sizes)
    weights = _read(axis, curve.weights, at)
    return _read(axis, curve.totals, at) / longest(weights, _TINY) / ONE


#: Smaller than any weight of a measured node.
_TINY = 1e-300


def _between(first: int, strides: tuple[int, ...], across: tuple[Place, ...]) -> float:
    """Return the interpolated share, from the measured corners only; 0 if none is measured."""
    total, weights = _weighed(first, strides, across)
    return total / weights / ONE if weights else 0.0


def _weighed(first: int, strides: tuple[int, ...], across: tuple[Place, ...]) -> tuple[float, float]:
    """Return the sum of the measured corners' shares, each times its weight, and the sum of these weights."""
    shares, total, weights = _shares(), 0.0, 0.0
    corners = [(first, 1.0)]
    for stride, (node, share) in zip(strides, across, strict=True):
        corners = [
            (at + stride * (node + up), weight * part)
            for at, weight in corners
            for up, part in ((0, 1.0 - share), (1, share))
            if part
        ]
    for at, weight in corners:
        if shares[at]:
            total, weights = total + weight * shares[at], weights + weight
    return total, weights
