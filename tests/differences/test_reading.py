"""``zeroplan diff`` recognises each type of file by its content, and refuses all others in one line and in bounded memory."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.docs.pages import SETUPS
from tests.docs.pictures import SAVED_RUN
from tests.measured_twins import twin
from tests.snapshots.test_reading import ASKS_OUTSIDE, REMEMBERS_AT_A_FAR_PLACE, RUNS_A_COMMAND, SAYS_IT_IS_LONG
from tests.snapshots.written import Written, step
from zeroplan import diff, estimate, job
from zeroplan.differences.reading import opened
from zeroplan.errors import SpecError
from zeroplan.replay import trace_of
from zeroplan.report.payload import estimate_payload
from zeroplan.saved_runs.files import LARGEST_BYTES, read_saved
from zeroplan.saved_runs.perfetto import save_events
from zeroplan.saved_runs.snapshot import save_requests
from zeroplan.units import MIB
from zeroplan.verify.record import write_record

JOB = job(model="gpt2", gpus=4, stage=3, seq_len=256)


def answer(**said: object) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(estimate_payload(estimate(JOB))))
    return {**made, **said}


def written(path: Path, data: object) -> Path:
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def trace(path: Path) -> Path:
    replay = estimate(JOB, replay=True).replay
    assert replay is not None
    save_events(trace_of(replay.log), "gpt2", path, force=True)
    return path


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(trace(tmp_path_factory.mktemp("trace") / "t.json").read_text())
    return made


def test_every_type_of_file_is_recognised_by_its_content(tmp_path: Path):
    (tmp_path / "job.toml").write_text('model = "gpt2"\ngpus = 4\n')
    (tmp_path / "accelerate.yaml").write_text(SETUPS["accelerate.yaml"])
    (tmp_path / "titan.toml").write_text(SETUPS["llama3_8b.toml"])
    card = Written()
    step(card, states=True)
    sorts = {
        tmp_path / "job.toml": "job", written(tmp_path / "job.json", asdict(JOB)): "job",
        tmp_path / "accelerate.yaml": "configuration file", tmp_path / "titan.toml": "configuration file",
        written(tmp_path / "answer.txt", answer()): "answer",
        write_record(twin(), tmp_path): "record", card.to(tmp_path / "snapshot.bin"): "snapshot",
        trace(tmp_path / "trace.json"): "trace", trace(tmp_path / "trace.gz"): "trace",
        Path(shutil.copy(SAVED_RUN, tmp_path / "any")): "dry run",
        written(tmp_path / "printed.json", json.loads(json.dumps(asdict(read_saved(SAVED_RUN).run)))): "dry run",
    }  # fmt: skip
    assert {path.name: opened(path).what for path in sorts} == {path.name: what for path, what in sorts.items()}


def test_a_saved_run_equals_its_printed_json(tmp_path: Path):
    printed = written(tmp_path / "printed.json", json.loads(json.dumps(asdict(read_saved(SAVED_RUN).run))))
    assert diff(SAVED_RUN, printed).equal


def test_a_trace_and_a_snapshot_of_one_step_have_one_peak(tmp_path: Path):
    replay = estimate(JOB, replay=True).replay
    assert replay is not None
    save_requests(trace_of(replay.log), tmp_path / "s.pickle", force=True)
    found = diff(trace(tmp_path / "t.json"), tmp_path / "s.pickle")
    assert (found.changes, found.peak.change_bytes) == ((), 0)
    workspaces = diff(JOB, tmp_path / "t.json")
    assert [(row.kind, row.happened) for row in workspaces.changes] == [("library workspaces", "went")]
    assert opened(tmp_path / "s.pickle").side.peak.lines[0].what  # type: ignore[union-attr]


def test_a_current_answer_equals_the_estimate_of_its_job(tmp_path: Path):
    found = diff(written(tmp_path / "a.json", answer()), JOB)
    assert found.equal
    assert found.before.held


def test_a_job_file_is_estimated(tmp_path: Path):
    (tmp_path / "job.toml").write_text('model = "gpt2"\ngpus = 4\nstage = 3\nseq-len = 256\n')
    found = diff(str(tmp_path / "job.toml"), JOB)
    assert found.equal
    assert found.before.name == "job.toml"


def test_an_answer_whose_job_is_refused_now_is_read_as_printed(tmp_path: Path):
    old = answer()
    old["job"]["recipe"] |= {"optimizer": "adafactor", "optimizer_impl": "fused"}
    found = diff(written(tmp_path / "a.json", old), JOB)
    assert (found.changes, [one.name for one in found.settings]) == ((), ["optimizer", "optimizer_impl"])
    assert "a.json is taken as printed: this zeroplan does not estimate its job (" in found.notes[0]


def test_an_answer_of_another_zeroplan_is_read_as_printed(tmp_path: Path):
    old = answer()
    old["peak"]["lines"][0]["bytes"] += 1000
    old["peak"]["allocated_bytes"] += 1000
    found = diff(written(tmp_path / "a.json", old), JOB)
    assert [row.change_bytes for row in found.changes] == [-1000]
    assert "a.json is taken as printed, with a peak of" in found.notes[0]


def with_pickle(content: bytes) -> tuple[str, bytes]:
    return "file.pickle", content


FAULTS = [
    (*with_pickle(RUNS_A_COMMAND), "it wants to run os.system"), (*with_pickle(ASKS_OUTSIDE), "something outside itself"),
    (*with_pickle(REMEMBERS_AT_A_FAR_PLACE), "more memory than its size justifies"),
    (*with_pickle(SAYS_IT_IS_LONG), "more memory than its size justifies"),
    (*with_pickle(b""), "not a complete pickle"), ("file", pickle.dumps({"a": 1})[:-3], "not a complete pickle"),
    ("file", RUNS_A_COMMAND, "it wants to run os.system"), ("file", b"cos\nsystem\n(S'touch harmed'\ntR.", "file"),
    ("a.json", b"[" * 200_000, "nested too deep"), ("a.json", b'{"a":' * 200_000, "nested too deep"),
    ("a.toml", b"a = " + b"[" * 200_000, "nested too deep"), ("a.yaml", b"a: " + b"[" * 5_000, "nested too deep"),
    ("a.json", b'{"schema_version": 1, "job": {', "not JSON"), ("a.json", b"", "not JSON"), ("a.toml", b"\xff\xfe", "not UTF-8"),
    ("a.json", b"[1, 2]", "file"), ("a.json", b'{"model_type": "llama"}', "give it to --config"),
    ("a.jsonl", b"{}\n{}\n", "many cases"),
    ("a.gz", gzip.compress(b'{"content": "zeroplan dryrun"}', mtime=0)[:-9], "cut off or damaged"),
    ("a.gz", b"\x1f\x8b", "cut off or damaged"),
    ("a.gz", gzip.compress(b" " * (LARGEST_BYTES + 1), mtime=0), "contains more than 64 MiB"),
    ("a.gz", gzip.compress(b"hello", mtime=0), "not JSON"),
    ("a.gz", gzip.compress(b"\xff\xfe", mtime=0), "not UTF-8"),
    ("a.json", b'{"traceEvents": [' + b"[]," * 10, "not JSON"), ("a.json", b'{"traceEvents": [7]}', "not one that zeroplan wrote"),
    ("a.json", b'{"traceEvents": []}', "not one that zeroplan wrote"),
    ("a.json", b'{"traceEvents": {}}', "not one that zeroplan wrote"),
    ("a.json", b'{"traceEvents": [{"ph": "X", "name": "cudaMalloc", "ts": 1}]}', "not one that zeroplan wrote"),
    ("a.json", b'{"content": "zeroplan dryrun", "schema_version": 99}', "update zeroplan"),
    ("a.json", b'{"schema_version": 1, "steps": 3}', "record"), ("a.json", b'{"schema_version": 1, "job": 3, "peak": 4}', "file"),
    ("a.py", b"import os\n", "program, which is not run"), ("a.json", b'{"a": 1, "a": 2}', "twice"),
    ("a.json", b'{"schema_version": 1' + b"0" * 5000 + b', "steps": []}', "a.json"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "said"), FAULTS)
def test_a_fault_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, said: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SpecError, match=said) as refused:
        opened(tmp_path / name)
    assert "\n" not in str(refused.value)
    assert os.listdir(tmp_path) == [name]  # noqa: PTH208  nothing was run


def test_folders_pipes_and_missing_files_are_one_line(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    no_files = {tmp_path: "is not a file", tmp_path / "pipe": "is not a file", tmp_path / "none.json": "does not exist"}
    for path, said in (no_files | {Path("a\0b"): "does not exist", Path("a" * 5000): "cannot be read"}).items():
        with pytest.raises(SpecError, match=said):
            opened(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_one_line(tmp_path: Path):
    path = written(tmp_path / "job.json", asdict(JOB))
    path.chmod(0)
    with pytest.raises(SpecError, match="cannot be read: Permission denied"):
        opened(path)


@pytest.mark.parametrize(
    ("name", "head"), [("a.json", b"{"), ("a.toml", b"#"), ("a.json", b'{"traceEvents"'), ("a.pickle", b"\x80")]
)
def test_files_of_gigabytes_are_refused_before_they_are_read(tmp_path: Path, name: str, head: bytes):
    path = tmp_path / name
    path.write_bytes(head)
    os.truncate(path, 5 * 2**30)
    with pytest.raises(SpecError, match=r"MiB"):
        opened(path)


def test_a_file_that_takes_more_memory_than_its_size_allows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    allowed: list[int] = []

    @contextmanager
    def ceiling(n_bytes: int) -> Iterator[None]:
        allowed.append(n_bytes)
        yield
        raise MemoryError

    monkeypatch.setattr("zeroplan.differences.reading.no_more_memory_than", ceiling)
    for name, content in (("a.json", b'{"a": []}'), ("b.json", b'{"traceEvents": []}')):
        (tmp_path / name).write_bytes(content)
        monkeypatch.setattr("zeroplan.differences.reading._of_data", lambda *_: None)
        with pytest.raises(SpecError, match="asks for more memory"):
            opened(tmp_path / name)
    assert allowed == [512 * MIB + 48 * 9, 512 * MIB + 48 * 19]


def test_an_answer_that_contradicts_itself_is_refused(tmp_path: Path):
    wrong = answer()
    wrong["peak"]["lines"][0]["bytes"] += 1
    with pytest.raises(SpecError, match="the lines of its peak do not add up to the peak"):
        opened(written(tmp_path / "a.json", wrong))
    for key, value in (
        ("peak", {}),
        ("moments", 3),
        ("communication", None),
        ("verdict", 7),
        ("host_bytes", -1),
        ("nvme_bytes", True),
    ):
        with pytest.raises(SpecError, match="is not as `zeroplan estimate --json` prints it"):
            opened(written(tmp_path / "a.json", answer(**{key: value})))


def test_a_trace_that_contradicts_itself_is_refused(tmp_path: Path, events: dict[str, Any]):
    wrong = deepcopy(events)
    for event in wrong["traceEvents"]:
        if event["name"] == "allocated":
            event["args"]["bytes"] += 1
    with pytest.raises(SpecError, match="its kinds do not add up"):
        opened(written(tmp_path / "t.json", wrong))
    for event in wrong["traceEvents"]:
        event["ts"] = 5
    with pytest.raises(SpecError, match="not in order"):
        opened(written(tmp_path / "t.json", wrong))


@pytest.mark.parametrize(("name", "key", "value"), [
    ("allocated", "args", []), ("allocated", "ts", -1), ("allocated", "ts", "x"), ("all_gather", "ts", -0.5),
    ("all_gather", "ts", None), ("all_gather", "args", {"ranks": 4, "bytes": True}), ("backward, step 2", "dur", 0.5),
])  # fmt: skip
def test_an_invalid_figure_in_a_trace_is_refused(tmp_path: Path, events: dict[str, Any], name: str, key: str, value: object):
    wrong = deepcopy(events)
    for event in wrong["traceEvents"]:
        if event["name"] == name:
            event[key] = value
    with pytest.raises(SpecError, match="not one that zeroplan wrote"):
        opened(written(tmp_path / "t.json", wrong))


def test_collectives_of_a_single_rank_send_nothing(tmp_path: Path, events: dict[str, Any]):
    alone = deepcopy(events)
    for event in alone["traceEvents"]:
        if "ranks" in event["args"]:
            event["args"]["ranks"] = 1
    found = diff(written(tmp_path / "one.json", events), written(tmp_path / "other.json", alone))
    assert {(row.kind, row.happened) for row in found.sent} == {("all_gather", "went"), ("reduce_scatter", "went")}


ODD: tuple[Any, ...] = (None, True, -1, 0.5, "x", [], {}, 10**30, [[[]]], {"a": 1})


def bent(draw: Random, data: Any) -> Any:
    """Return the data with one random value replaced by an unexpected one."""
    holder, depth = data, draw.randint(1, 5)
    while True:
        key = draw.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        depth -= 1
        if not depth or not isinstance(holder[key], (dict, list)) or not holder[key]:
            break
        holder = holder[key]
    holder[key] = draw.choice(ODD)
    return data


def test_damaged_answers_and_traces_are_read_or_refused(tmp_path: Path, events: dict[str, Any]):
    draw, refused = Random(7), []  # noqa: S311  a draw of tests
    few = [event for event in events["traceEvents"] if event["ph"] == "C" or event.get("tid") == 1]
    originals = [{"traceEvents": few}, *[answer()] * 3]
    for at in range(32):
        path = written(tmp_path / f"{at}.json", bent(draw, deepcopy(originals[at % 4])))
        try:
            opened(path)
        except SpecError as error:
            refused.append(str(error))
    assert len(refused) > 10
    assert not [said for said in refused if "\n" in said]
