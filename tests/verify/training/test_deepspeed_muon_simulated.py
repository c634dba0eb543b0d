"""DeepSpeed's own Muon takes what is estimated: on one rank to the byte, and of several ranks the fullest."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from tests.deepspeed_process import asked
from tests.measured.errors import different_kinds
from zeroplan.catalog.model import model
from zeroplan.comparison import Comparison, compare_with_estimate
from zeroplan.measurement import Measurement
from zeroplan.spec.base import read
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.recipe import RecipeSpec

pytestmark = [pytest.mark.torch, pytest.mark.deepspeed]


def compared(stage: int, n_ranks: int, ranks: tuple[int, ...], micro_batches: int = 1, **fields: Any) -> list[Comparison]:
    job = JobSpec(
        model=replace(model("llama-2-7b"), num_hidden_layers=3),
        recipe=RecipeSpec(engine="deepspeed", optimizer="muon", zero_stage=stage, **fields),
        mesh=MeshSpec(dp_shard=n_ranks),
        batch=BatchSpec(seq_len=512, grad_accum_steps=micro_batches),
    )
    told = asked([{"ask": "simulated", "rank": rank, "job": asdict(job)} for rank in ranks])
    return [compare_with_estimate(read(Measurement, one, where="record")) for one in told]


@pytest.mark.parametrize(("stage", "precision"), [(2, "bf16-mixed"), (1, "fp32")])
def test_one_rank_takes_what_is_estimated(stage: int, precision: str):
    (one,) = compared(stage, 1, (0,), precision=precision)
    assert abs(one.peak.error) < 0.0001, one
    assert abs(one.held.error) < 0.0001, one
    assert different_kinds(one) == []


@pytest.mark.parametrize("stage", [1, 2])
def test_the_rank_with_most_matrices_takes_what_is_estimated(stage: int):
    (one,) = compared(stage, 8, (1,))
    assert abs(one.peak.error) < 0.0001, one
    assert abs(one.held.error) < 0.0001, one
    assert [row.what for row in one.collectives if abs(row.difference) > 1000] == []
    assert different_kinds(one) == []


def test_no_rank_takes_more_than_is_estimated():
    every = compared(2, 3, (0, 1, 2), micro_batches=2)
    assert max(one.peak.measured for one in every) <= 1.0001 * every[0].peak.predicted
    assert max(one.held.measured for one in every) == pytest.approx(every[0].held.predicted, rel=0.0001)
    assert {one.peak.predicted for one in every} == {every[0].peak.predicted}
