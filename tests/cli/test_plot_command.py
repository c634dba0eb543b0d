"""``zeroplan plot``: picture files, pictures as text, and one line if a picture cannot be drawn."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import Run
from tests.measured_twins import twin
from zeroplan.cli import plotting
from zeroplan.cli.app import main
from zeroplan.cli.plot import KINDS
from zeroplan.verify.cases.results import Result, opened
from zeroplan.verify.record import write_record
from zeroplan.verify.task import Task

JOB = ("--model", "gpt2", "--gpus", "4", "--stage", "1", "--engine", "ddp", "--seq-len", "128", "--gpu", "l4")
MAGIC = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


@pytest.fixture
def record(tmp_path: Path) -> str:
    return str(write_record(twin(factor=0.9), tmp_path / "records"))


@pytest.fixture(autouse=True)
def no_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plotting.sys, "platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("kind", "ending"), [("stages", "png"), ("scaling", "svg"), ("heat", "pdf")])
def test_a_picture_of_a_job_is_written(run: Run, tmp_path: Path, kind: str, ending: str):
    path = tmp_path / f"one.{ending.upper()}"
    assert run("plot", kind, *JOB, "-o", str(path), "--theme", "dark") == (0, f"wrote {path}\n", "")
    assert path.read_bytes().startswith(MAGIC[ending])


def test_a_plan_is_drawn_and_exits_with_1_if_nothing_fits(run: Run, tmp_path: Path):
    asked = ("--model", "gpt2", "--gpu", "l4-24gb", "--gpus", "4", "--global-batch", "32")
    path = tmp_path / "one.png"
    assert run("plot", "pareto", *asked, "-o", str(path))[:2] == (0, f"wrote {path}\n")
    best = run("plan", *asked)[1].partition("Best for throughput: ")[2].split("\n  zeroplan")[0]
    code, out, _ = run("plot", "pareto", *asked, "--text")
    starred = out.partition("\n* ")[2].partition("tokens/s")[2].split("\n  ", 1)[1].split("GiB")[0]
    assert (code, " ".join(best.split()) in " ".join(starred.split())) == (0, True)
    nothing = ("--model", "llama-3.1-405b", "--gpu", "l4-24gb", "--gpus", "1", "--text")
    code, out, _ = run("plot", "pareto", *nothing)
    assert (code, "nothing fits" in out) == (1, True)


def test_a_record_gives_its_own_job_or_is_drawn_over_another(run: Run, tmp_path: Path, record: str):
    alone, together = tmp_path / "alone.svg", tmp_path / "together.svg"
    assert run("plot", "timeline", "--record", record, "-o", str(alone))[0] == 0
    assert run("plot", "timeline", *JOB[:-2], "--record", record, "-o", str(together))[0] == 0
    assert alone.read_bytes() == together.read_bytes()


def test_records_are_validated(run: Run, tmp_path: Path, record: str):
    path = tmp_path / "one.png"
    assert run("plot", "validation", str(Path(record).parent), "-o", str(path))[0] == 0
    assert path.stat().st_size > 10_000
    assert "0 within 2 %" in run("plot", "validation", record, "--text")[1]


def test_results_of_a_matrix_are_validated_together_with_records(run: Run, tmp_path: Path):
    measured = twin()
    write_record(measured, tmp_path)
    with opened(tmp_path / "m-cpu.jsonl", say=print) as results:
        results.append(Result(name="a", task=Task(job=measured.job, transport="fake"), outcome="measured", record=measured))
    assert "2 runs: " in run("plot", "validation", str(tmp_path), "--text")[1]


@pytest.mark.parametrize("kind", ["stages", "timeline", "scaling", "heat"])
def test_text_is_as_wide_as_the_terminal_and_plain_in_a_pipe(run: Run, monkeypatch: pytest.MonkeyPatch, kind: str):
    monkeypatch.setenv("COLUMNS", "72")
    code, out, err = run("plot", kind, *JOB, "--text")
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 72
    assert "GiB" in out


@pytest.mark.parametrize(
    ("environment", "coloured"), [({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False)]
)
def test_no_color_leaves_the_colours_out(environment: dict[str, str], coloured: bool):
    code = "from zeroplan.cli.app import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "plot", "stages", *JOB, "--text"], capture_output=True, check=True,
                          env={**os.environ, "TERM": "xterm-256color", "FORCE_COLOR": "1", "PYTHONIOENCODING": "utf-8",
                               **environment})  # fmt: skip
    assert (b"\x1b[38" in done.stdout) is coloured
    assert "█".encode() in done.stdout


def test_a_terminal_without_unicode_gets_letters():
    code = "from zeroplan.cli.app import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "plot", "stages", *JOB, "--text"], capture_output=True, check=True,
                          env={**os.environ, "PYTHONIOENCODING": "ascii"})  # fmt: skip
    assert b"OO" in done.stdout
    assert done.stdout.isascii()


@pytest.mark.parametrize(("arguments", "words"), [
    (("stage", *JOB), "unknown kind of plot 'stage'; nearest: stages"),
    ((), "no kind of plot is named"),
    (("stages", *JOB), "there is no display to draw on; write a file with -o FILE.png, or use --text"),
    (("stages", *JOB, "-o", "one.jpg"), "does not end in .png, .svg or .pdf"),
    (("stages", *JOB, "-o", ""), "does not end in .png, .svg or .pdf"),
    (("stages", *JOB, "-o", "absent/one.png"), "-o 'absent/one.png' is in a folder that is not there; make it first"),
    (("stages", *JOB, "-o", "folder.png"), "-o 'folder.png' is there and is not a file; name another"),
    (("stages", *JOB, "-o", "folder.png", "--force"), "-o 'folder.png' is there and is not a file; name another"),
    (("stages", *JOB, "-o", "folder.png/one.png/two.png"), "is in a folder that is not there; make it first"),
    (("stages", *JOB, "--force", "--text"), "--force overwrites a file, but none is named"),
    (("stages", *JOB, "-o", "one.png", "--text"), "choose one"),
    (("stages", *JOB, "--theme", "blue", "--text"), "--theme 'blue' is neither light nor dark"),
    (("stages", "--text"), "a job has one model"),
    (("pareto", "--model", "gpt2", "--text"), "a plan needs a GPU to fit"),
    (("pareto", *JOB, "--objective", "beauty", "--text"), "--objective 'beauty' is none of"),
    (("timeline", "--text"), "a timeline needs a job, a record or both"),
    (("timeline", "--record", "absent.json", "--text"), "'absent.json' does not exist"),
    (("timeline", "--record", "", *JOB, "--text"), "record"),
    (("validation", "--text"), "Missing argument"),
    (("validation", "absent.json", "--text"), "'absent.json' does not exist"),
    (("validation", "absent.json", "--tolerance", "much", "--text"), "--tolerance 'much'"),
])  # fmt: skip
def test_wrong_input_is_one_line_and_exit_code_2(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    code, out, err = run("plot", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("zeroplan: ")
    assert len(err.splitlines()) == 1
    assert words in err
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]


def test_a_record_of_another_job_is_one_line_and_exit_code_2(run: Run, record: str):
    code, out, err = run("plot", "timeline", *JOB, "--stage", "0", "--record", record, "--text")
    assert (code, out) == (2, "")
    assert "is of another job (stage 1 instead of 0)" in err


def test_without_matplotlib_pictures_as_text_still_work(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    found = importlib.util.find_spec
    monkeypatch.setattr("zeroplan.installation.find_spec", lambda name: None if name == "matplotlib" else found(name))
    code, _, err = run("plot", "stages", *JOB, "-o", str(tmp_path / "one.png"))
    assert code == 4
    assert err.endswith('pip install ".[plot]" in a clone of zeroplan, or use --text\n')
    assert len(err.splitlines()) == 1
    assert run("plot", "stages", *JOB, "--text")[0] == 0


def test_settings_that_matplotlib_refuses_are_one_line(tmp_path: Path):
    done = subprocess.run([sys.executable, "-m", "zeroplan", "plot", "stages", *JOB, "-o", str(tmp_path / "one.png")], check=False,
                          capture_output=True, text=True, env={**os.environ, "MPLBACKEND": "nonsense"})  # fmt: skip
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.startswith("zeroplan: matplotlib cannot be loaded: ")
    assert len(done.stderr.splitlines()) == 1


def test_help_names_every_kind_and_every_kind_has_help(capsys: pytest.CaptureFixture[str]):
    for arguments in (["plot", "--help"], *(["plot", kind, "--help"] for kind in KINDS)):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        printed = capsys.readouterr().out
        assert all(name in printed for name in (KINDS if arguments[1] == "--help" else ("--theme", "--text", "--out")))
