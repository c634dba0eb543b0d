"""Exports of a saved run: the changes since another run, a snapshot for memory_viz, and a trace for Perfetto."""

from __future__ import annotations

import json
import pickletools
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from tests.dryrun.running import SCRIPTS, Run, dry_run
from zeroplan.saved_runs.files import read_saved
from zeroplan.saved_runs.snapshot import snapshot
from zeroplan.script_trace import Trace
from zeroplan.snapshots.diagnosis import diagnose
from zeroplan.snapshots.reading import read_snapshot

pytestmark = pytest.mark.torch
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with runs of two versions of a script: the second has a line more, another layer, and twice the length."""
    folder = tmp_path_factory.mktemp("exports")
    text = (SCRIPTS / "fsdp2.py").read_text()
    (folder / "train.py").write_text(text)
    flags = ("--gpus", "8", "-q", "--json")
    before = dry_run("--save", "before.gz", "--", "train.py", "2", "128", "128", folder=folder, flags=flags)
    assert before.code == 0, before.errors
    (folder / "train.py").write_text(text.replace("import torch\n", "import torch\n\n# one more\n", 1))
    exports = ("--save", "after.gz", "--snapshot", "after.pickle", "--trace", "after.json", "--against", "before.gz")
    after = dry_run(*exports, "--", "train.py", "3", "128", "256", folder=folder, flags=flags)
    assert after.code == 0, after.errors
    (folder / "changes.json").write_text(after.output)
    return folder


@pytest.fixture(scope="module")
def trace(folder: Path) -> Trace:
    found = read_saved(folder / "after.gz").trace
    assert found is not None
    return found


def _show(folder: Path, *flags: str) -> Run:
    return dry_run("--show", "after.gz", *flags, folder=folder, flags=())


def test_verbose_lists_what_would_free_memory(folder: Path):
    run = read_saved(folder / "after.gz").run
    assert {name for one in run.savings for name in one.of} >= {"model.layers.*"}
    assert all(0 < one.at_most_bytes < run.steps[-1].peak.peak_bytes for one in run.savings)
    assert "(activation checkpointing): model.layers.*" in " ".join(_show(folder, "-v").output.split())
    assert "checkpointing" not in _show(folder).output


def test_changes_add_up_to_the_differences_of_two_answers(folder: Path):
    first, second = (read_saved(folder / f"{name}.gz").run for name in ("before", "after"))
    found = json.loads((folder / "changes.json").read_text())
    rows = {(row["group"], row["name"]): row for row in found["changes"]}
    peak = rows["In all", "peak allocated"]
    assert (peak["before_bytes"], peak["after_bytes"]) == (first.steps[-1].peak.peak_bytes, second.steps[-1].peak.peak_bytes)
    assert peak["change_bytes"] > 0
    for group, parts in (("By module at the peak", "modules"), ("By line of code at the peak", "lines")):
        total = sum(row["change_bytes"] for row in found["changes"] if row["group"] == group)
        assert total == sum(one.n_bytes for one in getattr(second, parts)) - sum(one.n_bytes for one in getattr(first, parts))
    kinds = {name: row["change_bytes"] for (group, name), row in rows.items() if group == "By kind at the peak"}
    before, after = Counter(first.steps[-1].peak.kinds), Counter(second.steps[-1].peak.kinds)
    assert kinds == {kind: after[kind] - before[kind] for kind in before | after if after[kind] != before[kind]}


def test_a_line_with_a_new_number_is_the_same_line(folder: Path):
    number = 1 + next(at for at, line in enumerate((folder / "train.py").read_text().splitlines()) if " = model(" in line)
    found = json.loads((folder / "changes.json").read_text())["changes"]
    row = next(row for row in found if row["name"] == f"train.py:{number}")
    assert row["before_bytes"] > 0
    assert row["after_bytes"] > row["before_bytes"]


def test_the_table_of_changes_fits_a_screen_and_a_run_has_not_changed_from_itself(folder: Path):
    lines = _show(folder, "--against", "before.gz").output.splitlines()
    assert len(lines) <= 26
    assert max(map(len, lines)) <= 80
    assert lines[0] == "Against before.gz."
    same = _show(folder, "--against", "after.gz").output.splitlines()
    assert same[-1] == "Nothing else changed."
    assert len(same) == 7


def test_diagnose_finds_the_runs_memory_in_the_snapshot_to_the_byte(folder: Path, trace: Trace):
    found = diagnose(read_snapshot(folder / "after.pickle"))
    moment = trace.live.index(max(trace.live))
    blocks = trace.blocks
    kinds: Counter[str] = Counter()
    for size, born, died, kind in zip(blocks.n_bytes, blocks.born, blocks.died, blocks.kind, strict=True):
        kinds[trace.kinds[kind]] += size if born <= moment < died else 0
    assert found.live_bytes == max(trace.live)
    assert {one.kind: one.n_bytes for one in found.held} == +kinds
    span = max(at for at, span in enumerate(trace.spans) if span.start < moment)
    assert found.part == trace.spans[span].phase
    places = {site.where.partition(" ")[0] for held in found.held for site in held.sites}
    assert places <= set(trace.lines)
    assert found.replayed is not None
    assert found.replayed.alike == found.replayed.requests
    assert found.replayed.reserved_bytes == found.reserved_bytes


def test_torch_reads_the_snapshot_with_its_own_tools(trace: Trace):
    viz = pytest.importorskip("torch.cuda._memory_viz")
    data = snapshot(trace)
    assert "cudaMalloc" in viz.trace(data)
    assert viz.segsum(data)
    assert viz.trace_plot(data)
    actions = Counter(entry["action"] for entry in data["device_traces"][0])
    assert actions["alloc"] == len(trace.blocks.n_bytes)
    assert actions["free_requested"] == actions["free_completed"] == sum(died <= trace.moments for died in trace.blocks.died)
    taken = sum(entry["size"] for entry in data["device_traces"][0] if entry["action"] == "segment_alloc")
    assert taken == sum(segment["total_size"] for segment in data["segments"])
    for segment in data["segments"]:
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]


def test_the_page_of_memory_viz_can_read_the_snapshot(folder: Path, trace: Trace):
    """The page's unpickler knows only these opcodes (torch/utils/viz/MemoryViz.js, torch 2.11) and integers of 53 bits."""
    known = {
        "PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT", "EMPTY_DICT", "SETITEM",
        "SETITEMS", "DICT", "EMPTY_LIST", "APPEND", "APPENDS", "LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "NONE",
        "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE",
    }  # fmt: skip
    content = (folder / "after.pickle").read_bytes()
    assert {opcode.name for opcode, _, _ in pickletools.genops(content)} <= known
    data = snapshot(trace)
    assert max(entry["addr"] + entry["size"] for entry in data["device_traces"][0]) < 2**53
    segments = {segment["address"] for segment in data["segments"]}
    assert all(entry["addr"] in segments for entry in data["device_traces"][0] if entry["action"] == "segment_alloc")


