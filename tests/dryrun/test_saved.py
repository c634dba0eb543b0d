"""A saved run gives the same answer without running again; a file that is not a saved run is refused in one line."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dryrun.running import SCRIPTS, Run, dry_run
from zeroplan.errors import SpecError
from zeroplan.saved_runs import files
from zeroplan.saved_runs.files import read_saved, save

pytestmark = pytest.mark.torch
pytest.importorskip("transformers")

Data = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    """Return the dry run of an FSDP2 script, which is saved as run.gz."""
    found = dry_run(
        "--save",
        "run.gz",
        "--",
        str(SCRIPTS / "fsdp2.py"),
        "2",
        "128",
        "128",
        folder=folder,
        flags=("--gpus", "8", "-q", "--json"),
    )
    assert found.code == 0, found.errors
    return found


@pytest.fixture
def data(run: Run, folder: Path) -> Data:
    assert run.code == 0
    return json.loads(gzip.decompress((folder / "run.gz").read_bytes()))


def test_a_saved_run_gives_the_answer_of_the_run(run: Run, folder: Path):
    shown = dry_run("--show", "run.gz", folder=folder, flags=("--json",))
    assert shown.answer == run.answer
    assert dry_run("--show", "run.gz", "--check", folder=folder, flags=()).output.startswith("Fits: needs ")
    both = dry_run("--show", "run.gz", "--", str(SCRIPTS / "ddp.py"), folder=folder, flags=())
    assert both.code == 2
    assert "runs nothing" in both.last_line


def test_the_trace_has_the_peak_of_every_step_and_the_line_of_every_block(run: Run, folder: Path):
    trace = read_saved(folder / "run.gz").trace
    assert trace is not None
    for number, step in enumerate(run.answer["steps"]):
        windows = [
            trace.window(at) for at, span in enumerate(trace.spans) if span.step == number and span.phase != "initialisation"
        ]
        peak = max(trace.live[moment] for window in windows for moment in window)
        assert peak == max(phase["peak_bytes"] for phase in step["phases"])
    moment = trace.live.index(run.peak_bytes, trace.last_step.start)
    kinds: dict[str, int] = {}
    for size, born, died, kind in zip(
        trace.blocks.n_bytes, trace.blocks.born, trace.blocks.died, trace.blocks.kind, strict=True
    ):
        if born <= moment < died:
            kinds[trace.kinds[kind]] = kinds.get(trace.kinds[kind], 0) + size
    steady = max(run.answer["steps"][-1]["phases"], key=lambda phase: phase["peak_bytes"])
    assert kinds == steady["kinds"]
    texts = dict(zip(trace.lines, trace.sources, strict=True))
    assert any("model(" in text for line, text in texts.items() if line.startswith("fsdp2.py:"))
    assert {one.operation for one in trace.collectives} >= {"all_gather", "reduce_scatter"}
    assert len({one.moment for one in trace.collectives}) > 1


def test_an_existing_file_is_not_overwritten_without_force(run: Run, folder: Path):
    before = (folder / "run.gz").read_bytes()
    again = dry_run("--save", "run.gz", "--", "gone.py", folder=folder, flags=())
    assert (again.code, run.code) == (2, 0)
    assert "'run.gz' is there already" in again.last_line
    assert (folder / "run.gz").read_bytes() == before
    forced = dry_run("--show", "run.gz", "--save", "run.gz", "--force", folder=folder, flags=("--json",))
    assert forced.answer == run.answer
    assert (folder / "run.gz").read_bytes() == before


def _without_a_step(data: Data) -> None:
    data["run"]["steps"] = []


def _of_tomorrow(data: Data) -> None:
    data["schema_version"] = 99


def _one_block_short(data: Data) -> None:
    data["trace"]["blocks"]["line"].pop()


def _released_before(data: Data) -> None:
    data["trace"]["blocks"]["died"][3] = 1


def _in_no_table(data: Data) -> None:
    data["trace"]["blocks"]["module"][0] = 10**6


def _endless(data: Data) -> None:
    data["trace"]["moments"] = 10**14


def _text_for_a_number(data: Data) -> None:
    data["trace"]["blocks"]["n_bytes"][0] = "8"


def _below_nothing(data: Data) -> None:
    data["trace"]["blocks"]["n_bytes"][0] = -8


def _spans_backwards(data: Data) -> None:
    data["trace"]["spans"].reverse()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_without_a_step, "has no step"),
        (_of_tomorrow, "schema version 99"),
        (_one_block_short, "differ in length"),
        (_released_before, "before it is requested"),
        (_in_no_table, "is not in its table"),
        (_endless, "the same moment"),
        (_text_for_a_number, "whole number"),
        (_below_nothing, "out of range"),
        (_spans_backwards, "not in order"),
    ],
)
def test_a_run_that_contradicts_itself_is_refused_in_one_line(
    data: Data, tmp_path: Path, change: Callable[[Data], None], says: str
):
    change(data)
    path = tmp_path / "run.json"
    path.write_text(json.dumps(data))
    with pytest.raises(SpecError, match=says) as refused:
        read_saved(path)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


def test_other_files_are_refused(run: Run, folder: Path, tmp_path: Path):
    whole = (folder / "run.gz").read_bytes()
    plain = gzip.decompress(whole)
    contents = {
        "cut.gz": (whole[: len(whole) // 2], "cut off"), "cut.json": (plain[: len(plain) // 2], "not complete JSON"),
        "other.json": (b'{"a": 1}', "not a run"), "list.json": (b"[]", "not a run"), "empty": (b"", "not complete JSON"),
        "deep.json": (b"[" * 10**5, "nested too deep"), "twice.json": (b'{"a": 1, "a": 2}', "twice"),
        "text.json": (b"\xff\xfe\xfa", "JSON"), "noise.gz": (b"\x1f\x8b" + bytes(99), "cut off or damaged"),
    }  # fmt: skip
    assert run.code == 0
    for name, (content, says) in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SpecError, match=says):
            read_saved(tmp_path / name)
    for name, says in (("gone", "does not exist"), (".", "is not a file"), ("nul\0", "does not exist")):
        with pytest.raises(SpecError, match=says):
            read_saved(tmp_path / name)


def test_a_small_file_that_unpacks_to_gigabytes_is_never_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "LARGEST_BYTES", 2**20)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(b" " * 2**27))
    tracemalloc.start()
    with pytest.raises(SpecError, match="contains more than 1 MiB"):
        read_saved(tmp_path / "bomb.gz")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2**24


def test_a_run_too_large_to_be_read_again_is_not_written(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    saved = read_saved(folder / "run.gz")
    monkeypatch.setattr(files, "LARGEST_BYTES", 1000)
    with pytest.raises(SpecError, match="run fewer --steps"):
        save(saved, tmp_path / "run.json", force=False)
    assert run.code == 0
    assert not list(tmp_path.iterdir())


def test_control_characters_are_escaped(data: Data, tmp_path: Path):
    data["run"]["command"][0] = "train\x1b[2J\x9b.py"
    (tmp_path / "run.json").write_text(json.dumps(data))
    shown = dry_run("--show", "run.json", folder=tmp_path, flags=())
    assert r"train\x1b[2J\x9b.py" in shown.output.replace("\n", " ")
    assert "\x1b" not in shown.output


def test_a_saved_run_is_drawn_as_a_plot_and_as_a_page(run: Run, folder: Path, capsys: pytest.CaptureFixture[str]):
    from zeroplan.cli.app import main
    from zeroplan.explore.saved_run import run_page
    from zeroplan.report.series.run import phases
    from zeroplan.report.series.run import run as series_of

    saved = read_saved(folder / "run.gz")
    last, whole = series_of(saved), series_of(saved, whole=True)
    assert int(last.n_bytes.sum(axis=0)[last.peak]) == run.peak_bytes
    assert int(whole.n_bytes.sum(axis=0).max()) == saved.run.peak_bytes
    assert [one.name for one in last.stretches] == ["forward", "backward", "optimizer step"]
    assert whole.stretches[0].name == "loading"
    assert {instant.name for instant in phases(saved).instants} >= {"loading", "forward", "backward", "optimizer step"}
    with pytest.raises(SystemExit):
        main(["plot", "timeline", "--run", str(folder / "run.gz"), "--text"])
    assert "loading" in capsys.readouterr().out
    page = run_page(saved).decode()
    assert page.count("data:image/png;base64,") == 2
    assert "Peak of each phase" in page
    assert "<script" not in page


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("plot", "timeline", "run.gz", "--text"), "zeroplan plot timeline --run FILE"),
        (("compare", "run.gz"), "zeroplan dryrun --show FILE"),
        (("plot", "timeline", "--run", "run.gz", "--model", "gpt2", "--text"), "has a job of its own"),
        (("plot", "timeline", "--whole", "--text"), "add --run FILE"),
        (("plot", "timeline", "--run", "gone.gz", "--text"), "does not exist"),
        (("explore", "gone.gz", "--no-browser"), "does not exist"),
    ],
)
def test_a_saved_run_given_to_another_command_is_answered_with_the_right_one(
    run: Run,
    folder: Path,
    words: tuple[str, ...],
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    from zeroplan.cli.app import main

    assert run.code == 0
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert says in said[0]
