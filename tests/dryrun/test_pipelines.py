"""Dry runs of pipeline ranks: a later stage needs the messages of the stage before it, so that zeroplan runs both."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.combined import BY_NIGHT
from tests.dryrun.running import SCRIPTS, dry_run
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.pipeline import cut, indices_of_rank, stages_per_rank
from zeroplan.spec.recipe import RecipeSpec

if TYPE_CHECKING:
    from pathlib import Path

    from zeroplan.measurement import Measurement

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

PP, SHARDS, STEPS = 2, 2, 3
_MODEL = ModelSpec(family="llama", hidden_size=64, intermediate_size=160, num_hidden_layers=6, num_attention_heads=4,
                   num_key_value_heads=2, head_dim=16, vocab_size=256)  # fmt: skip
_SCHEDULES = {
    "gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "interleaved-zero-bubble": "ScheduleInterleavedZeroBubble", "zbv": "ScheduleZBVZeroBubble",
}  # fmt: skip


def test_a_first_stage_runs_alone(tmp_path: Path):
    """At the peak it holds each micro-batch's input, the hidden states before and after GELU, and the output."""
    run = dry_run("--gpus", "2", "--", str(SCRIPTS / "pipelined.py"), folder=tmp_path)
    parameters = 4 * (512 * 2048 * 2 + 2048 + 512)
    kept = 64 * 4 * (512 + 2 * 2048 + 512)
    assert run.answer["companions"] == []
    assert run.answer["steps"][-1]["held_bytes"] == pytest.approx(3 * parameters, rel=0.02)
    forward = next(phase for phase in run.answer["steps"][-1]["phases"] if phase["phase"] == "forward")
    assert forward["peak_bytes"] == pytest.approx(3 * parameters + kept, rel=0.02)


def test_a_rank_receives_what_real_ranks_receive(tmp_path: Path):
    """Messages: batched tensors in both directions, host tensors, objects with tensors, and shapes of four stages on two ranks."""
    real, dry = tmp_path / "real", tmp_path / "dry"
    real.mkdir()
    dry.mkdir()
    script = str(SCRIPTS / "talks.py")
    run = dry_run("--gpus", "2", "--as-rank", "1", "--", script, str(dry), folder=tmp_path, flags=("--json",))
    assert run.answer["companions"] == [0]
    ranks = [_real_rank(rank, script, real, tmp_path / "meet") for rank in range(2)]
    assert [one.wait(120) for one in ranks] == [0, 0]
    for name in ("heard-0.json", "heard-1.json"):
        assert json.loads((dry / name).read_text()) == json.loads((real / name).read_text())


