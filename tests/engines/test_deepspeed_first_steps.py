"""The estimate against the first and a later step of DeepSpeed's own code at stage 3, for random jobs of 17 models.

Each line of ``deepspeed_first_steps.jsonl`` has a job and two peaks. DeepSpeed 0.19.8 ran it as rank 0 of a fake process group on
fake tensors (``zeroplan verify``, backend ``simulate``). Half of the jobs were drawn among those whose first step is the highest.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from zeroplan import estimate
from zeroplan.catalog.model import model
from zeroplan.ledger import Kind, Phase
from zeroplan.spec.adapter import AdapterSpec
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.recipe import DeepSpeedOptions, RecipeSpec

RUNS = [json.loads(line) for line in Path(__file__).with_name("deepspeed_first_steps.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.parametrize("at", range(len(RUNS)))
def test_the_peak_of_a_run_is_that_of_its_highest_step(at: int) -> None:
    run, job = RUNS[at], _job(at)
    first, later = run["first_bytes"], run["later_bytes"]
    moments = estimate(job).engine_moments
    peaks = {phase: max((_on_fake_tensors(one.lines) for one in moments if one.phase is phase), default=0) for phase in Phase}
    found = max(n_bytes for phase, n_bytes in peaks.items() if phase is not Phase.INIT)
    assert found / max(first, later) == pytest.approx(1, abs=2e-3)
    if first > 1.002 * later:
        assert peaks[Phase.FIRST] == found


def _on_fake_tensors(lines: tuple[Any, ...]) -> int:
    return sum(int(line.n_bytes) for line in lines if line.kind is not Kind.WORKSPACE)


@cache
def _job(at: int) -> JobSpec:
    run = RUNS[at]
    adapter = AdapterSpec(**run["adapter"]) if "adapter" in run else None
    return JobSpec(
        model=replace(model(run["model"]), num_hidden_layers=run["layers"], adapter=adapter),
        recipe=RecipeSpec(
            engine="deepspeed", zero_stage=3, recompute=run["recompute"], optimizer=run["optimizer"], precision=run["precision"],
            deepspeed=DeepSpeedOptions(**run["options"]), kernels="cuda",
        ),
        mesh=MeshSpec(dp_shard=run["ranks"]),
        batch=BatchSpec(seq_len=run["seq_len"], grad_accum_steps=run["micro_batches"]),
    )  # fmt: skip
