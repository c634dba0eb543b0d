"""Derives the tables of measured operators for step times: ``python -m tests.measured.operators --from FOLDER``.

FOLDER holds ``gemm.csv.gz`` and ``attention_forward.csv.gz``: times of single operators on one GPU, as facts taken from
github.com/ai-dynamo/aiconfigurator at 095f58a5 (2026-08-21), aic-core/src/aiconfigurator_core/systems/data. What is kept is the
share of the dense peak that each product and each attention reached, on a grid of shapes, in sixteen bits.

Products on Hopper and Blackwell are smoothed over neighbouring shapes (:func:`smoothed`), because their times scatter.
``--scatter`` prints how much.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import itertools
import math
import re
import zlib
from array import array
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from zeroplan.catalog.gpu import gpu
from zeroplan.steptime.tables import (
    ATTENTION_GPUS,
    ATTENTION_HEADS,
    ATTENTION_TOKENS,
    ATTENTION_WIDTHS,
    CALL_BYTES,
    COLLECTIVES,
    COLUMNS,
    FILE,
    LINK_GPUS,
    LINKED,
    ONE,
    PRODUCTS,
    ROWS,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

#: GPUs whose products scatter. A product of 5,120 x 2,048 reached 0.57 on an H100 with 16,384 rows, one of 5,120 x 4,096 0.79. The
#: chip does not explain it: H200 has the same one, and its deviations from a smooth surface (5 %; H100's 7 %) correlate by 0.32
#: with H100's. With rows and columns swapped they correlate by 0.21 on H100, 0.06 on H200 and 0.32 to 0.38 on Blackwell. On A100
#: it is 0.86 and on RTX PRO 6000 0.89: there they belong to the shape.
_SCATTERED = ("h100-sxm-80gb", "h200-sxm-141gb", "b200-180gb", "b300-288gb", "gb300-288gb")
#: How far neighbours count: at 0.3 to 0.5 one GPU's smoothed table predicts another's best. [octaves of a size]
_REACH = 0.4
#: Sides of products for which ``--scatter`` compares tables.
_LARGE = 1024


def _read(path: Path) -> Iterable[dict[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from csv.DictReader(file)


def _source_name(name: str) -> str:
    """Return the name that the source uses for a GPU of the catalogue."""
    known = {"rtx-pro-6000-blackwell-96gb": "rtx_pro_6000_server", "l40s-48gb": "l40s"}
    start = name.partition("-")[0]
    return known.get(name, start if start.startswith("gb") else f"{start}_sxm")


def _product_times(path: Path) -> dict[tuple[str, int, int, int], float]:
    """Return the times of products in bf16 by GPU, rows, columns and depth. [s]"""
    return {
        (one["gpu"], int(one["m"]), int(one["n"]), int(one["k"])): float(one["us"]) * 1e-6
        for one in _read(path)
        if one["gemm_dtype"] == "bfloat16"
    }


def products(path: Path) -> Iterable[float]:
    """Yield the shares of products in bf16: by GPU, then rows, columns and depth."""
    times = _product_times(path)
    for name in PRODUCTS:
        measured = _of_one(times, name)
        yield from (smoothed(measured) if name in _SCATTERED else measured).ravel().tolist()


def _of_one(times: dict[tuple[str, int, int, int], float], name: str) -> np.ndarray:
    """Return the shares of one GPU's products by rows, columns and depth."""
    peak, share, found = gpu(name).dense_flops_per_s["bf16"].value, 0.0, []
    for m, n, k in itertools.product(ROWS, COLUMNS, COLUMNS):
        took = times.get((_source_name(name), m, n, k))
        share = share if took is None else 2.0 * m * n * k / took / peak  # a few of the largest have none
        found.append(share)
    return np.array(found).reshape(len(ROWS), len(COLUMNS), len(COLUMNS))


def smoothed(shares: np.ndarray, reach: float = _REACH) -> np.ndarray:
    """Return shares smoothed over the logarithms of sizes (local linear regression).

    At each shape this is the value of a plane through the logarithms of its neighbours' shares, which count by a normal
    distribution of their distance.
    """
    sizes = np.meshgrid(*(np.log2(axis) for axis in (ROWS, COLUMNS, COLUMNS)), indexing="ij")
    places, logs = np.stack([axis.ravel() for axis in sizes], 1), np.log(shares.ravel())
    found = []
    for here in places:
        apart = places - here
        counts = np.exp(-(apart**2).sum(1) / (2 * reach**2))
        near = counts > 1e-3
        plane = np.column_stack([np.ones(near.sum()), apart[near]]) * np.sqrt(counts[near])[:, None]
        found.append(np.linalg.lstsq(plane, logs[near] * np.sqrt(counts[near]), rcond=None)[0][0])
    return np.exp(found).reshape(shares.shape)


