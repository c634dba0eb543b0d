"""Calibration by a measured step: exact for that step, and compared with published runs that were not used."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import pytest

from tests.steptime.published_runs import Run, built_on, predicted, runs
from zeroplan import ClusterSpec, JobSpec, SpecError, job
from zeroplan.calibration import Measured, Reached, calibrated, middle, reached
from zeroplan.catalog.gpu import gpu
from zeroplan.cli.app import main
from zeroplan.job_time import time_of
from zeroplan.measurement import BlocksMeasured, Environment, Measurement, PhaseMeasured, StepMeasured
from zeroplan.steptime import shares_of
from zeroplan.steptime.parts import Does

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = (Path(__file__).parents[1] / "docs" / "plan.md").read_text(encoding="utf-8")
SAID: dict[str, Any] = {"model": "llama-3.2-1b", "gpu": "h100", "gpus": 8, "seq_len": 4096, "micro_batch": 2}
#: At most this many rows of a machine calibrate; they are spread evenly over the file.
MOST = 8


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
    after = replace(one, cluster=calibrated([measured(one, took)], one.cluster))
    assert seconds_of(after, step=False) == pytest.approx(took["forward"] + took["backward"], rel=1e-6)
    assert seconds_of(after, step=True) == pytest.approx(took["optimizer step"], rel=1e-6)


def test_of_several_runs_the_median_counts():
    """One slow run must not make the machine slow."""
    one = job(**SAID)
    slow, usual, quick = (measured(one, {"forward": factor * seconds_of(one, step=False),
                                         "optimizer step": seconds_of(one, step=True)}) for factor in (2.0, 1.05, 1.0))  # fmt: skip
    after = calibrated([slow, quick, usual], one.cluster)
    assert seconds_of(replace(one, cluster=after), step=False) == pytest.approx(1.05 * seconds_of(one, step=False), rel=1e-4)
    assert after.shares is not None
    assert after.shares.source == "calibrated by 3 steps"
    assert middle([Reached(0.5, 1.0), Reached(2.0, 1.0)]).computing == pytest.approx(1.0)


def test_one_card_that_stands_for_many_waits_for_nobody():
    one = job(**SAID | {"gpus": 64, "seq_len": 256, "micro_batch": 1})
    times = time_of(one).parts
    alone = sum(float(part.seconds) for part in times if part.does not in (Does.SENDING, Does.SENDING_AT_STEP))
    record = measured(one, {"forward": alone}, process_group="fake")
    after = calibrated([record], one.cluster).shares
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
        calibrated([measured(job(**SAID), seconds, **said)], cluster)


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
    assert after["tokens_per_s_per_gpu"] == pytest.approx(plain["tokens_per_s_per_gpu"] / 2, rel=0.1)
    assert any("calibrated by a step of" in part["source"] for part in after["parts"])
    advised, after = (answered("advise", *more)["before"] for more in ((), record))
    assert after["tokens_per_s_per_gpu"] < 0.6 * advised["tokens_per_s_per_gpu"]
    with pytest.raises(SystemExit) as ended:
        main(["plan", *asked, *record, "--mfu", "0.4"])
    assert ended.value.code == 2
    assert "two rates" in capsys.readouterr().err


def errors_of(chosen: list[Run], by: Any, *, several: int = 1) -> Iterator[float]:
    """Yield the error of every other run after calibration by ``several`` rows of the same group, for rows spread evenly."""
    for _, alike in groupby(sorted(chosen, key=by), key=by):
        rows = list(alike)
        some = rows[:: -(-len(rows) // MOST)] if len(rows) > several else []
        factors = [reached(one.job, Measured(float(predicted(one).tokens) / one.tokens_per_s), one.running) for one in some]
        for at in range(len(some)):
            mine = [(at + further) % len(some) for further in range(several)]
            factor = middle([factors[one] for one in mine])
            share = shares_of(some[at].job.cluster).scaled(factor.computing, stepping=factor.stepping)
            yield from (abs(float(predicted(other, share=share).tokens_per_s) / other.tokens_per_s - 1)
                        for other in rows if all(other is not some[one] for one in mine))  # fmt: skip


def machine(run: Run) -> str:
    publisher, _, card = run.group.split("|")
    return f"{publisher} {card}"


def test_the_page_has_what_one_calibrating_row_leaves():
    """The aim is a median error of 5 % on either half, calibrated by a run of the same model on the same machine."""
    halves = {"one half": [run for run in runs() if run.group in built_on()],
              "the other half": [run for run in runs() if run.group not in built_on()]}  # fmt: skip
    for name, half in halves.items():
        plain = median(abs(float(predicted(run).tokens_per_s) / run.tokens_per_s - 1) for run in half)
        ways = [(by, several) for by in (machine, lambda run: run.group) for several in (1, 3)]
        errors = [median(errors_of(half, by, several=several)) for by, several in ways]
        row = f"| {name} | {' | '.join(f'{100 * figure:.1f} %' for figure in (plain, *errors))} |"
        assert row in PAGE, row
    assert errors[2] < 0.05
