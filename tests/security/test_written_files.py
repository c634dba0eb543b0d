"""Files are written whole or not at all, replace others only with ``--force``, and are refused before anything is computed."""

from __future__ import annotations

import ast
import errno
import os
import resource
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import pytest

import zeroplan
from tests.cli.command import Run, running
from tests.measured_twins import twin
from tests.security.test_nothing_is_run import dotted
from zeroplan.current_folder import environment
from zeroplan.errors import SpecError
from zeroplan.whole import put, refuse_folder, unfinished, write_all, write_whole

PACKAGE = Path(zeroplan.__file__).parent
JOB = ("--model", "gpt2", "--gpus", "2", "--gpu", "l4-24gb", "--seq-len", "256")
LLAMA = ("--model", "llama-3.1-8b", "--gpus", "8", "--gpu", "h100-sxm-80gb", "--seq-len", "2048")
needs_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
#: Commands that write files, and the names of these files.
WRITERS = [
    pytest.param(("report", *JOB, "--out", "a.html"), ("a.html",), id="report"),
    *(pytest.param(("plot", "scaling", *JOB, "-o", f"a.{kind}"), (f"a.{kind}",), id=kind, marks=needs_matplotlib)
      for kind in ("png", "svg", "pdf")),
    pytest.param(("plan", *JOB, "--engine", "deepspeed", "--emit", "deepspeed"), ("deepspeed-zeroplan.json",), id="deepspeed"),
    pytest.param(("plan", *JOB, "--engine", "deepspeed", "--emit", "accelerate"),
                 ("accelerate-zeroplan.yaml", "deepspeed-zeroplan.json"), id="accelerate"),
    pytest.param(("plan", *JOB, "--emit", "fsdp2"), ("fsdp2-zeroplan.py",), id="fsdp2"),
    pytest.param(("plan", *LLAMA, "--loss", "full", "--emit", "torchtitan"), ("torchtitan_zeroplan.py", "torchtitan-zeroplan.toml"),
                 id="torchtitan"),
    pytest.param(("plan", *LLAMA, "--emit", "megatron"), ("megatron-zeroplan.txt",), id="megatron"),
]  # fmt: skip


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)
    return running(capsys)


def inside(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text(errors="replace") for path in folder.iterdir()}


def no_room(*_: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(("command", "names"), WRITERS)
def test_no_command_overwrites_a_file_without_force(run: Run, tmp_path: Path, command: tuple[str, ...], names: tuple[str, ...]):
    for name in names:
        (tmp_path / name).write_text("mine")
    code, out, err = run(*command)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "--force" in err
    assert inside(tmp_path) == dict.fromkeys(names, "mine")
    assert run(*command, "--force")[0] == 0
    found = inside(tmp_path)
    assert set(found) == set(names)
    assert "mine" not in found.values()


@pytest.mark.parametrize(("command", "names"), WRITERS)
def test_a_full_disk_leaves_what_was_there(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], names: tuple[str, ...]
):
    monkeypatch.setattr(os, "fsync", no_room)
    for there in ({}, dict.fromkeys(names, "mine")):
        for name, text in there.items():
            (tmp_path / name).write_text(text)
        code, out, err = run(*command, "--force")
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        assert any(f"'{name}' cannot be written: No space left on device" in err for name in names)
        assert inside(tmp_path) == there


