"""Dry runs of surveyed programs give the stored figures if the libraries have the same releases."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.combined import BY_NIGHT
from tests.dryrun import survey
from tests.dryrun.running import Run

pytestmark = pytest.mark.torch
TRIED = ("Trainer, FSDP2", "Trainer, LoRA and checkpointing", "accelerate, DDP")


@cache
def ran(name: str) -> tuple[survey.Program, Run]:
    """Return a program and its dry run, which all tests share."""
    program = next(one for one in survey.programs() if one.name == name)
    if missing := survey.lacking(program):
        pytest.skip(f"not installed: {', '.join(missing)}")
    with TemporaryDirectory() as folder:
        return program, survey.run(program, Path(folder))


@pytest.mark.parametrize("name", TRIED)
def test_a_program_has_its_stored_figures(name: str):
    before = next(row for row in survey.kept() if row["name"] == name)
    now = survey.summary(*ran(name))
    assert "said" not in now, now
    if now["packages"] == before["packages"]:
        assert {key: now[key] for key in ("peak_bytes", "held_bytes", "reserved_bytes", "made_up")} == {
            key: before[key] for key in ("peak_bytes", "held_bytes", "reserved_bytes", "made_up")
        }
    else:  # another release may keep other tensors
        assert now["peak_bytes"] == pytest.approx(before["peak_bytes"], rel=0.3)


def test_every_program_of_the_survey_has_a_row():
    rows = {row["name"] for row in survey.kept()}
    assert rows == {program.name for program in survey.programs()}
    assert sum("peak_bytes" in row for row in survey.kept()) >= 20


def test_wrappers_do_not_change_the_names_of_modules():
    """With peft's adapter zeroplan still recognises the logits, and modules keep the names that they have in the model."""
    answer = ran("Trainer, LoRA and checkpointing")[1].answer
    kinds = max(answer["steps"][-1]["phases"], key=lambda phase: phase["peak_bytes"])["kinds"]
    logits = 2 * 512 * 32000
    assert kinds["logits and loss"] == pytest.approx(3 * 4 * logits, rel=0.05)  # fp32 logits, their gradient, the loss's own
    assert not any(part["name"].startswith(("base_model", "module")) for part in answer["modules"])


def test_a_dry_run_gives_a_published_figure_or_the_table_explains_the_difference():
    kept = {row["name"]: row for row in survey.kept(survey.PUBLISHED_KEPT)}
    listed = survey.programs(survey.PUBLISHED)
    assert set(kept) == {program.name for program in listed}
    for program in listed:
        assert program.figure is not None
        agrees = program.figure.printed(kept[program.name]["found"]) == program.figure.measured
        assert agrees == (not program.why), program.name


@BY_NIGHT
@pytest.mark.parametrize("program", survey.programs(survey.PUBLISHED), ids=lambda program: program.name)
def test_a_published_script_has_its_stored_figures(program: survey.Program, tmp_path: Path):
    if missing := survey.lacking(program):
        pytest.skip(f"not installed: {', '.join(missing)}")
    before = next(row for row in survey.kept(survey.PUBLISHED_KEPT) if row["name"] == program.name)
    assert survey.summary(program, survey.run(program, tmp_path)) == before
