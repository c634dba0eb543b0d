"""DeepSpeed takes the same on fake tensors as on real ones, to the byte; simulated large jobs are as estimated."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any, Literal, NamedTuple

import pytest

from tests.combined import of_the_day
from tests.deepspeed_process import asked
from tests.engines.test_deepspeed_measured import CASES
from tests.measured.errors import different_kinds
from zeroplan.catalog.model import model
from zeroplan.comparison import compare_with_estimate
from zeroplan.errors import SpecError
from zeroplan.estimator import estimate
from zeroplan.measurement import Measurement
from zeroplan.spec.adapter import AdapterSpec
from zeroplan.spec.base import read
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.frozen import FrozenSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.recipe import DeepSpeedOptions, RecipeSpec

pytestmark = [pytest.mark.torch, pytest.mark.deepspeed]


class Run(NamedTuple):
    """A job, the rank to run it as, and the answer to ask for: see ``deepspeed_runs.py``."""

    job: JobSpec
    rank: int = 0
    ask: Literal["exact", "simulated", "fails"] = "simulated"


def small(name: str) -> JobSpec:
    case = CASES[name]
    return JobSpec(
        model=replace(case.model, num_hidden_layers=2),
        recipe=case.recipe,
        mesh=MeshSpec(dp_shard=case.n_ranks),
        batch=case.batch,
    )


EXACT = {
    name: Run(small(name), rank, "exact")
    for name, rank in {
        "stage 0, FusedAdam's wrapper": 1,
        "stage 1, accumulating": 3,
        "stage 2": 0,
        "stage 2, three ranks, few tokens": 2,
        "stage 2, experts": 0,
        "stage 2, no contiguous gradients": 0,
        "stage 3, three ranks, default bucket": 0,
        "stage 3, streaming, recomputed": 3,
        "stage 3, some persistent, accumulating": 0,
        "stage 3, sub-groups, foreach": 2,
    }.items()
}

SEVEN_B, FEW_TOKENS = model("llama-2-7b"), BatchSpec(seq_len=512)


def seven_b(
    stage: int, *, layers: int = 6, adapter: AdapterSpec | None = None, frozen: FrozenSpec | None = None, **fields: Any
) -> Run:  # fmt: skip
    return Run(
        JobSpec(
            model=replace(SEVEN_B, num_hidden_layers=layers, adapter=adapter, frozen=frozen),
            recipe=RecipeSpec(engine="deepspeed", zero_stage=stage, **fields),
            mesh=MeshSpec(dp_shard=8),
            batch=FEW_TOKENS,
        )
    )


LARGE = {
    "7B wide, stage 0": seven_b(0),
    "7B wide, stage 1, fp16": seven_b(1, precision="fp16-mixed"),
    "7B wide, stage 2, recomputed": seven_b(2, recompute="full"),
    "7B wide, stage 2, 2 blocks of 6 recomputed": seven_b(2, recompute="full", recompute_layers=2),
    "7B wide, stage 2, lora, 2 blocks recomputed": seven_b(
        2, adapter=AdapterSpec(rank=8), recompute="full", recompute_layers=2
    ),
    "7B wide, stage 1, 2 blocks frozen, 4 recomputed": seven_b(
        1, frozen=FrozenSpec(layers=2), recompute="full", recompute_layers=4
    ),
    "7B wide, 8 layers, stage 2, recomputed": seven_b(2, layers=8, recompute="full"),
    "7B wide, stage 3": seven_b(3),
    "7B wide, stage 3, buckets all-reduced, gradients added up in fp32": seven_b(
        3,
        deepspeed=DeepSpeedOptions(
            reduce_scatter=False, grad_accum_dtype="fp32", stage3_max_live_parameters=10**7, stage3_max_reuse_distance=10**7
        ),
    ),
    "7B wide, stage 3, 2 blocks of 6 recomputed": seven_b(3, recompute="full", recompute_layers=2),
    "7B wide, stage 3, lora, 4 blocks recomputed": seven_b(
        3, adapter=AdapterSpec(rank=8), recompute="full", recompute_layers=4
    ),
}


_REFUSED = replace(small("stage 3"), recipe=replace(small("stage 3").recipe, recompute="selective"))
REFUSED = {"stage 3, recomputed selectively": Run(_REFUSED, ask="fails")}


TODAY = of_the_day(__file__, EXACT | LARGE | REFUSED)


def answers(runs: dict[str, Run]) -> dict[str, dict[str, Any]]:
    """Return the answer of each run."""
    questions = [{"ask": run.ask, "rank": run.rank, "job": asdict(run.job)} for run in runs.values()]
    return dict(zip(runs, asked(questions), strict=True))


@pytest.fixture(scope="module")
def told() -> dict[str, dict[str, Any]]:
    return answers(TODAY)


@pytest.mark.parametrize("name", [name for name in TODAY if name in EXACT])
def test_the_tracker_sees_what_the_profiler_sees_and_the_same_on_fake_tensors(name: str, told: dict[str, dict[str, Any]]):
    run = told[name]
    assert len(run["profiled"]) == 3 * 3
    assert run["real"] == run["profiled"]
    assert run["fake"] == run["profiled"]


@pytest.mark.parametrize("name", [name for name in TODAY if name in EXACT])
def test_every_collective_of_the_real_run_is_in_the_fake_one(name: str, told: dict[str, dict[str, Any]]):
    assert told[name]["real calls"]
    assert told[name]["fake calls"] == told[name]["real calls"]


@pytest.mark.parametrize("name", [name for name in TODAY if name in LARGE])
def test_a_large_job_takes_what_is_estimated(name: str, told: dict[str, dict[str, Any]]):
    measured = read(Measurement, told[name], where="record")
    compared = compare_with_estimate(measured)
    assert abs(compared.peak.error) < 0.0001, compared
    assert abs(compared.held.error) < 0.0001, compared
    assert [row.what for row in compared.collectives if abs(row.difference) > 1000] == []
    assert different_kinds(compared) == []


@pytest.mark.parametrize("name", [name for name in TODAY if name in LARGE])
def test_all_layers_of_a_deepspeed_job_are_run(name: str, told: dict[str, dict[str, Any]]):
    assert not any("extended" in remark for remark in told[name]["remarks"])


def test_stage_3_with_selective_recomputation_fails_in_deepspeed_and_is_refused(told: dict[str, dict[str, Any]]):
    ((name, refused),) = REFUSED.items()
    assert "RuntimeError" in told[name]["error"]
    assert "size of tensor a (0)" in told[name]["error"]
    with pytest.raises(SpecError, match="releases a weight"):
        estimate(refused.job)
