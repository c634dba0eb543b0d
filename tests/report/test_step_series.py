"""The page draws the step of the estimate: its peak, its lines, its collectives."""

from __future__ import annotations

from collections import Counter

import pytest

from zeroplan import estimate, job
from zeroplan.report.series.run import run_of_step
from zeroplan.report.series.step import StepSeries, step
from zeroplan.report.series.timeline import timeline

JOBS = {
    "fsdp2": {"stage": 3},
    "fsdp2, accumulating": {"stage": 2, "grad_accum": 3, "recompute": "full"},
    "ddp": {"stage": 0},
    "zero-1": {"stage": 1},
    "deepspeed 2": {"stage": 2, "engine": "deepspeed", "grad_accum": 2},
    "deepspeed 3": {"stage": 3, "engine": "deepspeed"},
    "pipeline": {"stage": 3, "pipeline_parallel": 2, "grad_accum": 6},
    "many micro-batches": {"stage": 3, "grad_accum": 48},
    "megatron": {"stage": 1, "engine": "megatron"},
}


def drawn(**asked: object) -> StepSeries:
    answer = estimate(job(model="llama-3.2-1b", gpus=8, gpu="h100", seq_len=2048, **asked))  # type: ignore[arg-type]
    return step(answer, timeline(answer.job, own=answer))


def alive(series: StepSeries, column: int) -> Counter[str]:
    """Return the bytes by kind in a column."""
    found: Counter[str] = Counter()
    for line in series.lines:
        changes = [n_bytes for at, n_bytes in zip(line.columns, line.n_bytes, strict=True) if at <= column]
        found[line.kind] += changes[-1] if changes else 0
    return found


@pytest.mark.parametrize("asked", JOBS.values(), ids=JOBS)
def test_its_peak_is_the_estimates_and_its_lines_add_up_everywhere(asked: dict[str, object]):
    series = drawn(**asked)
    peak = estimate(job(model="llama-3.2-1b", gpus=8, gpu="h100", seq_len=2048, **asked)).peak_bytes  # type: ignore[arg-type]
    assert series.totals[series.peak] == max(series.totals) == pytest.approx(peak, rel=1e-4)
    for column, total in enumerate(series.totals):
        assert alive(series, column).total() == total
    assert [place.column for place in series.places] == sorted({place.column for place in series.places})


@pytest.mark.parametrize(
    "asked",
    [JOBS["fsdp2"], JOBS["ddp"], JOBS["deepspeed 2"], JOBS["deepspeed 3"]],
    ids=["fsdp2", "ddp", "deepspeed 2", "deepspeed 3"],
)
def test_every_collective_of_the_last_step_is_there(asked: dict[str, object]):
    answer = estimate(job(model="llama-3.2-1b", gpus=8, gpu="h100", seq_len=2048, **asked))  # type: ignore[arg-type]
    sent: Counter[str] = Counter()
    for call in answer.traffic.collectives:
        sent[call.operation] += int(call.payload_bytes) if call.sent_bytes else 0
    shown: Counter[str] = Counter()
    for one in drawn(**asked).calls:
        shown[one.operation] += one.n_bytes
    assert +shown == +sent


def test_what_is_left_out_is_said():
    assert any("4 of 48 micro-batches drawn" in line for line in drawn(**JOBS["many micro-batches"]).caption.lines)
    assert not any("micro-batches drawn" in line for line in drawn(**JOBS["pipeline"]).caption.lines)


def test_an_engine_without_requests_is_drawn_by_its_moments():
    series = drawn(**JOBS["megatron"])
    assert (series.requests, series.calls) == (False, ())
    assert len(series.totals) == len(series.places)


def test_a_pipeline_of_very_many_micro_batches_is_drawn_by_its_moments_at_once():
    assert not drawn(stage=3, pipeline_parallel=2, grad_accum=1_000_000).requests


def test_head_and_loss_can_be_seen_beside_many_blocks():
    answer = estimate(job(model="llama-3.1-70b", gpus=64, stage=3, gpu="h100", seq_len=2048))
    series = step(answer, timeline(answer.job, own=answer))
    ends = [place.column for place in series.places] + [len(series.totals)]
    wide = {place.name: after - place.column for place, after in zip(series.places, ends[1:], strict=True)}
    assert wide["final norm, head and loss"] >= 8
    assert len(series.totals) < 1500


def test_its_picture_has_the_same_bands_and_phases():
    series = drawn(**JOBS["fsdp2"])
    picture = run_of_step(series)
    assert tuple(picture.n_bytes.sum(axis=0).tolist()) == series.totals
    assert [one.name for one in picture.stretches] == ["forward", "backward", "optimizer step"]
    assert picture.stretches[-1].last == len(series.totals)
    assert set(picture.calls) == {"all_gather", "reduce_scatter"}