@pytest.mark.parametrize("command", [
    ("report", *JOB, "--out", "a.html"), pytest.param(("plot", "scaling", *JOB, "-o", "a.png"), marks=needs_matplotlib),
    ("plan", *JOB, "--engine", "deepspeed", "--emit", "accelerate"),
], ids=lambda words: words[0])  # fmt: skip
def test_a_file_size_limit_leaves_what_was_there(tmp_path: Path, command: tuple[str, ...]):
    """The system refuses to write more than 100 bytes per file, as on a full disk."""
    names = ("a.html", "a.png", "accelerate-zeroplan.yaml", "deepspeed-zeroplan.json")
    for name in names:
        (tmp_path / name).write_text("mine")
    done = subprocess.run(
        [sys.executable, "-m", "zeroplan", *command, "--force"], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**environment(), "PYTHONDONTWRITEBYTECODE": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("cannot be written: File too large\n")
    assert inside(tmp_path) == dict.fromkeys(names, "mine")


def test_a_profile_is_refused_before_anything_is_traced(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("zeroplan.cli.profile._traced", lambda *_, **__: pytest.fail("traced"))
    monkeypatch.setattr("zeroplan.cli.profile.not_installed", lambda *_, **__: pytest.fail("looked for torch"))
    (tmp_path / "there.json").write_text("mine")
    (tmp_path / "config.json").write_text("{}")
    wrong = dict.fromkeys(("there.json/a.json", "/proc/a.json", "a\0b", "a" * 300), "cannot be written")
    for out, why in {".": "is there and is not a file", "there.json": "--force", **wrong}.items():
        code, printed, err = run("profile", "--config", "config.json", "--out", out)
        assert (code, printed, len(err.splitlines())) == (2, "", 1), out
        assert why in err
    assert inside(tmp_path) == {"there.json": "mine", "config.json": "{}"}


def test_a_profile_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from tests.profiles import by_hand
    from zeroplan.cli.profile import _write

    path = tmp_path / "p.json"
    path.write_text("mine")
    with pytest.raises(SpecError, match="--force"):
        _write(by_hand(), path, force=False)
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", no_room)
        with pytest.raises(SpecError, match="No space left"):
            _write(by_hand(), path, force=True)
    assert inside(tmp_path) == {"p.json": "mine"}
    _write(by_hand(), path, force=True)
    assert path.read_text().startswith("{")


@pytest.mark.torch
@pytest.mark.skipif(find_spec("torch") is None or find_spec("transformers") is None, reason="torch is not installed")
@pytest.mark.parametrize("flag", ["--record-dir", "--snapshot"])
def test_a_folder_for_records_is_tried_before_the_run(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str):
    monkeypatch.setattr("zeroplan.verify.processes.launch.launch", lambda *_, **__: pytest.fail("started"))
    (tmp_path / "file").write_text("mine")
    for folder in ("file", "file/below", "/proc/below", "a\0b"):
        code, out, err = run("verify", *JOB, "--backend", "cuda", flag, folder)
        assert (code, out, len(err.splitlines())) == (2, "", 1), folder
        assert f"{flag} " in err
        assert "cannot be written to" in err
    assert inside(tmp_path) == {"file": "mine"}


def test_a_rank_under_torchrun_tries_the_folder_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from zeroplan.verify.processes import torchrun

    monkeypatch.setattr(torchrun, "meeting", lambda _: pytest.fail("met the others"))
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    (tmp_path / "job.toml").write_text("model = 'gpt2'\nstage = 3\n")
    assert torchrun.main([str(tmp_path / "job.toml"), "--backend", "cpu", "--record-dir", str(tmp_path / "job.toml")]) == 2
    assert "cannot be written to: Not a directory" in capsys.readouterr().err


def test_a_case_that_began_and_gave_no_result_leaves_no_file(tmp_path: Path):
    from zeroplan.verify.cases.results import opened

    with opened(tmp_path / "r.jsonl", say=print) as results:
        results.begin("first")
    assert inside(tmp_path) == {}


# Writing files whole


def test_a_link_stays_a_link_and_a_file_keeps_its_mode(tmp_path: Path):
    (tmp_path / "real").mkdir()
    real, link, dangling = tmp_path / "real" / "file", tmp_path / "link", tmp_path / "dangling"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    dangling.symlink_to(tmp_path / "real" / "absent")
    for path in (link, dangling):
        with pytest.raises(FileExistsError):
            write_whole(path, "new", force=False)
    write_whole(link, "new", force=True)
    assert (link.is_symlink(), real.read_text(), real.stat().st_mode & 0o777) == (True, "new", 0o640)
    assert [path.name for path in (tmp_path / "real").iterdir()] == ["file"]


def test_several_files_are_written_all_or_none(tmp_path: Path):
    first, second = tmp_path / "first", tmp_path / "second"
    second.write_text("mine")
    with pytest.raises(FileExistsError) as there:
        write_all({first: "a", second: "b"}, force=False)
    assert there.value.filename == str(second)
    second.unlink()
    second.mkdir()
    with pytest.raises(OSError, match="second"):
        write_all({second: "b", first: "a"}, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["second"]


def test_a_file_that_appears_during_the_write_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "file"
    with unfinished(path) as beside:
        monkeypatch.setattr(os.path, "lexists", lambda _: False)  # the file appears after this check
        path.write_text("mine")
        with pytest.raises(FileExistsError):
            put(beside, path, force=False)
    assert inside(tmp_path) == {"file": "mine"}


def test_trying_a_folder_leaves_nothing_behind(tmp_path: Path):
    refuse_folder(tmp_path / "new" / "below", "--record-dir")
    assert inside(tmp_path) == {}


def test_an_unfinished_file_that_is_interrupted_is_gone(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt), unfinished(tmp_path / "a"):
        raise KeyboardInterrupt
    assert inside(tmp_path) == {}


def test_writing_records_leaves_no_unfinished_files(tmp_path: Path):
    from zeroplan.verify.record import write_record

    names = [write_record(twin(), tmp_path).name for _ in range(2)]
    assert sorted(names) == sorted(inside(tmp_path))


#: Modules that open files to write: ``whole.py``, and those that write to files that they made, to temporary folders, to a file
#: of results line by line, or to the null device.
THEMSELVES = {
    "dryrun/child.py", "dryrun/companions.py", "dryrun/launch.py", "dryrun/rank_messages.py", "dryrun/on_card/child.py",
    "dryrun/on_card/launch.py", "dryrun/unwritten.py", "dryrun/without_bytes.py", "explore/opened.py", "hooks/lightning.py",
    "hooks/trainer.py",
    "report/plots/frame.py",
    "verify/cases/results.py", "verify/processes/launch.py", "verify/processes/messages.py", "verify/record.py", "whole.py",
}  # fmt: skip


def writes(text: str) -> bool:
    """Whether a module's text opens a file to write, in any usual way of Python and matplotlib."""
    return any(isinstance(node, ast.Call) and _writes(node) for node in ast.walk(ast.parse(text)))


def _writes(call: ast.Call) -> bool:
    name = dotted(call.func).rpartition(".")[2] or getattr(call.func, "attr", "")
    said = [one.value for one in (*call.args, *(one.value for one in call.keywords)) if isinstance(one, ast.Constant)]
    mode = next((one for one in said if isinstance(one, str) and set(one) <= set("rwaxbt+")), "")
    if name == "open" and dotted(call.func) == "os.open":
        return any("O_CREAT" in ast.dump(one) for one in call.args)
    return name in ("write_text", "write_bytes", "savefig", "_dump_snapshot_to") or (
        name == "open" and bool(set(mode) & set("wax+"))
    )


def test_only_known_modules_write_files():
    found = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if writes(path.read_text(encoding="utf-8"))}
    assert found == THEMSELVES


@pytest.mark.parametrize("text", ["path.write_text('x')", "open(path, 'w')", "path.open('ab')", "path.open(mode='x')",
                                  "os.open(path, os.O_CREAT | os.O_WRONLY)", "figure.savefig(path)"])  # fmt: skip
def test_each_way_to_write_is_found(text: str):
    assert writes(text)
    assert not writes("path.open('rb')\nopen(path)\nos.open(path, os.O_RDONLY)\ntext.replace('w', 'a')")
