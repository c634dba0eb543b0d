"""Calibration by a measured step: exact for that step, and compared with published runs that were not used."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from zeroplan import ClusterSpec, JobSpec, SpecError, job
from zeroplan.calibration import Reached, calibrated, middle
from zeroplan.carried import FITTED, Alike, Deviating, expected, of_job, of_model, weight
from zeroplan.catalog.gpu import gpu
from zeroplan.cli.app import main
from zeroplan.job_time import time_of
from zeroplan.measurement import BlocksMeasured, Environment, Measurement, PhaseMeasured, StepMeasured
from zeroplan.steptime.parts import Does

SAID: dict[str, Any] = {"model": "llama-3.2-1b", "gpu": "h100", "gpus": 8, "seq_len": 4096, "micro_batch": 2}


def measured(one: JobSpec, seconds: dict[str, float], **said: Any) -> Measurement:
    phases = tuple(
        PhaseMeasured(phase=phase, peak_bytes=1, kinds={}, blocks=BlocksMeasured(
            allocated_bytes=1, requested_bytes=1, active_bytes=1, reserved_bytes=1, seconds=took))
        for phase, took in seconds.items()
    )  # fmt: skip
    step = StepMeasured(phases=phases, held_bytes=0, held_kinds={})
    environment = Environment(python="3.11", platform="linux", packages={})
    how = {"backend": "cuda", "tensors": "cuda", "kernels": "cuda", "process_group": "nccl"} | said
    return Measurement(job=one, rank=0, environment=environment, steps=(step,), **how)


def seconds_of(one: JobSpec, *, step: bool) -> float:
    parts = time_of(one).parts
    return sum(float(part.seconds) for part in parts if (("optimizer step" in part.name) == step))


def test_the_calibrated_model_takes_as_long_as_was_measured():
    """Forward and backward take 1.5 times as long, the optimizer step twice as long."""
    one = job(**SAID)
    took = {"forward": 0.5 * seconds_of(one, step=False), "backward": seconds_of(one, step=False),
            "optimizer step": 2 * seconds_of(one, step=True)}  # fmt: skip
    after = replace(one, cluster=calibrated([measured(one, took)], one.cluster, one))
    assert seconds_of(after, step=False) == pytest.approx(took["forward"] + took["backward"], rel=1e-6)
    assert seconds_of(after, step=True) == pytest.approx(took["optimizer step"], rel=1e-6)


def test_of_several_runs_the_median_counts():
    """One slow run must not make the machine slow."""
    one = job(**SAID)
    slow, usual, quick = (measured(one, {"forward": factor * seconds_of(one, step=False),
                                         "optimizer step": seconds_of(one, step=True)}) for factor in (2.0, 1.05, 1.0))  # fmt: skip
    after = calibrated([slow, quick, usual], one.cluster, one)
    assert seconds_of(replace(one, cluster=after), step=False) == pytest.approx(1.05 * seconds_of(one, step=False), rel=1e-4)
    assert after.shares is not None
    assert after.shares.source == "calibrated by 3 steps"
    assert middle([Reached(0.5, 1.0), Reached(2.0, 1.0)]).computing == pytest.approx(1.0)


def test_one_card_that_stands_for_many_waits_for_nobody():
    one = job(**SAID | {"gpus": 64, "seq_len": 256, "micro_batch": 1})
    times = time_of(one).parts
    alone = sum(float(part.seconds) for part in times if part.does not in (Does.SENDING, Does.SENDING_AT_STEP))
    record = measured(one, {"forward": alone}, process_group="fake")
    after = calibrated([record], one.cluster, one).shares
    assert after is not None
    assert after.matrices == pytest.approx(0.81, rel=1e-4)  # Hopper's default share


@pytest.mark.parametrize(
    ("seconds", "said", "cluster", "expected"),
    [
        ({"forward": 0.0}, {"backend": "cpu"}, ClusterSpec(gpu=gpu("h100")), "without a GPU"),
        ({"forward": 1.0}, {}, ClusterSpec(gpu=gpu("a100")), "is of h100-sxm-80gb, and the job's is a100-sxm-80gb"),
        ({"forward": 1.0}, {}, ClusterSpec(), "none is named"),
        ({"forward": 1e-3}, {}, ClusterSpec(gpu=gpu("h100")), "quicker than the GPU's rates allow"),
        ({"forward": 1e4}, {}, ClusterSpec(gpu=gpu("h100")), "1/50 of the GPU's rates"),
    ],
)
def test_what_cannot_calibrate_is_refused(seconds: dict, said: dict, cluster: ClusterSpec, expected: str):
    with pytest.raises(SpecError, match=expected):
        calibrated([measured(job(**SAID), seconds, **said)], cluster, job(**SAID))


def test_a_plan_and_advice_are_timed_by_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    one = job(**SAID)
    slow = {"forward": 2 * seconds_of(one, step=False), "optimizer step": seconds_of(one, step=True)}
    (tmp_path / "record.json").write_text(json.dumps(asdict(measured(one, slow))))
    asked = ["--model", "llama-3.2-1b", "--gpu", "h100", "--gpus", "8", "--engine", "fsdp2", "--micro-batch", "2", "--json"]

    def answered(*arguments: str) -> dict:
        with pytest.raises(SystemExit):
            main([*arguments, *asked])
        return json.loads(capsys.readouterr().out)

    record = ("--calibrate", str(tmp_path / "record.json"))
    plain, after = (answered("plan", *more)["best"] for more in ((), record))
    slower = 2 ** weight(of_job(one), of_model(one.model))
    assert after["tokens_per_s_per_gpu"] == pytest.approx(plain["tokens_per_s_per_gpu"] / slower, rel=0.03)
    assert any("calibrated by a step of" in part["source"] for part in after["parts"])
    advised, after = (answered("advise", *more)["before"] for more in ((), record))
    assert after["tokens_per_s_per_gpu"] == pytest.approx(advised["tokens_per_s_per_gpu"] / slower, rel=0.05)
    with pytest.raises(SystemExit) as ended:
        main(["plan", *asked, *record, "--mfu", "0.4"])
    assert ended.value.code == 2
    assert "two rates" in capsys.readouterr().err


def test_what_carries_over_is_what_jobs_share():
    """By hand: with one run it is the variance of the shared parts over that of all; several runs carry more than one."""
    one = job(**SAID)
    variances = [size**2 for size in FITTED]
    same, other = of_job(one), of_job(job(**SAID | {"micro_batch": 1}))
    assert weight(same, same) == pytest.approx(1 - variances[-1] / sum(variances))
    assert weight(same, other) == pytest.approx(sum(variances[:4]) / sum(variances))
    assert weight(same, of_model(one.model)) == pytest.approx(sum(variances[:2]) / sum(variances))
    assert weight(same, of_job(job(**SAID | {"model": "llama-3.1-8b", "recompute": "full"}))) == pytest.approx(
        (variances[0] + variances[3]) / sum(variances)
    )
    assert weight(Alike(machine="one"), Alike(machine="another")) == 0
    runs = [Deviating(of_job(job(**SAID | {"micro_batch": size})), 0.1) for size in (1, 2, 4)]
    assert weight(same, of_model(one.model)) < expected(runs, of_model(one.model)) / 0.1 < 1
    assert expected([], same) == 0