def attention(path: Path) -> Iterable[float]:
    """Yield the shares of causal attention, without what the mask hides: by GPU, width of a head, tokens, and heads of a batch.

    Where several batches have as many heads together, the median counts; 0 where none has. A100's narrow heads were not measured:
    they take what L40S, which runs the same kernel, loses on them.
    """
    found: dict[tuple[str, int, int, int], list[float]] = {}
    for one in _read(path):
        heads, batch, tokens, width = (int(one[key]) for key in ("num_heads", "batch_size", "isl", "head_dim"))
        if "fa4" in one["kernel_source"]:
            continue
        flops = 2.0 * batch * heads * width * tokens * tokens
        found.setdefault((one["gpu"], width, tokens, batch * heads), []).append(flops / (float(one["us"]) * 1e-6))
    rates = {key: sorted(ones)[len(ones) // 2] for key, ones in found.items()}
    for name in ATTENTION_GPUS:
        peak, source = gpu(name).dense_flops_per_s["bf16"].value, _source_name(name)
        for width, tokens, heads in itertools.product(ATTENTION_WIDTHS, ATTENTION_TOKENS, ATTENTION_HEADS):
            rate = rates.get((source, width, tokens, heads), 0.0)
            if source == "a100_sxm" and width == min(ATTENTION_WIDTHS):
                wide = max(ATTENTION_WIDTHS)
                rate = rates.get((source, wide, tokens, heads), 0.0) * rates["l40s", width, tokens, heads]
                rate /= rates["l40s", wide, tokens, heads]
            yield rate / peak


def collectives(path: Path) -> Iterable[float]:
    """Yield the shares of a node's links: by GPU, operation, ranks and bytes of a call; of the newest NCCL that was measured.

    Sizes between two that were measured are interpolated over their logarithms.
    """
    names = {"all_to_all": "alltoall"}
    newest: dict[tuple[str, str, int], dict[str, dict[int, float]]] = {}
    for one in _read(path):
        key = one["gpu"], one["op_name"], int(one["num_gpus"])
        newest.setdefault(key, {}).setdefault(one["version"], {})[2 * int(one["message_size"])] = float(one["us"]) * 1e-6
    for name in LINK_GPUS:
        rate = gpu(name).node_link_bytes_per_s.value
        for operation, ranks, size in itertools.product(COLLECTIVES, LINKED, CALL_BYTES):
            versions = newest[_source_name(name), names.get(operation, operation), ranks]
            times = versions[max(versions, key=lambda version: [int(part) for part in re.findall(r"\d+", version)])]
            sent = (2 if operation == "all_reduce" else 1) * (ranks - 1) / ranks * size
            yield sent / _at(times, size) / rate


def _at(times: dict[int, float], size: int) -> float:
    below, above = max(one for one in times if one <= size), min((one for one in times if one >= size), default=0)
    if not above:
        return times[below] * size / below
    way = 0.0 if above == below else math.log(size / below) / math.log(above / below)
    return times[below] ** (1 - way) * times[above] ** way


def scatter(path: Path) -> Iterator[str]:
    """Yield how well one GPU's products, measured and smoothed, predict those of another with the same architecture."""
    times = _product_times(path)
    measured = {name: _of_one(times, name) for name in _SCATTERED}
    large = np.ix_(*([size >= _LARGE for size in axis] for axis in (ROWS, COLUMNS, COLUMNS)))
    for one, other in (*itertools.permutations(_SCATTERED[:2], 2), *itertools.permutations(_SCATTERED[2:], 2)):
        apart = [np.log(shares / measured[other])[large].std() for shares in (measured[one], smoothed(measured[one]))]
        yield f"{one} predicts {other} within {apart[0]:.1%} as measured, {apart[1]:.1%} smoothed (standard deviation)"


def main() -> None:
    """Write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--from", dest="folder", type=Path, required=True, help="the folder of the times")
    parser.add_argument("--scatter", action="store_true", help="print how much products scatter, and write nothing")
    asked = parser.parse_args()
    folder = asked.folder
    if asked.scatter:
        print(*scatter(folder / "gemm.csv.gz"), sep="\n")
        return
    shares = array("H")
    for share in (
        *products(folder / "gemm.csv.gz"),
        *attention(folder / "attention_forward.csv.gz"),
        *collectives(folder / "nccl.csv.gz"),
    ):
        shares.append(min(round(share * ONE), 2**16 - 1))
    FILE.write_bytes(zlib.compress(shares.tobytes(), 9))


if __name__ == "__main__":
    main()
