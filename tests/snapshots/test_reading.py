"""Snapshots come from strangers: no code in them runs, and a file that is no snapshot is refused in one line."""

from __future__ import annotations

import contextlib
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.snapshots.written import FORWARD, MODULE, Written, step
from zeroplan.errors import SpecError
from zeroplan.snapshots.diagnosis import diagnose
from zeroplan.snapshots.reading import LARGEST_FILE_BYTES, read_snapshot

RUNS_A_COMMAND = b"\x80\x02cos\nsystem\n(S'touch harmed'\ntR."
ASKS_OUTSIDE = b"\x80\x02X\x01\x00\x00\x00aQ."
REMEMBERS_AT_A_FAR_PLACE = b"\x80\x02}r\xff\xff\xff\x7f."
SAYS_IT_IS_LONG = b"\x80\x04\x8e" + (2**42).to_bytes(8, "little") + b"."
NESTED = b"(" * 300_000 + b"l" * 300_000 + b"."


@pytest.mark.parametrize(("content", "said"), [
    (RUNS_A_COMMAND, "it wants to run os.system"),
    (ASKS_OUTSIDE, "refers to something outside itself"),
    (REMEMBERS_AT_A_FAR_PLACE, "needs more memory than its size justifies"),
    (SAYS_IT_IS_LONG, "needs more memory than its size justifies"),
    (NESTED, "not of torch.cuda.memory._dump_snapshot"),
    (b"", "not a complete pickle"), (b"hello", "not a complete pickle"), (pickle.dumps({"a": 1})[:-3], "not a complete pickle"),
    (pickle.dumps([1]), "not of torch.cuda.memory._dump_snapshot"),
    (pickle.dumps({"segments": [], "device_traces": []}), "is empty"),
    (pickle.dumps({"segments": [{"device": 0}], "device_traces": [[]]}), "does not have torch's format"),
    (pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc", "addr": -3}]]}), "a number outside the range of"),
    (pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc", "addr": "3"}]]}), "a str instead of a whole number"),
    (pickle.dumps({"segments": [], "device_traces": [[7]]}), "a int instead of a dict"),
])  # fmt: skip
def test_what_is_no_snapshot_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, said: str):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=said) as refused:
        read_snapshot(path)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "harmed").exists()


def test_absent_files_and_folders_are_refused(tmp_path: Path):
    with pytest.raises(SpecError, match="does not exist"):
        read_snapshot(tmp_path / "nowhere")
    with pytest.raises(SpecError, match="is not a file"):
        read_snapshot(tmp_path)


def test_the_busiest_device_is_read_unless_another_is_named(tmp_path: Path):
    one, other = Written(), Written()
    one.ask(100, MODULE)
    step(other, states=True)
    data = one.data()
    data["device_traces"] = [one.trace, other.trace]
    data["segments"] += [{**segment, "device": 1} for segment in other.data()["segments"]]  # type: ignore[operator, union-attr]
    path = tmp_path / "two.pickle"
    path.write_bytes(pickle.dumps(data))
    assert read_snapshot(path).device == 1
    assert [event.n_bytes for event in read_snapshot(path, device=0).events] == [100]
    with pytest.raises(SpecError, match="has no device 2; it has 0, 1"):
        read_snapshot(path, device=2)


def test_older_snapshots_without_addresses_are_read(tmp_path: Path):
    blocks = [{"size": 512, "state": "inactive"}, {"size": 1024, "state": "active_allocated"}]
    release = {"action": "free_requested", "addr": 1000, "size": 500, "stream": 0}
    data = {"segments": [{"address": 1000, "total_size": 1536, "blocks": blocks}], "device_traces": [[release]]}
    path = tmp_path / "old.pickle"
    path.write_bytes(pickle.dumps(data))
    read = read_snapshot(path)
    assert [(block.address, block.n_bytes) for block in read.standing] == [(1512, 1024)]
    assert diagnose(read).before_bytes == 1524


@given(at=st.integers(0, 2000), byte=st.integers(0, 255))
def test_a_damaged_snapshot_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, at: int, byte: int):
    card = Written()
    card.ask(4_000, MODULE)
    card.ask(300, FORWARD)
    path = card.to(tmp_path_factory.mktemp("damaged") / "snapshot.pickle")
    content = bytearray(path.read_bytes())
    content[at % len(content)] = byte
    path.write_bytes(content)
    with contextlib.suppress(SpecError):
        diagnose(read_snapshot(path))


def test_files_that_are_too_large_or_cannot_be_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    large = tmp_path / "large.pickle"
    with large.open("wb") as file:
        file.truncate(LARGEST_FILE_BYTES + 1)  # a sparse file, which takes no disk
    with pytest.raises(SpecError, match=r"is larger than 2,048 MiB; record fewer events \(max_entries\)"):
        read_snapshot(large)

    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    small = tmp_path / "small.pickle"
    small.write_bytes(b"")
    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(SpecError, match="cannot be read: Permission denied"):
        read_snapshot(small)


def test_a_snapshot_is_read_where_the_system_cannot_limit_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    card = Written()
    step(card, states=True)
    path = card.to(tmp_path / "snapshot.pickle")
    limited = read_snapshot(path)
    monkeypatch.setattr("zeroplan.memory_limit.sys", SimpleNamespace(platform="darwin"))
    monkeypatch.setitem(sys.modules, "resource", None)
    assert read_snapshot(path) == limited


def test_steps_are_the_spans_that_torch_annotates(tmp_path: Path):
    """``external_annotations`` (torch, csrc/profiler and cuda/memory.py) have a start and an end on a device, among other spans."""
    card, step_of = Written(), "Optimizer.step#AdamW.step"
    card.ask(100, MODULE)
    notes = [(0, step_of, "END", 3), (0, "forward", "START", 4), (0, step_of, "START", 5), (1, step_of, "START", 6),
             (0, step_of, "END", 9), (0, step_of, "END", 11), (0, step_of, "START", 20)]  # fmt: skip
    noted = [{"device": device, "name": name, "stage": stage, "time_us": at} for device, name, stage, at in notes]
    path = tmp_path / "noted.pickle"
    path.write_bytes(pickle.dumps(card.data() | {"external_annotations": noted}))
    assert read_snapshot(path).steps == ((5, 9),)
    path.write_bytes(pickle.dumps(card.data() | {"external_annotations": ["Optimizer.step"]}))
    with pytest.raises(SpecError, match="a str instead of a dict"):
        read_snapshot(path)
    card.trace[0]["frames"] = {"filename": "train.py"}
    path.write_bytes(pickle.dumps(card.data()))
    with pytest.raises(SpecError, match="a dict instead of a list"):
        read_snapshot(path)
