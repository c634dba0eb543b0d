"""Derives the tables of measured operators for step times: ``python -m tests.measured.operators --from FOLDER``.

FOLDER holds ``gemm.csv.gz`` and ``attention_forward.csv.gz``: times of single operators on one GPU, as facts taken from
github.com/ai-dynamo/aiconfigurator at 095f58a5 (2026-08-21), aic-core/src/aiconfigurator_core/systems/data. What is kept is the
share of the dense peak that each product and each attention reached, on a grid of shapes, in sixteen bits.
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
    from collections.abc import Iterable


def _read(path: Path) -> Iterable[dict[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from csv.DictReader(file)


def _source_name(name: str) -> str:
    """Return the name that the source uses for a GPU of the catalogue."""
    known = {"rtx-pro-6000-blackwell-96gb": "rtx_pro_6000_server", "l40s-48gb": "l40s"}
    start = name.partition("-")[0]
    return known.get(name, start if start.startswith("gb") else f"{start}_sxm")


def products(path: Path) -> Iterable[float]:
    """Yield the shares of products in bf16: by GPU, then rows, columns and depth."""
    times = {
        (one["gpu"], int(one["m"]), int(one["n"]), int(one["k"])): float(one["us"]) * 1e-6
        for one in _read(path)
        if one["gemm_dtype"] == "bfloat16"
    }
    share = 0.0
    for name in PRODUCTS:
        peak = gpu(name).dense_flops_per_s["bf16"].value
        for m in ROWS:
            for n in COLUMNS:
                for k in COLUMNS:
                    took = times.get((_source_name(name), m, n, k))
                    share = share if took is None else 2.0 * m * n * k / took / peak  # a few of the largest have none
                    yield share


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


def main() -> None:
    """Write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--from", dest="folder", type=Path, required=True, help="the folder of the times")
    folder = parser.parse_args().folder
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