def _real_rank(rank: int, script: str, folder: Path, meet: Path) -> subprocess.Popen[bytes]:
    """Start the script as a real rank over gloo; the ranks find each other through the file ``meet``."""
    begun = (
        "import runpy, sys, torch, torch.distributed as dist\n"
        f"dist.init_process_group('gloo', init_method='file://{meet}', rank={rank}, world_size=2)\n"
        "dist.init_process_group = lambda *_: None\n"
        f"sys.argv = [{script!r}, {str(folder)!r}]\n"
        f"runpy.run_path({script!r}, run_name='__main__')\n"
    )
    return subprocess.Popen([sys.executable, "-c", begun], env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize(
    ("schedule", "rank", "stage"),
    [
        ("gpipe", 3, 2),
        ("1f1b", 2, 2),
        ("1f1b", 2, 3),
        ("interleaved-1f1b", 0, 2),
        ("interleaved-1f1b", 3, 2),
        ("interleaved-zero-bubble", 2, 2),
        ("zbv", 0, 2),
        ("zbv", 2, 2),
    ],
)
def test_a_rank_has_the_memory_that_verify_measures(tmp_path: Path, schedule: str, rank: int, stage: int):
    """Every phase's peak and the bytes held are equal. `verify` tells the stages their shapes; in a dry run they infer them."""
    pytest.importorskip("transformers")
    known = _job(schedule, stage)
    (tmp_path / "job.json").write_text(json.dumps(_said(known)))
    flags = ("--gpus", str(PP * SHARDS), "--as-rank", str(rank), "--steps", str(STEPS))
    run = dry_run(*flags, "--", str(SCRIPTS / "same_pipeline.py"), "job.json", folder=tmp_path)
    last, oracle = run.answer["steps"][-1], _verified(known, rank).steady
    assert len(run.answer["companions"]) == 1
    assert {one["phase"]: one["peak_bytes"] for one in last["phases"]} == {one.phase: one.peak_bytes for one in oracle.phases}
    assert last["held_bytes"] == oracle.held_bytes


def _job(schedule: str, stage: int) -> JobSpec:
    """Return a pipeline job with eager attention: a dry run counts scratch of flash attention's backward that `verify` does not."""
    return JobSpec(
        model=_MODEL, mesh=MeshSpec(pp=PP, dp_shard=SHARDS), batch=BatchSpec(micro_batch_size=2, seq_len=32, grad_accum_steps=4),
        recipe=RecipeSpec(zero_stage=stage, pipeline_schedule=schedule, optimizer_impl="foreach", attention="eager"),  # type: ignore[arg-type]
    )  # fmt: skip


def _said(known: JobSpec) -> dict[str, object]:
    """Return the job as the JSON that the script reads."""
    from zeroplan.verify.training.causal_model import config

    schedule, batch = known.recipe.pipeline_schedule, known.batch
    assert schedule is not None
    cuts = cut(_MODEL.num_hidden_layers, PP * stages_per_rank(schedule, None))
    return {
        "config": config(_MODEL), "attention": "eager", "pp": PP, "stage": known.recipe.zero_stage, "seq_len": batch.seq_len,
        "micro_batch": batch.micro_batch_size, "micro_batches": batch.grad_accum_steps, "schedule": _SCHEDULES[schedule],
        "cuts": [(one.start, one.stop) for one in cuts],
        "stages_of_ranks": [indices_of_rank(schedule, rank=rank, pp=PP, stages=len(cuts)) for rank in range(PP)],
    }  # fmt: skip


def _verified(known: JobSpec, rank: int) -> Measurement:
    from zeroplan.verify.processes.launch import launch
    from zeroplan.verify.task import Task

    records: list[Measurement] = []
    task = Task(job=known, transport="fake", tensors="fake", steps=STEPS, rank=rank)
    launch(task, keep=records.append, say=lambda _: None)
    return records[-1]


@BY_NIGHT
@pytest.mark.deepspeed
@pytest.mark.parametrize(("rank", "companions"), [(0, []), (2, [0]), (7, [1, 3, 5])])
def test_deepspeeds_stages_receive_what_the_stage_before_sends(tmp_path: Path, rank: int, companions: list[int]):
    """Four stages of two ranks each send hidden states in fp32 and a mask of booleans."""
    pytest.importorskip("deepspeed")
    script = str(SCRIPTS / "deepspeed_pipe.py")
    run = dry_run("--gpus", "8", "--as-rank", str(rank), "--", script, str(tmp_path), folder=tmp_path)
    assert run.answer["companions"] == companions
    heard = json.loads((tmp_path / f"heard-{rank}.json").read_text())
    assert heard == ([[[4, 16, 64], "torch.float32"], [[4, 16], "torch.bool"]] if rank else [])


@BY_NIGHT
def test_the_answer_names_the_other_ranks_that_ran(tmp_path: Path):
    run = dry_run("--gpus", "2", "--as-rank", "1", "--", str(SCRIPTS / "pipelined.py"), folder=tmp_path, flags=("-q",))
    assert "1 further rank ran beside it for what it sends: 0." in " ".join(run.output.split())


FAILS = """
import os, signal, sys, time
import torch, torch.distributed as dist
dist.init_process_group("nccl")
size = torch.zeros(1, dtype=torch.int64, device="cuda")
if dist.get_rank() == 0:
    {does}
    dist.send(size + 8, 1)
else:
    dist.recv(size, 0)
model = torch.nn.Linear(size.item() or 4, 4).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    model(torch.randn(4, model.in_features, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
_BESIDE = "rank 0, which ran beside rank 1, failed: "
DOES = {
    "dies": ("os.kill(os.getpid(), signal.SIGKILL)", 4, f"{_BESIDE}its process ended: killed by SIGKILL"),
    "raises": ("raise ValueError('no data')", 2, f"{_BESIDE}the script raised ValueError at script.py:7: no data"),
    "sends nothing": ("dist.send = lambda *_: None", 4, "a message of rank 0, which ended without sending it"),
    "never comes to it": ("time.sleep(600)", 4, "; it was waiting for a message of rank 0"),
}


@pytest.mark.parametrize(("does", "code", "says"), DOES.values(), ids=DOES)
def test_an_additional_rank_that_fails_ends_the_run_in_one_line(tmp_path: Path, does: str, code: int, says: str):
    (tmp_path / "script.py").write_text(FAILS.format(does=does))
    flags = ("--gpus", "2", "--as-rank", "1", "--timeout", "20" if "sleep" in does else "100")
    run = dry_run(*flags, "--", "script.py", folder=tmp_path)
    assert run.code == code
    assert says in run.last_line
    assert ("ValueError: no data" in run.errors) == (code == 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["script.py"]


@BY_NIGHT
def test_an_interrupt_also_ends_additional_ranks(tmp_path: Path):
    (tmp_path / "script.py").write_text(FAILS.format(does="open('beside', 'w').write(str(os.getpid())); time.sleep(600)"))
    command = [sys.executable, "-m", "zeroplan", "dryrun", "--gpus", "2", "--as-rank", "1", "--", "script.py"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  a shell's background jobs ignore it
    ) as process:  # fmt: skip
        until = time.monotonic() + 120
        while not (beside := tmp_path / "beside").exists() or not beside.read_text():
            assert time.monotonic() < until
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    with pytest.raises(ProcessLookupError):
        os.kill(int(beside.read_text()), 0)
