"""Records are read back as written, and written whole or not at all. A file that is no record is refused in one line."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.measured_twins import twin
from zeroplan.errors import ZeroplanError
from zeroplan.records import read_record
from zeroplan.verify.record import record_name, write_record


def test_a_record_is_read_back_as_it_was_written(tmp_path: Path):
    measured = twin()
    path = write_record(measured, tmp_path / "made" / "here")
    assert read_record(path) == measured
    assert path.name == "gpt2-ddp-stage1-n4-rank0-cpu.json"
    assert [one.name for one in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("job", [
    {"model": "mixtral-8x7b", "gpus": 8, "stage": 3},
    {"model": "deepseek-v3", "gpus": 64, "stage": 3, "engine": "deepspeed"},
    {"params": "7e9", "gpus": 8, "stage": 2, "gpu": "h100"},
])  # fmt: skip
def test_every_job_is_read_back(tmp_path: Path, job: dict[str, object]):
    measured = twin(**job)
    assert read_record(write_record(measured, tmp_path)) == measured


def test_an_earlier_record_is_never_overwritten(tmp_path: Path):
    first, second = twin(), twin(factor=2)
    names = [write_record(measured, tmp_path).name for measured in (first, second, first)]
    assert names == [f"gpt2-ddp-stage1-n4-rank0-cpu{number}.json" for number in ("", "-2", "-3")]
    assert [read_record(tmp_path / name) for name in names] == [first, second, first]


def test_a_file_system_without_hard_links_gets_numbered_records_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    names = [write_record(twin(), tmp_path).name for _ in range(3)]
    assert names == [f"gpt2-ddp-stage1-n4-rank0-cpu{number}.json" for number in ("", "-2", "-3")]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ZeroplanError, match="No space left"):
        write_record(twin(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ZeroplanError, match="cannot be written"):
        write_record(twin(), tmp_path / "file" / "below")


def test_a_name_from_a_hub_stays_in_the_folder(tmp_path: Path):
    measured = twin()
    named = replace(measured, job=replace(measured.job, model=replace(measured.job.model, name="../../Org/Some Model ü")))
    assert record_name(named) == "org-some-model-ddp-stage1-n4-rank0-cpu.json"
    assert write_record(named, tmp_path).parent == tmp_path


def texts() -> dict[str, bytes]:
    from dataclasses import asdict

    good = asdict(twin())
    text = json.dumps(good)
    no_step = json.dumps({**good, "steps": []})
    wrong = json.dumps({**good, "rank": "0"})
    return {
        "empty": b"",
        "cut short": text[: len(text) // 2].encode(),
        "not UTF-8": b"\xff\xfe{}",
        "not JSON": b"steps: 3",
        "a list": b"[1, 2]",
        "another JSON": b'{"schema_version": 1, "job": {}}',
        "a number": b"1" * 5000,
        "deep": b"[" * 100_000,
        "a newer version": json.dumps({**good, "schema_version": 2}).encode(),
        "a version that is none": json.dumps({**good, "schema_version": "1"}).encode(),
        "version zero": json.dumps({**good, "schema_version": 0}).encode(),
        "no step": no_step.encode(),
        "a text for a number": wrong.encode(),
        "a key twice": text.replace("{", '{"backend": "cpu", ', 1).encode(),
        "an unknown key": json.dumps({**good, "extra": 1}).encode(),
        "a missing key": json.dumps({key: value for key, value in good.items() if key != "environment"}).encode(),
        "negative bytes": json.dumps({**good, "steps": [{"phases": [], "held_bytes": -1, "held_kinds": {}}]}).encode(),
        "a step without phases": json.dumps({**good, "steps": [{"phases": [], "held_bytes": 1, "held_kinds": {}}]}).encode(),
        "a job that contradicts itself": text.replace('"zero_stage": 1', '"zero_stage": 3').encode(),
    }


@pytest.mark.parametrize("what", texts())
def test_a_file_that_is_no_record_is_refused_in_one_line(tmp_path: Path, what: str):
    path = tmp_path / "record.json"
    path.write_bytes(texts()[what])
    with pytest.raises(ZeroplanError) as refused:
        read_record(path)
    message = str(refused.value)
    assert "\n" not in message
    assert "record.json" in message
    assert len(message) < 600


def test_folders_absent_files_and_huge_files_are_refused(tmp_path: Path):
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.truncate(10**9)
    for path in (tmp_path, tmp_path / "absent.json", huge, tmp_path / "nul\0"):
        with pytest.raises(ZeroplanError):
            read_record(path)
