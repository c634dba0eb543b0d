"""``zeroplan report`` writes one HTML file that loads nothing else and contains the answer of the command line."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from tests.explore.test_answers import printed

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.command import Run

JOB = ("--model", "gpt2", "--gpus", "4", "--gpu", "h100", "--seq-len", "128")


def test_a_report_loads_nothing_and_has_the_estimate(run: Run, tmp_path: Path):
    path = tmp_path / "report.html"
    assert "a browser can print as PDF" in run("report", *JOB, "--out", str(path.with_suffix(".pdf")))[2]
    assert not path.with_suffix(".pdf").exists()
    code, out, _ = run("report", *JOB, "--out", str(path))
    assert (code, out) == (0, f"wrote {path}\n")
    text = path.read_text(encoding="utf-8")
    assert not re.findall(r'(?:src|href)="(?!data:|#)', text)
    told = json.loads(re.findall(r'<script type="application/json" id="told">(.*?)</script>', text, re.DOTALL)[0])
    shown = told["answers"][str(told["own"])]["answer"]["estimate"]
    assert shown == printed("zeroplan estimate " + " ".join(JOB))


def test_no_file_is_overwritten_and_a_missing_folder_is_one_line(run: Run, tmp_path: Path):
    path = tmp_path / "report.html"
    path.write_text("mine")
    code, _, err = run("report", *JOB, "-o", str(path))
    assert (code, path.read_text()) == (2, "mine")
    assert "is there already" in err
    assert run("report", *JOB, "-o", str(path), "--force")[0] == 0
    assert path.read_text().startswith("<!doctype html>")
    code, _, err = run("report", *JOB, "-o", str(tmp_path / "nowhere" / "report.html"))
    assert (code, len(err.splitlines())) == (2, 1)


@pytest.mark.parametrize("port", ["x", "99999", "-1"])
def test_an_invalid_port_is_one_line(run: Run, port: str):
    code, out, err = run("explore", "--port", port, "--no-browser")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
