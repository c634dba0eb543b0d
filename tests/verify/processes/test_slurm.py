"""Slurm jobs, as far as they can be tested without Slurm."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.measured_twins import twin
from zeroplan.errors import SpecError
from zeroplan.spec.mesh import MeshSpec
from zeroplan.verify.failures import FailedError, NotHereError, OutOfMemoryError
from zeroplan.verify.processes.slurm import Submitted, _collected, _layout, resumed_job
from zeroplan.verify.record import write_record
from zeroplan.verify.task import Task

TASK = Task(job=replace(twin().job, mesh=MeshSpec(dp_shard=2)), transport="gloo")


def test_ranks_fill_nodes():
    assert [_layout(replace(TASK, job=replace(TASK.job, mesh=MeshSpec(dp_shard=ranks)))) for ranks in (2, 8, 64)] == [
        (1, 2), (1, 8), (8, 8),
    ]  # fmt: skip
    with pytest.raises(SpecError, match="12 ranks do not fill nodes of 8 GPUs"):
        _layout(replace(TASK, job=replace(TASK.job, mesh=MeshSpec(dp_shard=12))))


@pytest.mark.parametrize(("failures", "error", "said"), [
    ([], FailedError, "Slurm job 7 ended node fail with 1 of 2 records"),
    ([(1, "engine", "RuntimeError: mine", 1.0), (0, "engine", "its peer is gone", 2.0)], FailedError,
     "rank 1 of Slurm job 7 failed: RuntimeError: mine"),
    ([(0, "memory", "CUDA out of memory", 1.0)], OutOfMemoryError, "rank 0 ran out of memory: CUDA out of memory"),
    ([(1, "machine", "GPU 1 is busy", 1.0)], NotHereError, "rank 1 of Slurm job 7: GPU 1 is busy"),
])  # fmt: skip
def test_the_first_rank_to_fail_says_why(
    tmp_path: Path, failures: list[tuple[int, str, str, float]], error: type[Exception], said: str
):
    write_record(twin(), tmp_path)
    (tmp_path / "slurm" / "failed").mkdir(parents=True)
    for rank, whose, text, at in failures:
        why = {"rank": rank, "cause": whose, "text": text, "at": at}
        (tmp_path / "slurm" / "failed" / f"rank{rank}.json").write_text(json.dumps(why))
    with pytest.raises(error, match=said):
        _collected(Submitted(job_id="7", task=TASK), tmp_path, "NODE_FAIL")


@pytest.mark.parametrize("content", [None, "{", '{"job_id": 7}'])
def test_a_folder_without_a_job_is_refused_in_one_line(tmp_path: Path, content: str | None):
    if content is not None:
        (tmp_path / "slurm").mkdir()
        (tmp_path / "slurm" / "job.json").write_text(content)
    with pytest.raises(SpecError) as refused:
        resumed_job(tmp_path)
    assert "\n" not in str(refused.value)


def test_a_submitted_job_is_read_back_from_its_folder(tmp_path: Path):
    submitted = Submitted(job_id="7", task=TASK)
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "job.json").write_text(json.dumps(asdict(submitted)))
    assert resumed_job(tmp_path) == submitted
