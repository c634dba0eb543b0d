"""``zeroplan diagnose`` with torch's out-of-memory message instead of a snapshot."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.command import Run
from tests.snapshots.test_message import NEW, gib


def test_the_command_reads_a_file_and_standard_input(run: Run, tmp_path: Path):
    path = tmp_path / "error.txt"
    path.write_text(f"Traceback\n{NEW}\n")
    code, out, err = run("diagnose", str(path))
    assert (code, err) == (0, "")
    assert "Out of memory: the program requested 22.78 GiB more on a GPU with 31.47 GiB." in out
    assert "No setting of the allocator is enough: 0.70 GiB more are needed" in out
    told = json.loads(run("diagnose", str(path), "--json")[1])
    assert (told["tried_bytes"], told["fragmented"], told["request"]) == (gib(22.78), False, None)


def test_with_a_job_the_answer_names_the_request_its_moment_and_changes(run: Run, tmp_path: Path):
    path = tmp_path / "error.txt"
    path.write_text(
        "CUDA out of memory. Tried to allocate 3.91 GiB. GPU 0 has a total capacity of 79.18 GiB of which 1.02 GiB is free. "
        "Including non-PyTorch memory, this process has 78.15 GiB memory in use. Of the allocated memory 75.33 GiB is allocated by "
        "PyTorch, and 1.50 GiB is reserved by PyTorch but unallocated."
    )
    job_flags = ("--model", "llama-3.1-8b", "--gpus", "8", "--gpu", "h100", "--stage", "2", "--seq-len", "8192")
    code, out, err = run("diagnose", str(path), *job_flags)
    assert (code, err) == (0, "")
    assert "The request: gradient of the fp32 logits (logits and loss), 3.91 GiB" in out
    assert "when: in the backward of the first step, final norm, head and loss" in out
    assert "--recompute selective: recompute selectively" in out
    another = run("diagnose", str(path), *job_flags[:-1], "4096")[1]
    assert "No request of this job needs 3.91 GiB from the driver" in another


def _message(tried: str, allocated: str) -> str:
    return (
        f"CUDA out of memory. Tried to allocate {tried}. GPU 0 has a total capacity of 79.18 GiB of which 1.02 GiB is free. "
        f"Including non-PyTorch memory, this process has 78.15 GiB memory in use. Of the allocated memory {allocated} is allocated "
        "by PyTorch, and 1.50 GiB is reserved by PyTorch but unallocated."
    )


def test_the_setting_that_differs_from_the_run_is_found(run: Run):
    """The message is from a run with a micro-batch of 2; the described job has 1. The message itself is the argument."""
    job = ("--model", "llama-3.2-1b", "--gpus", "8", "--recompute", "full", "--seq-len", "4096")
    ran = json.loads(run("diagnose", _message("3.91 GiB", "11.00 GiB"), *job, "--micro-batch", "2", "--json")[1])
    said = _message("3.91 GiB", f"{ran['request']['live_bytes'] / 2**30:.2f} GiB")
    out = run("diagnose", said, *job)[1]
    assert "With one of these settings the job would fail about as the message says" in out
    assert "\n  --micro-batch 2: " in out


def test_settings_that_exclude_each_other_are_not_proposed(run: Run):
    job = ("--model", "llama-3.2-1b", "--gpus", "8", "--loss", "fused", "--recompute", "full", "--seq-len", "4096")
    code, out, err = run("diagnose", _message("3.91 GiB", "6.00 GiB"), *job)
    assert (code, err) == (0, ""), out


def test_a_message_of_another_gpu_or_of_another_job_is_recognised(run: Run):
    job = ("--model", "llama-3.1-8b", "--gpus", "8", "--stage", "2", "--seq-len", "8192")
    assert "is not NVIDIA A10: check --gpu." in run("diagnose", _message("3.91 GiB", "75.33 GiB"), *job, "--gpu", "a10")[1]
    out = run("diagnose", _message("3.91 GiB", "75.87 GiB"), *job)[1]
    assert "The job that you described would print this message" in out
    longer = run("diagnose", _message("7.83 GiB", "70.00 GiB"), *job[:-1], "16384")[1]
    assert "This job would have run out earlier" in longer


def test_without_a_gpu_the_changes_are_for_the_memory_in_the_message(run: Run):
    job = ("--model", "llama-3.1-8b", "--gpus", "8", "--stage", "2", "--seq-len", "8192")
    out = run("diagnose", _message("3.91 GiB", "75.33 GiB"), *job)[1]
    assert "What would make it fit a GPU with 79.18 GiB\n  --loss fused: " in out
    assert "\n  --recompute selective: " in out


def test_a_text_without_a_message_is_refused_in_one_line(run: Run, tmp_path: Path):
    path = tmp_path / "log.txt"
    path.write_text("all went well")
    code, out, err = run("diagnose", str(path))
    assert (code, out) == (2, "")
    assert "is no snapshot, and has no line 'CUDA out of memory" in err
