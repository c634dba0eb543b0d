"""``zeroplan time``: the step that a plan shows, and what a measured rate teaches."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from zeroplan import job
from zeroplan.calibration import learnt_from
from zeroplan.planner import time_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.command import Run

ASKED = ("time", "--model", "llama-3.1-8b", "--gpu", "h100", "--gpus", "8", "--engine", "fsdp2", "--seq-len", "8192")


def answered(run: Run, *more: str) -> dict[str, Any]:
    code, out, err = run(*ASKED, *more, "--json")
    assert code == 0, err
    return json.loads(out)


def test_the_parts_add_up_to_the_step_of_the_job(run: Run):
    found = answered(run)
    whole = time_of(job(model="llama-3.1-8b", gpu="h100", gpus=8, engine="fsdp2", seq_len=8192))
    assert found["step_s"] == pytest.approx(float(whole.seconds))
    assert sum(part["seconds"] for part in found["parts"]) == pytest.approx(found["step_s"])
    assert found["tokens_per_s_per_gpu"] * found["step_s"] == pytest.approx(8192)


def test_a_job_that_does_not_fit_has_a_time(run: Run):
    code, out, _ = run("time", "--model", "llama-3.1-70b", "--gpu", "h100", "--gpus", "8", "--engine", "fsdp2", "--explain")
    assert code == 0
    assert "does not fit" in out
    assert "How each part is computed" in out


def test_a_measured_rate_is_met_and_slows_what_computes(run: Run):
    plain, after = answered(run), answered(run, "--measured", "tokens-per-second=5000")
    assert after["tokens_per_s_per_gpu"] == pytest.approx(5000, rel=1e-6)
    assert after["measured"]["factor"] == pytest.approx(plain["step_s"] / after["step_s"], rel=0.2)
    assert after["measured"]["estimated_s"] == pytest.approx(plain["step_s"])
    found = learnt_from(job(model="llama-3.1-8b", gpu="h100", gpus=8, engine="fsdp2", seq_len=8192), 5000.0)
    assert found.cluster.shares.matrices < 0.8


def test_a_plan_takes_a_measured_run_of_another_job(run: Run, tmp_path: Path):
    ran = tmp_path / "ran.toml"
    ran.write_text('model = "llama-3.1-8b"\ngpu = "h100"\ngpus = 8\nengine = "fsdp2"\nseq_len = 8192\n')
    asked = (
        *("plan", "--model", "llama-3.1-8b", "--gpu", "h100", "--gpus", "8", "--engine", "fsdp2", "--stage", "3"),
        *(
            "--recompute",
            "full",
            "--tensor-parallel",
            "1",
            "--pipeline-parallel",
            "1",
            "--seq-len",
            "2048",
            "--micro-batch",
            "1",
        ),
        "--json",
    )
    plain, after = (json.loads(run(*asked, *more)[1])
                    for more in ((), ("--measured", "tokens-per-second=5000", "--measured-job", str(ran))))  # fmt: skip
    assert after["best"]["step_s"] > 1.2 * plain["best"]["step_s"]
    assert any("usual rates here" in note for note in after["notes"])


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--measured", "5000"), "is not a rate"),
        (("--measured", "seconds=2"), "is not a rate"),
        (("--measured", "tokens-per-second=5e9"), "is not a rate"),
        (("--measured", "tokens-per-second=900000"), "quicker than the GPU's rates allow"),
        (("--measured", "tokens-per-second=5000", "--mfu", "0.4"), "use one of them"),
    ],
)
def test_what_is_no_rate_is_refused(run: Run, more: tuple[str, ...], says: str):
    code, _, err = run(*ASKED, *more)
    assert code == 2
    assert says in err
