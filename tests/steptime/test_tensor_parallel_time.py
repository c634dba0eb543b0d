"""FSDP2 with tensor parallelism, held against torchtitan's published runs: nothing was fitted to any of them."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from statistics import median

from zeroplan import JobSpec, job
from zeroplan.planner import time_of

HERE = Path(__file__).parents[1]
FILE = HERE / "golden" / "throughput_tensor_parallel.toml"
PAGE = (HERE.parent / "docs" / "plan.md").read_text(encoding="utf-8")
#: Of the H100 that the sources had. [bytes/s]
HBM2E = 2.4e12


def published(row: dict) -> JobSpec:
    one = job(model=row["model"], gpu="h100", gpus=row["gpus"], engine="fsdp2", stage=3, tensor_parallel=row["tp"],
              seq_len=row["seq_len"], micro_batch=row["local_batch"], recompute=row["recompute"])  # fmt: skip
    card = one.cluster.gpu
    assert card is not None
    slower = replace(card, memory_bandwidth_bytes_per_s=replace(card.memory_bandwidth_bytes_per_s, value=HBM2E, check=None))
    return replace(one, cluster=replace(one.cluster, gpu=slower))


def test_the_page_has_the_errors_of_tensor_parallel_runs() -> None:
    rows = [row for table in tomllib.loads(FILE.read_text(encoding="utf-8"))["tables"] for row in table["rows"]]
    errors = sorted(abs(float(time_of(published(row)).tokens_per_s) / row["tokens_per_s_per_gpu"] - 1) for row in rows)
    assert median(errors) < 0.15
    figures = (median(errors), sum(errors) / len(errors), errors[int(0.9 * len(errors))], errors[-1])
    row = f"| FSDP2 with tensor parallelism, none fitted | {len(errors)} | {' | '.join(f'{100 * one:.1f} %' for one in figures)} |"
    assert row in PAGE, row
