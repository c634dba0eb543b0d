"""Faults during a run of many cases: at most the running case is lost, and the next run says how the last one ended."""

import ast
import errno
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

import zeroplan
from tests.verify.cases import stand_in
from zeroplan.cli import say
from zeroplan.errors import MeasurementError
from zeroplan.verify.cases.results import opened
from zeroplan.verify.failures import NotHereError, cause_of, text_of
from zeroplan.verify.processes.scratch import remove_leftovers, scratch
from zeroplan.verify.watching.log import Log

FOREVER_S = 60
CASES = "[[case]]\nmodel = 'gpt2'\ngpus = 4\nengine = 'ddp'\nstage = 1\nseq_len = [128, 256, 384]"
NAME = "gpt2 ddp-1 r0/4 bf16-mixed 1x{}"


class Place:
    """A folder with a matrix of three cases, in which tests start, watch and kill runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("cases", "tmp"):
            (folder / name).mkdir()
        (folder / "some.toml").write_text(CASES)

    def start(self, before: Callable[[], None] | None = None) -> "subprocess.Popen[str]":
        said = {**os.environ, "STAND_IN": str(self.folder / "cases"), "TMPDIR": str(self.folder / "tmp")}
        if before is not None:  # a limit on the size of files would cut off bytecode, too, and leave it in the checkout
            said["PYTHONDONTWRITEBYTECODE"] = "1"
        command = [sys.executable, stand_in.__file__, "verify", "--matrix", "some.toml", "--record-dir", "kept"]
        return subprocess.Popen(command, cwd=self.folder, env=said, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                preexec_fn=before)  # fmt: skip  # noqa: PLW1509

    def finish(self, before: Callable[[], None] | None = None) -> tuple[int, list[str]]:
        process = self.start(before)
        _, err = process.communicate(timeout=FOREVER_S)
        return process.returncode, err.splitlines()

    def let(self, *tokens: int) -> None:
        for number in tokens:
            (self.folder / "cases" / f"go-{number}").touch()

    def began(self, tokens: int) -> tuple[int, int]:
        """Wait until a case runs; return the ids of its process and of the process that it was forked from."""
        path = self.folder / "cases" / f"began-{tokens}"
        until(path.exists)
        copy, origin = map(int, path.read_text().split())
        path.unlink()
        return copy, origin

    @property
    def results(self) -> Path:
        return self.folder / "kept" / "some-simulate.jsonl"

    def outcomes(self) -> list[tuple[int, str]]:
        lines = map(json.loads, self.results.read_text().splitlines())
        return [(line["task"]["job"]["batch"]["seq_len"], line["outcome"]) for line in lines]

    def processes(self) -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                ours = f"STAND_IN={self.folder}".encode() in path.read_bytes()
            except OSError:
                continue
            if ours:
                found.append(int(path.parent.name))
        return found


def ended(process: "subprocess.Popen[str]") -> int:
    process.communicate(timeout=FOREVER_S)
    return process.returncode


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + FOREVER_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    until(lambda: not made.processes())


# Killed


def test_a_worker_that_is_killed_is_one_failed_case_and_the_next_run_tries_it_again(place: Place):
    place.let(128, 384)
    process = place.start()
    os.kill(place.began(256)[0], signal.SIGKILL)
    assert ended(process) == 4
    assert place.outcomes() == [(128, "measured"), (256, "failed"), (384, "measured")]
    place.let(256)
    code, said = place.finish()
    again = "2 of 3 cases have a result already; 1 failed or was refused and is tried again"
    assert said[0] == f"results: kept/some-simulate.jsonl; {again}"
    assert (code, place.outcomes()[3:]) == (0, [(256, "measured")])


def test_a_case_is_measured_even_if_the_process_it_was_forked_from_is_killed(place: Place):
    place.let(128)
    process = place.start()
    os.kill(place.began(256)[1], signal.SIGKILL)
    place.let(256, 384)
    assert ended(process) == 0
    assert place.outcomes() == [(128, "measured"), (256, "measured"), (384, "measured")]


@pytest.mark.parametrize("tree", [False, True])
def test_a_run_that_is_killed_loses_its_case_and_the_next_says_which_and_runs_it_last(place: Place, *, tree: bool):
    place.let(128)
    process = place.start()
    others = place.began(256)
    code, said = place.finish()  # a second run at the same time
    assert (code, said[-1].split("; ")[0]) == (4, "zeroplan: another run is writing to 'kept/some-simulate.jsonl'")
    for number in (process.pid, *(reversed(others) if tree else ())):
        os.kill(number, signal.SIGKILL)
    process.communicate(timeout=FOREVER_S)
    until(lambda: not place.processes())  # all processes of the killed run have ended
    with place.results.open("ab") as file:
        file.write(b'{"schema_version":1,"na')  # as a kill in the middle of a line would leave it
    place.let(256, 384)
    code, said = place.finish()
    assert said[0].split("; ") == [
        "results: kept/some-simulate.jsonl",
        "1 of 3 cases have a result already",
        f"the last run was killed during {NAME.format(256)}, which runs again, last",
        "its last line was incomplete and is deleted (23 bytes)",
        f"2 folders of killed runs removed from {place.folder / 'tmp'}",
    ]
    assert (code, place.outcomes()) == (0, [(128, "measured"), (384, "measured"), (256, "measured")])
    assert [path.name for path in (*place.results.parent.iterdir(), *(place.folder / "tmp").iterdir())] == [place.results.name]


# Disk faults


def test_on_a_full_disk_kept_results_stay_whole_and_the_next_run_goes_on(place: Place):
    place.let(128, 256, 384)
    room = 20_000  # enough for what a worker hands over and one result of 13,000 bytes, not for two
    code, said = place.finish(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room)))
    assert (code, said[-1]) == (4, "zeroplan: results cannot be written to 'kept/some-simulate.jsonl': File too large")
    assert place.outcomes() == [(128, "measured")]
    assert place.results.read_bytes().endswith(b"\n")
    code, said = place.finish()
    assert (code, said[0]) == (0, "results: kept/some-simulate.jsonl; 1 of 3 cases have a result already")


def test_if_a_worker_cannot_write_the_run_ends_with_one_line_and_skips_the_other_cases(place: Place):
    place.let(128, 256, 384)
    room = 6_500  # enough for the task, not for a record
    code, said = place.finish(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room)))
    assert code == 4
    assert said[-1].startswith("zeroplan: the record cannot be written to '")
    assert not place.results.exists()


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC])
def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int):
    """The failing call is faked, since root may write to any folder."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(NotHereError, match=r"temporary files cannot be written: .*set TMPDIR"), scratch():
        pass
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(MeasurementError, match="results cannot be written to"), opened(tmp_path / "r.jsonl", say=print):
        pass