def test_blocks_of_the_snapshot_never_overlap(trace: Trace):
    alive: dict[int, int] = {}
    for entry in snapshot(trace)["device_traces"][0]:
        if entry["action"] == "alloc":
            alive[entry["addr"]] = entry["addr"] + entry["size"]
        elif entry["action"] == "free_completed":
            del alive[entry["addr"]]
    ends = sorted(alive.items())
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))


def test_the_trace_counts_every_kind_and_has_phases_and_collectives(folder: Path, trace: Trace):
    events = json.loads((folder / "after.json").read_text())["traceEvents"]
    counters = [event for event in events if event["ph"] == "C"]
    assert max(event["args"]["bytes"] for event in counters if event["name"] == "allocated") == max(trace.live)
    now: dict[str, int] = {}
    at: dict[int, int] = {}
    for event in sorted(counters, key=lambda event: event["ts"]):
        if event["name"] != "allocated":
            now[event["name"]] = event["args"]["bytes"]
            at[event["ts"]] = sum(now.values())
    assert all(n_bytes == trace.live[moment] for moment, n_bytes in at.items())
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    names: dict[str, list[str]] = {}
    for event in events:
        if event["ph"] == "X":
            names.setdefault(tracks[event["tid"]], []).append(event["name"])
            assert 0 <= event["ts"] <= event["ts"] + event["dur"] <= trace.moments + 1
    assert len(names["collectives"]) == len(trace.collectives)
    assert "backward, step 2" in names["phases"]
    assert "request or release" in next(event["args"]["name"] for event in events if event["name"] == "process_name")


EMPTIES = """
import torch
network = torch.nn.Linear(1024, 1024, device="cuda")
optimizer = torch.optim.SGD(network.parameters())
large = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
del large
torch.cuda.empty_cache()
torch.cuda.empty_cache()
for _ in range(3):
    network(torch.ones(4, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    large = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
    del large
    torch.cuda.empty_cache()
"""


def test_segments_that_empty_cache_frees_are_not_in_the_snapshot(tmp_path: Path):
    (tmp_path / "empties.py").write_text(EMPTIES)
    done = dry_run("--snapshot", "run.pickle", "--save", "run.gz", "--", "empties.py", folder=tmp_path)
    assert done.code == 0, done.errors
    trace = read_saved(tmp_path / "run.gz").trace
    assert trace is not None
    assert len(trace.emptied) == 4
    data = snapshot(trace)
    given_back = [entry["size"] for entry in data["device_traces"][0] if entry["action"] == "segment_free"]
    assert [size for size in given_back if size >= 32 << 20] == [64 << 20, 32 << 20, 32 << 20]
    taken = sum(entry["size"] for entry in data["device_traces"][0] if entry["action"] == "segment_alloc")
    standing = sum(segment["total_size"] for segment in data["segments"])
    assert standing == taken - sum(given_back)
    found = diagnose(read_snapshot(tmp_path / "run.pickle"))
    assert found.replayed is not None
    assert found.replayed.alike == found.replayed.requests
    assert found.replayed.reserved_bytes == found.reserved_bytes == standing
