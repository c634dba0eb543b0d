"""``zeroplan time``: the predicted time of a step, and its calibration with a measured rate."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from zeroplan import job
from zeroplan.calibration import learnt_from
from zeroplan.job_time import time_of

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


def test_a_job_that_does_not_fit_also_has_a_time(run: Run):
    code, out, _ = run("time", "--model", "llama-3.1-70b", "--gpu", "h100", "--gpus", "8", "--engine", "fsdp2", "--explain")
    assert code == 0
    assert "does not fit" in out
    assert "How each part is computed" in out


def test_a_calibrated_step_has_the_measured_rate(run: Run):
    plain, after = answered(run), answered(run, "--measured", "tokens-per-second=5000")
    assert after["tokens_per_s_per_gpu"] == pytest.approx(5000, rel=1e-6)
    assert after["measured"]["factor"] == pytest.approx(plain["step_s"] / after["step_s"], rel=0.2)
    assert after["measured"]["estimated_s"] == pytest.approx(plain["step_s"])
    found = learnt_from(job(model="llama-3.1-8b", gpu="h100", gpus=8, engine="fsdp2", seq_len=8192), 5000.0)
    assert found.cluster.shares.matrices < 0.8


def test_a_plan_can_be_calibrated_with_a_run_of_another_job(run: Run, tmp_path: Path):
    ran, ran_job = tmp_path / "ran.toml", job(model="llama-3.1-8b", gpu="h100", gpus=8, engine="fsdp2", seq_len=8192)
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
    learnt = learnt_from(ran_job, 5000.0, ran_job.model)
    slower = (learnt.measured_s / learnt.estimated_s) ** learnt.carried
    assert after["best"]["step_s"] == pytest.approx(slower * plain["best"]["step_s"], rel=0.03)
    assert slower > 1.05
    assert any("of this deviation, by published runs" in note for note in after["notes"])


TITAN = """[titan] step:  1  loss: 12.2  grad_norm:  4.1  memory: 40.00GiB(50.53%)  tps: 310  tflops: 15.0  mfu: 1.5%
[titan] step: 10  loss:  9.9  grad_norm:  8.0  memory: 40.00GiB(50.53%)  \x1b[34mtps: 4,900  \x1b[36mtflops: 290.0  mfu: 29.0%
[titan] step: 20  loss:  8.1  grad_norm:  2.2  memory: 40.00GiB(50.53%)  \x1b[34mtps: 5,100  \x1b[36mtflops: 291.0  mfu: 29.1%
[titan] validate step: 20  loss:  8.0000  memory: 40.00GiB(50.53%)  tps: 15,000
"""
MEGATRON = """ iteration        1/ 100 | consumed samples: 8 | elapsed time per iteration (ms): 9000.0 | learning rate: 1E-05 | global batch size:     8 |
 iteration        2/ 100 | consumed samples: 16 | elapsed time per iteration (ms): 1638.4 | learning rate: 1E-05 | global batch size:     8 |
"""  # noqa: E501
TRAINER = "{'train_runtime': '100.0', 'train_samples_per_second': '4.883', 'train_steps_per_second': '0.61', 'epoch': '1'}"


@pytest.mark.parametrize(("log", "rate"), [(TITAN, 5000), (MEGATRON, 5000), (TRAINER, 4.883 * 8192 / 8)])
def test_the_rate_is_read_from_the_log_of_a_run(run: Run, tmp_path: Path, log: str, rate: float):
    """The run has eight sequences of 8,192 tokens per step on eight GPUs; the first step, a warm-up, does not count."""
    path = tmp_path / "run.log"
    path.write_text(log, encoding="utf-8")
    assert answered(run, "--measured", str(path))["tokens_per_s_per_gpu"] == pytest.approx(rate, rel=1e-6)


@pytest.mark.parametrize(
    ("log", "says"),
    [("step 1: 3 s", "no rate that zeroplan can read"), (MEGATRON.replace("     8 |", "    16 |"), "have 16 seq")],
)
def test_a_log_of_another_run_is_refused(run: Run, tmp_path: Path, log: str, says: str):
    path = tmp_path / "run.log"
    path.write_text(log, encoding="utf-8")
    code, _, err = run(*ASKED, "--measured", str(path))
    assert code == 2
    assert says in err


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--measured", "5000"), "is neither a rate"),
        (("--measured", "seconds=2"), "is neither a rate"),
        (("--measured", "tokens-per-second=5e9"), "is neither a rate"),
        (("--measured", "tokens-per-second=900000"), "quicker than the GPU's rates allow"),
        (("--measured", "tokens-per-second=5000", "--mfu", "0.4"), "use one of them"),
    ],
)
def test_an_invalid_rate_is_refused(run: Run, more: tuple[str, ...], says: str):
    code, _, err = run(*ASKED, *more)
    assert code == 2
    assert says in err
