"""For a config.json without formulas, zeroplan traces the model's own code once, and a note in the answer says so."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.cli.command import Run
from zeroplan import auto_profile

PERSIMMON = {
    "model_type": "persimmon", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 128, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
JOB = ("--gpus", "4", "--seq-len", "256")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the configuration; the user's cache is in an empty folder next to it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "my-persimmon").mkdir()
    return _written(tmp_path / "my-persimmon", PERSIMMON)


def _written(folder: Path, config: dict[str, object]) -> Path:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _ends_with(code: int, said: str) -> object:
    return lambda command, **_: subprocess.CompletedProcess(command, code, "", said)


@pytest.mark.torch
def test_the_model_is_traced_once_and_every_answer_has_a_note(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch):
    code, out, err = run("estimate", "--config", str(folder), *JOB, "--json")
    assert code == 0, err
    assert err.count("no formulas for my-persimmon: tracing") == 1
    answer = json.loads(out)
    assert any("beyond the 128 positions" in note for note in answer["notes"])
    assert any(note.startswith("no formulas for my-persimmon: the model's own code was traced") for note in answer["notes"])
    monkeypatch.setattr(auto_profile.subprocess, "run", None)  # from here on nothing is traced
    (kept,) = auto_profile.cache_folder().iterdir()
    code, again, err = run("estimate", "--config", str(folder), *JOB, "--json")
    assert (code, json.loads(again)["peak"]) == (0, answer["peak"])
    assert err.startswith("note: no formulas for my-persimmon: the model's own code was traced")
    assert json.loads(run("estimate", "--profile", str(kept), *JOB, "--json")[1])["peak"] == answer["peak"]


@pytest.mark.parametrize(("exit_code", "ours"), [(2, 2), (4, 4), (1, 4)])
def test_a_failed_trace_ends_in_one_line(exit_code: int, ours: int, folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(auto_profile, "not_installed", lambda *_, **__: "")
    monkeypatch.setattr(auto_profile.subprocess, "run", _ends_with(exit_code, "warning\nzeroplan: it loops\n"))
    code, _, err = run("estimate", "--config", str(folder), *JOB)
    assert code == ours
    assert err.splitlines()[-1].startswith("zeroplan: model_type 'persimmon' has no formulas")
    assert err.endswith("; tracing its own code failed: it loops\n")


def test_without_torch_the_error_names_what_to_install(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        auto_profile, "not_installed", lambda *names, by: f"{' and '.join(names)} not there, for {by}: pip install"
    )
    code, _, err = run("estimate", "--config", str(folder), *JOB)
    assert (code, err.count("\n")) == (2, 1)
    assert "has no formulas" in err
    assert err.endswith("torch and transformers not there, for tracing the model itself: pip install\n")


@pytest.mark.parametrize("flags", [("--treat-as", "llama"), ("--engine", "paper")])
def test_treat_as_and_engine_paper_trace_nothing(
    flags: tuple[str, str], folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(auto_profile.subprocess, "run", None)
    code, _, err = run("estimate", "--config", str(folder), *JOB, *flags)
    assert "tracing" not in err
    assert code == (0 if flags[0] == "--treat-as" else 2)


def test_a_cache_that_cannot_be_written_does_not_stop_the_answer(
    folder: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):  # fmt: skip
    from tests.profiles import by_hand
    from zeroplan.cli.profile import without_defaults

    def traced(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        Path(command[-1]).write_text(json.dumps(without_defaults(by_hand())), encoding="utf-8")
        return subprocess.CompletedProcess(command, 0, "", "")

    (tmp_path / "cache").write_text("no folder", encoding="utf-8")
    monkeypatch.setattr(auto_profile, "not_installed", lambda *_, **__: "")
    monkeypatch.setattr(auto_profile.subprocess, "run", traced)
    code, out, err = run("estimate", "--config", str(folder), "--gpus", "4", "--seq-len", "100")
    assert (code, "my-persimmon" in out) == (0, True)
    assert "is not kept for the next time" in err
