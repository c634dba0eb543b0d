"""Runs DeepSpeed in a process of its own, since it patches torch for good. Reads a job per line and writes an answer per line.

Each job runs in a fork that has torch and DeepSpeed imported. Its ``ask`` chooses the answer. ``exact``: what the profiler and
the tracker saw on real tensors, and the tracker on fake ones. ``simulated``: the record. ``fails``: the error. ``measured``: the
bytes alive in a step of rank 0.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[3]))

os.environ.update(DS_ACCELERATOR="cpu", HF_HUB_OFFLINE="1")

import torch

from tests.deepspeed_forks import serve
from tests.engines.deepspeed_worker import measure
from tests.verify.watching.unwatched import Peaks, tracked_peaks, unwatched_peaks, watched
from zeroplan.spec.base import read
from zeroplan.spec.job import JobSpec
from zeroplan.verify.training.engine import stored_dtype
from zeroplan.verify.training.workload import Workload, workload
from zeroplan.verify.watching.cycles import manual_garbage_collection

if TYPE_CHECKING:
    from zeroplan.verify.watching.tracker import Tracker

STEPS = 3


def with_weights(job: JobSpec) -> Workload:
    """Return the job's workload with finite weights, so that no step is skipped."""
    work = workload(job, dtype=stored_dtype(job.recipe))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in work.module.parameters():
            parameter.normal_(0, 0.02)
    return work


def exact(job: JobSpec, rank: int) -> dict[str, object]:
    def make() -> Workload:
        return with_weights(job)

    profiled = unwatched_peaks(job, rank=rank, steps=STEPS, make=make)
    real, fake = (watched(job, fake=fake, rank=rank, steps=STEPS, make=make) for fake in (False, True))
    return {
        "profiled": by_name(profiled),
        "real": by_name(tracked_peaks(real)),
        "fake": by_name(tracked_peaks(fake)),
        "real calls": calls(real),
        "fake calls": calls(fake),
    }


def by_name(peaks: Peaks) -> dict[str, int]:
    return {f"{step}: {phase.value}": n_bytes for (step, phase), n_bytes in peaks.items()}


def calls(tracker: Tracker) -> list[str]:
    return [str(call) for call in tracker.calls]


def simulated(job: JobSpec, rank: int) -> dict[str, object]:
    """Return the record that ``zeroplan verify`` writes."""
    from zeroplan.verify.backends.simulate import simulate

    return asdict(simulate(job, rank=rank, steps=STEPS, all_layers=False))


def fails(job: JobSpec, rank: int) -> dict[str, object]:
    """Return the error of one step on real tensors without a tracker; empty if there is none."""
    try:
        unwatched_peaks(job, rank=rank, steps=1, make=lambda: with_weights(job))
    except RuntimeError as error:
        return {"error": repr(error)}
    return {"error": ""}


def measured(job: JobSpec, rank: int) -> dict[str, object]:
    """Return the bytes alive in a training step of rank 0, by the profiler."""
    assert rank == 0
    torch.backends.mkldnn.enabled = False
    return measure(job)


QUESTIONS = {"exact": exact, "simulated": simulated, "fails": fails, "measured": measured}


def answered(line: str) -> str:
    question = json.loads(line)
    job = read(JobSpec, question["job"], where="job")
    return json.dumps(QUESTIONS[question["ask"]](job, question["rank"]))


def main() -> None:
    with manual_garbage_collection():  # the runs collect, many times in each
        serve(answered, where_it_fails="{}")


if __name__ == "__main__":
    main()
