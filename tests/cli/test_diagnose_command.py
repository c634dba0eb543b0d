"""``zeroplan diagnose`` with a snapshot, with the job that made it, and with wrong files."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING

import pytest

from tests.snapshots.written import FORWARD, MODULE, Written, step

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.command import Run


@pytest.fixture
def snapshot(tmp_path: Path) -> str:
    card = Written()
    card.ask(4_000, MODULE)
    step(card, states=True)
    card.fail(10**9, FORWARD, left=10**6)
    return str(card.to(tmp_path / "snapshot.pickle"))


def test_the_answer_names_the_moment_the_kinds_and_the_lines(run: Run, snapshot: str):
    code, out, err = run("diagnose", snapshot)
    assert (code, err) == (0, "")
    assert "Out of memory: 0.93 GiB = 1.00 GB were requested by model.py:21 forward, in the forward" in out
    assert "optimizer state" in out
    assert "adamw.py" not in out  # torch's own line is not the user's
    assert "Predicted" not in out


def test_a_job_is_compared_with_the_snapshot(run: Run, snapshot: str):
    code, out, _ = run("diagnose", snapshot, "--model", "gpt2", "--seq-len", "128")
    assert code == 0
    assert "Predicted: gpt2 on 1 GPU" in out
    assert "peak allocated" in out


def test_as_json(run: Run, snapshot: str):
    code, out, _ = run("diagnose", snapshot, "--model", "gpt2", "--seq-len", "128", "--device", "0", "--json")
    data = json.loads(out)
    assert code == 0
    assert (data["schema_version"], data["failure"]["asked_bytes"]) == (1, 10**9)
    assert data["predicted"][0]["what"] == "peak allocated"


@pytest.mark.parametrize(("arguments", "said"), [
    (("nowhere.pickle",), "does not exist"), (("snapshot.pickle", "--device", "3"), "has no device 3"),
    (("snapshot.pickle", "--device", "x"), "--device"), (("snapshot.pickle", "--model", "nobody"), "unknown model"),
    (("job.toml",), "is no snapshot, and has no line"),
])  # fmt: skip
def test_wrong_input_is_one_line_and_exit_code_2(
    run: Run, snapshot: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
):
    (tmp_path / "job.toml").write_text('model = "gpt2"\n')
    monkeypatch.chdir(tmp_path)
    code, out, err = run("diagnose", *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1
    assert snapshot.endswith("snapshot.pickle")


def test_a_message_may_be_piped_in(run: Run, monkeypatch: pytest.MonkeyPatch):
    said = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of 79.10 GiB"
    monkeypatch.setattr("sys.stdin", io.StringIO(said))
    assert run("diagnose")[:2] == run("diagnose", said)[:2]
    person = io.StringIO()
    monkeypatch.setattr(person, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", person)
    code, out, err = run("diagnose")
    assert (code, out) == (2, "")
    assert "no file is named; give a snapshot" in err
