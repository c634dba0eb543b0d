"""The published runs of Megatron-LM (tests/golden/throughput_megatron.toml) as jobs, halved before any was looked at."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path

from tests.steptime.published_runs import Run, cluster_of, every_other, predicted, shape_of
from zeroplan import BatchSpec, JobSpec, MegatronOptions, MeshSpec, RecipeSpec, SpecError, estimate

FILE = Path(__file__).parents[1] / "golden" / "throughput_megatron.toml"
#: What is tried where a source does not state it.
MICRO_BATCHES, CHUNKS = (1, 2, 4, 8, 16), (1, 2, 3, 4, 5, 6)


@cache
def runs() -> tuple[Run, ...]:
    """Every row; what it does not state is what zeroplan finds quickest of what fits."""
    data = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return tuple(_run(data["models"], table, row) for table in data["tables"] for row in table["rows"])


@cache
def built_on() -> frozenset[str]:
    """The groups that were looked at."""
    return every_other(runs())


def _run(models: dict, table: dict, row: dict) -> Run:
    group = "|".join((table["drawn_with"], row["model"].lower(), "a100-sxm-80gb"))
    tokens_per_s = row["tokens_per_s_per_gpu"]
    tried = [Run(row["id"], table["drawn_with"], group, job, tokens_per_s) for job in _jobs(models[row["model"]], table, row)]
    if len(tried) == 1:
        return tried[0]
    return max((run for run in tried if estimate(run.job).fits), key=lambda run: float(predicted(run).tokens_per_s))


def _jobs(sizes: dict, table: dict, row: dict) -> list[JobSpec]:
    sizes_of_batch = [row["micro_batch"]] if row["micro_batch"] else [b for b in MICRO_BATCHES if row["sequences"] % b == 0]
    made = []
    for size in sizes_of_batch:
        for chunks in [row["chunks"]] if row["chunks"] else CHUNKS:
            try:
                made.append(_job(sizes, table, row, size, chunks))
            except SpecError:  # layers or micro-batches that do not divide
                continue
    return made


def _job(sizes: dict, table: dict, row: dict, micro_batch: int, chunks: int) -> JobSpec:
    several = row["pp"] > 1 and chunks > 1
    return JobSpec(
        model=replace(shape_of({**sizes, "family": "gpt2", "kv_heads": sizes["heads"]}, row), name=row["model"]),
        cluster=cluster_of("a100-sxm-80gb", table),
        recipe=RecipeSpec(
            engine="megatron",
            zero_stage=0,
            precision="fp16-mixed",
            recompute=row["recompute"],
            attention=table["attention"],
            sequence_parallel=row["sequence_parallel"],
            pipeline_schedule="interleaved-1f1b" if several else None,
            pipeline_stages_per_rank=chunks if several else None,
            megatron=MegatronOptions(overlap_p2p_comm=table["scattered_sends"] and not row["sequence_parallel"]),
        ),
        mesh=MeshSpec(dp_shard=row["gpus"] // row["tp"] // row["pp"], tp=row["tp"], pp=row["pp"]),
        batch=BatchSpec(seq_len=row["seq_len"], micro_batch_size=micro_batch, grad_accum_steps=row["sequences"] // micro_batch),
    )