def test_a_full_disk_is_not_blamed_on_the_engine():
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/cache/x")
    assert (cause_of(full), text_of(full)) == ("machine", "a file cannot be written ('/cache/x'): No space left on device")


def test_a_run_goes_on_if_its_messages_cannot_be_written(monkeypatch: pytest.MonkeyPatch):
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        say("3/64")
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


# Locks


def test_without_locks_a_run_says_so_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    told = list[str]()
    with opened(tmp_path / "r.jsonl", say=told.append) as results:
        assert results.found == []
    assert "has no locks (Function not implemented): make sure that no other run writes there" in told[0]


def test_folders_of_ended_runs_are_removed_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "zeroplan-run-mine").mkdir()  # a user's own folder
    left = tmp_path / "zeroplan-run-left"
    left.mkdir()
    (left / "task.json").touch()
    with scratch() as held:
        (held / "task.json").touch()
        assert remove_leftovers() == f"1 folder of killed runs removed from {tmp_path}"
        assert {path.name for path in tmp_path.iterdir()} == {held.name, "zeroplan-run-mine"}
    assert remove_leftovers() == ""


# The clock

#: Files that read the system's clock. Reasons: torch's profiler and file times use it, ranks on several nodes share no other,
#: or a date is needed.
BY_THE_SYSTEMS_CLOCK = {"dryrun/unwritten.py", "verify/watching/log.py", "verify/processes/slurm.py", "verify/environment.py"}


def test_no_time_is_measured_with_a_clock_that_can_be_set():
    root = Path(zeroplan.__file__).parent
    names = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today"}
    used = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in names
    }
    assert used == BY_THE_SYSTEMS_CLOCK


@pytest.mark.parametrize("hours", [1, -1])
def test_a_clock_that_is_set_during_a_run_is_noticed(monkeypatch: pytest.MonkeyPatch, hours: int):
    log, now = Log(), time.time_ns
    log.phase = "forward"
    log.require_a_steady_clock()
    monkeypatch.setattr(time, "time_ns", lambda: now() + hours * 3600 * 10**9)
    with pytest.raises(MeasurementError, match="clock was set during the run"):
        log.require_a_steady_clock()
