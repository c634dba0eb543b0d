"""The published training runs of tests/golden/throughput.toml as jobs, split by hash into two halves before any was examined."""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from zeroplan import BatchSpec, ClusterSpec, Fsdp2Options, JobSpec, MeshSpec, ModelSpec, RecipeSpec
from zeroplan.catalog.gpu import gpu
from zeroplan.estimator import engine_module
from zeroplan.steptime import Running, StepTime, step_time

FILE = Path(__file__).parents[1] / "golden" / "throughput.toml"


#: llm-foundry's attention (scripts/train/benchmarking/submit_benchmarks.py, ``--attn_impl``).
TRITON = Running(flash=1)


class Run(NamedTuple):
    """One row: its source, the job that ran, and the speed that was measured."""

    id: str
    drawn_with: str
    """The rows whose groups are halved together: a publisher's, or those that it added later."""
    group: str
    """Publisher, model and GPU. The rows of a group are all in the same half."""
    job: JobSpec
    tokens_per_s: float
    running: Running
    """The kernels of the run."""


@cache
def runs() -> tuple[Run, ...]:
    """Return every row, except those that recompute partly."""
    data = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return tuple(
        _run(data["models"], table, row) for table in data["tables"] for row in table["rows"] if row["recompute"] != "partly"
    )


@cache
def built_on() -> frozenset[str]:
    """Return the groups that the constants were fitted on: every other group of each publisher, in the order of their hashes."""
    return every_other(runs())


def every_other(rows: tuple[Run, ...]) -> frozenset[str]:
    """Return every other group of those with the same ``drawn_with``, in the order of their hashes."""
    ordered = sorted({(run.drawn_with, hashlib.sha256(run.group.encode()).hexdigest(), run.group) for run in rows})
    each = (list(of_one) for _, of_one in groupby(ordered, key=lambda one: one[0]))
    return frozenset(group for of_one in each for *_, group in of_one[::2])


def _run(models: dict, table: dict, row: dict) -> Run:
    publisher = table["source"].split("/")[0]
    drawn_with = f"{publisher}, later" if table.get("joined_later") else publisher
    group = "|".join((publisher, row["model"].lower(), table["gpu"]))
    job = _job(models[row["model"]], table, row)
    running = TRITON if "mosaicml" in publisher else Running()
    return Run(row["id"], drawn_with, group, job, row["tokens_per_s_per_gpu"], running)


def _job(sizes: dict, table: dict, row: dict) -> JobSpec:
    replicas = row["gpus"] // 8 if table["sharding"] == "hsdp" else 1
    return JobSpec(
        model=shape_of(sizes, row),
        cluster=cluster_of(table["gpu"], table),
        recipe=RecipeSpec(
            engine="fsdp2",
            zero_stage=2 if table["sharding"] == "zero2" else 3,
            optimizer_impl="fused",
            recompute=row["recompute"],
            fsdp2=Fsdp2Options(reduce_dtype="fp32" if "DEFAULT" in table["precision"] else "param"),
        ),
        mesh=MeshSpec(dp_shard=row["gpus"] // replicas, dp_replicate=replicas),
        batch=BatchSpec(seq_len=row["seq_len"], micro_batch_size=row["micro_batch"], grad_accum_steps=row["grad_accum"]),
    )


def cluster_of(name: str, table: dict) -> ClusterSpec:
    """Return nodes of eight GPUs with the network that the source states."""
    card, network = gpu(name), table["node_network_gbit_per_s"]
    if network:
        figure = replace(card.network_link_bytes_per_s, value=network * 1e9 / 8 / 8, check=None)
        card = replace(card, network_link_bytes_per_s=figure)
    return ClusterSpec(gpu=card)


def shape_of(sizes: dict, row: dict) -> ModelSpec:
    learned = sizes["family"] == "gpt2"
    return ModelSpec(
        family=sizes["family"],
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["ffn"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        head_dim=sizes["hidden"] // sizes["heads"],
        vocab_size=sizes["vocab"],
        max_position_embeddings=row["seq_len"],
        positions=row["seq_len"] if learned else 0,
        tie_word_embeddings=learned,
        attention_bias=learned,
        mlp_bias=learned,
        hidden_act="gelu" if learned and "mpt" in str(row.get("model", "")).lower() else None,
    )


def predicted(run: Run, **assumed: object) -> StepTime:
    """Return zeroplan's time of a run's step."""
    job = run.job
    account = engine_module(job.recipe.engine).account(job.model, job.recipe, job.mesh, job.batch)
    return step_time(account, job.model, job.recipe, job.mesh, job.batch, job.cluster, running=run.running, **assumed)
