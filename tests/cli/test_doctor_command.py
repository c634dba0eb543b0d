"""``zeroplan doctor`` prints the versions of installed packages, and how to install those that are missing."""

import json
import re
import sys
from importlib import metadata
from pathlib import Path

import pytest

from zeroplan import installation
from zeroplan.installation import Package, abilities, absent, installed


def test_commands_that_work_here_are_listed(run):
    code, out, err = run("doctor")
    assert (code, err) == (0, "")
    assert "works  estimate, plan, advise, compare, diagnose, report, plot --text, models, gpus" in out
    assert "  dryrun" in out
    assert re.search(rf"python +{re.escape(sys.version.split()[0])}$", out, re.MULTILINE)


def test_the_json_has_the_same_content(run):
    code, out, _ = run("doctor", "--json")
    said = json.loads(out)
    assert (code, said["schema_version"]) == (0, 1)
    assert said["versions"]["numpy"] == installed(Package("numpy", "numpy", ""))
    for one in said["abilities"]:
        assert one["works"] == (one["missing"] is None), one


def _no_torch() -> str:
    return pytest.fail("asked a torch that is not there")


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch):
    there = installation.find_spec
    monkeypatch.setattr(installation, "find_spec", lambda name: None if name in ("torch", "matplotlib") else there(name))
    told = {one.what: one for one in abilities(_no_torch, _no_torch)}
    assert told["estimate, plan, advise, compare, diagnose, report, plot --text, models, gpus"].works
    assert (
        told["plot into a file or a window"].missing
        == 'matplotlib is not installed: pip install ".[plot]" in a clone of zeroplan'
    )
    assert not told["verify --backend cpu"].works
    assert not told["verify --backend cuda"].works


def test_a_package_that_is_too_old_is_named_with_the_upgrade_command(monkeypatch: pytest.MonkeyPatch):
    asked = [
        "torch>=2.13; extra == 'notebooks'",
        "torch>=2.11; extra == 'models'",
        "zeroplan[models]; extra == 'verify'",
        "rich>=13",
    ]
    there = {"torch": "2.9.1+cu128", "transformers": "5.0", "rich": "9.2"}
    monkeypatch.setattr("importlib.metadata.requires", lambda _name: asked)
    monkeypatch.setattr("importlib.metadata.version", there.__getitem__)
    monkeypatch.setattr(installation, "find_spec", lambda _name: object())
    installation._least.cache_clear()
    assert (
        absent("transformers", "torch")
        == 'torch 2.9.1+cu128 is older than 2.11: pip install --upgrade ".[verify]" in a clone of zeroplan'
    )
    assert absent("rich") == "rich 9.2 is older than 13: pip install --upgrade . in a clone of zeroplan"
    there.update(torch="2.11.0+cpu", rich="15.0")
    assert absent("torch", "rich") == ""
    installation._least.cache_clear()


def test_several_missing_packages_are_named_together():
    assert absent("no_such", "nor_such").startswith("no_such and nor_such are not installed")


def test_a_missing_gpu_is_reported_in_the_words_of_torch():
    told = {one.what: one for one in abilities(lambda: "torch finds no GPU here", lambda: "")}
    assert told["verify --backend cuda"].missing.endswith(
        ("torch finds no GPU here", 'pip install ".[verify]" in a clone of zeroplan')
    )


def test_a_package_without_metadata_counts_as_installed(monkeypatch: pytest.MonkeyPatch):
    """A module in a folder on the path has no metadata; neither has zeroplan when it runs from such a folder."""
    assert installed(Package("no-such-distribution", "json", "")) == "of unknown version"

    def unknown(_: str) -> list[str]:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "requires", unknown)
    installation._least.cache_clear()
    assert absent("numpy") == ""
    installation._least.cache_clear()


def test_text_plots_and_reports_work_without_matplotlib(run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    there = installation.find_spec
    monkeypatch.setattr(installation, "find_spec", lambda name: None if name == "matplotlib" else there(name))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "\nworks  estimate, plan, advise, compare, diagnose, report, plot --text, models, gpus\n" in run("doctor")[1]
    assert run("plot", "stages", "--model", "gpt2", "--gpus", "4", "--text")[0] == 0
    assert run("report", "--model", "gpt2", "--gpus", "4", "-o", str(tmp_path / "report.html"))[0] == 0
    code, _, err = run("plot", "stages", "--model", "gpt2", "--gpus", "4", "-o", str(tmp_path / "plot.png"))
    assert (code, "matplotlib is not installed" in err) == (4, True)
