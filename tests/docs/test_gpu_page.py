"""``zeroplan verify`` accepts every command of the page on GPUs; the tests stop each one before it starts its ranks."""

import shlex
import tomllib
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks
from zeroplan.errors import MeasurementError
from zeroplan.verify.cases.matrix import read_matrix, shipped

PAGE = ROOT / "docs" / "verify-on-gpus.md"
LINES = [line for block in blocks(PAGE, "bash") for line in block.replace("\\\n", " ").splitlines()]


class ReachedError(MeasurementError):
    """The command would have run."""


def reached(*_: object, **__: object) -> None:
    raise ReachedError("reached")


@pytest.mark.parametrize("command", [line for line in LINES if line.startswith("zeroplan verify")])
def test_a_command_is_accepted_and_reaches_the_start_of_its_ranks(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from zeroplan.cli.app import main

    (tmp_path / "mine.toml").write_text(blocks(PAGE, "toml")[0])
    monkeypatch.chdir(tmp_path)
    for name in ("processes.launch.launch", "processes.slurm.submit", "cases.bulk.run_cases", "processes.slurm.resumed_job"):
        monkeypatch.setattr(f"zeroplan.verify.{name}", reached)
    import zeroplan.cli.verify_bulk
    import zeroplan.cli.verify_slurm

    monkeypatch.setattr(zeroplan.cli.verify_bulk, "run_cases", reached)
    monkeypatch.setattr(zeroplan.cli.verify_bulk, "require", lambda _: None)
    monkeypatch.setattr("zeroplan.cli.verify.require", lambda _: None)
    for name in ("submit", "resumed_job"):
        monkeypatch.setattr(zeroplan.cli.verify_slurm, name, reached)
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(command)[1:])
    assert (ended.value.code, capsys.readouterr().err.splitlines()[-1]) == (4, "zeroplan: reached")


def test_the_numbers_of_cases_are_those_of_the_matrices():
    counts = {name: len(read_matrix(path, tensors="cuda")) for name, path in shipped().items()}
    text = PAGE.read_text(encoding="utf-8")
    assert f"{counts['one-140gb']} cases for one card" in text
    assert f"{counts['node-8x80gb']} for a node" in text
    assert f"`one-80gb`, with {counts['one-80gb']} cases" in text
    assert tomllib.loads(blocks(PAGE, "toml")[0])["case"]
