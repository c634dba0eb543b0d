"""The published printouts of DeepSpeed's own estimators, reproduced to the last printed digit."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests import published_estimators as estimators
from zeroplan.units import GIB

GOLDEN = tomllib.loads((Path(__file__).parents[1] / "golden" / "deepspeed_estimators.toml").read_text())


@pytest.mark.parametrize("row", GOLDEN.values(), ids=GOLDEN.keys())
def test_reproduces_a_published_printout(row: dict[str, Any]):
    estimator = getattr(estimators, row["estimator"])
    assert estimator(**row["arguments"]) / GIB == pytest.approx(row["printed_gib"], abs=0.005)


def test_the_estimator_of_0_19_8_differs_from_the_documented_printout():
    new = estimators.zero2_estimate(2_851_000_000, n_gpus=8)
    assert new / GIB == pytest.approx(11.28, abs=0.005)  # 2·2.851 + 18·2.851/8 = 12.117 GB


@pytest.mark.deepspeed
@pytest.mark.parametrize(("n_gpus", "offload"), [(1, False), (8, False), (8, True)])
def test_zero2_agrees_with_the_installed_estimator(n_gpus: int, *, offload: bool):
    stage12 = pytest.importorskip("deepspeed.runtime.zero.stage_1_and_2")
    theirs = stage12.estimate_zero2_model_states_mem_needs(10**9 + 8, num_gpus_per_node=n_gpus, cpu_offload=offload)[1]
    assert estimators.zero2_estimate(10**9 + 8, n_gpus=n_gpus, offload_optimizer=offload) == theirs
