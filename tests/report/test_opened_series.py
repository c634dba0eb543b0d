"""The page's pictures of a file show the file's peak, its kinds at every moment, and its collectives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.report.test_step_series import alive
from tests.snapshots.written import FORWARD, LOSS, MODULE, STEP, Written
from zeroplan import estimate, job
from zeroplan.engines.requests import requests_of
from zeroplan.errors import SpecError
from zeroplan.ledger import Kind, bytes_by_kind
from zeroplan.replay import trace_of
from zeroplan.report.series.opened import opened
from zeroplan.saved_runs.perfetto import save_events
from zeroplan.saved_runs.snapshot import save_requests

ASKED = {"model": "gpt2", "gpus": 8, "stage": 3, "seq_len": 128}


def test_a_snapshot_is_drawn_request_by_request(tmp_path: Path):
    card = Written()
    card.ask(4_000, MODULE)
    for _ in range(2):
        kept, logits = card.ask(1_000, FORWARD), card.ask(8_000, LOSS)
        card.release(logits)
        card.release(kept)
        card.ask(1_000, STEP)
    found = opened(card.to(tmp_path / "a.pickle"), "mine.pickle")
    series = found.step
    assert found.headline.startswith("mine.pickle: highest ")
    assert series.totals[series.peak] == max(series.totals) == 14_000
    assert [alive(series, at).total() for at in range(len(series.totals))] == list(series.totals)
    assert {line.reason for line in series.lines} >= {"model.py:21 forward", "train.py:9 main"}
    assert [one.phase for one in series.places] == ["outside a step", *("forward", "optimizer step") * 2]


def test_a_request_that_failed_is_the_headline_and_has_its_advice(tmp_path: Path):
    card = Written()
    card.ask(4_000, MODULE)
    card.fail(2**30, FORWARD, left=2**20)
    found = opened(card.to(tmp_path / "oom.pickle"), "oom.pickle")
    assert found.headline == "oom.pickle: out of memory when 1.00 GiB were requested"
    assert "more were needed" in found.advice[0]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    requests = trace_of(requests_of(job(**ASKED)))  # type: ignore[arg-type]
    save_events(requests, "gpt2", folder / "s.json", force=False)
    save_requests(requests, folder / "s.pickle", force=False)
    return folder


@pytest.mark.parametrize("name", ["s.json", "s.pickle"])
def test_what_an_estimate_exports_has_its_peak(exported: Path, name: str):
    series = opened(exported / name, name).step
    peak = estimate(job(**ASKED)).peak  # type: ignore[arg-type]
    workspaces = int(bytes_by_kind(peak.lines)[Kind.WORKSPACE])  # are there before the step, and no request of it
    assert series.totals[series.peak] == peak.total_bytes - workspaces
    assert [alive(series, at).total() for at in range(len(series.totals))] == list(series.totals)
    assert {"forward", "backward", "optimizer step"} <= {one.phase for one in series.places}


def test_the_collectives_of_a_trace_are_all_there(exported: Path):
    events = json.loads((exported / "s.json").read_text(encoding="utf-8"))["traceEvents"]
    sent = [event["args"]["bytes"] for event in events if event["ph"] == "X" and event["tid"] == 3]
    calls = opened(exported / "s.json", "s.json").step.calls
    assert (sum(one.calls for one in calls), sum(one.n_bytes for one in calls)) == (len(sent), sum(sent)) != (0, 0)


@pytest.mark.parametrize(("content", "why"), [
    (b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "has torch's message about memory"),
    (b"", "does not say what is alive over time"), (b"{}", "does not say what is alive over time"),
    (b'{"traceEvents":[]}', "is a trace, but not one that zeroplan wrote"), (b"\x1f\x8b\x00", "is cut off or damaged"),
    (b"\x80\x04.", "pickle"), (b'{"content":"zeroplan dryrun"}', "run: is missing"),
])  # fmt: skip
def test_a_file_of_another_sort_ends_in_one_line(tmp_path: Path, content: bytes, why: str):
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=why) as refused:
        opened(path, "x")
    assert "\n" not in str(refused.value)
