"""Programs of others' libraries, of the survey: with the same releases they take what they took."""

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
    """A program, run once for all tests."""
    program = next(one for one in survey.programs() if one.name == name)
    if missing := survey.lacking(program):
        pytest.skip(f"not installed: {', '.join(missing)}")
    with TemporaryDirectory() as folder:
        return program, survey.run(program, Path(folder))


@pytest.mark.parametrize("name", TRIED)
def test_a_program_takes_what_it_took(name: str):
    before = next(row for row in survey.kept() if row["name"] == name)
    now = survey.summary(*ran(name))
    assert "said" not in now, now
    if now["packages"] == before["packages"]:
        assert {key: now[key] for key in ("peak_bytes", "held_bytes", "reserved_bytes", "made_up")} == {
            key: before[key] for key in ("peak_bytes", "held_bytes", "reserved_bytes", "made_up")
        }
    else:  # another release may keep other tensors
        assert now["peak_bytes"] == pytest.approx(before["peak_bytes"], rel=0.3)


def test_every_program_of_the_survey_ran_or_says_why_not():
    rows = {row["name"] for row in survey.kept()}
    assert rows == {program.name for program in survey.programs()}
    assert sum("peak_bytes" in row for row in survey.kept()) >= 20


def test_wrappers_have_no_name_and_the_head_is_known_behind_them():
    """Under peft's adapter the logits are still the logits', and blocks are called as the model calls them."""
    answer = ran("Trainer, LoRA and checkpointing")[1].answer
    kinds = max(answer["steps"][-1]["phases"], key=lambda phase: phase["peak_bytes"])["kinds"]
    logits = 2 * 512 * 32000
    assert kinds["logits and loss"] == pytest.approx(3 * 4 * logits, rel=0.05)  # fp32 logits, their gradient, the loss's own
    assert not any(part["name"].startswith(("base_model", "module")) for part in answer["modules"])


def test_what_others_measured_comes_out_of_their_own_scripts_or_the_page_says_why_not():
    kept = {row["name"]: row for row in survey.kept(survey.PUBLISHED_KEPT)}
    listed = survey.programs(survey.PUBLISHED)
    assert set(kept) == {program.name for program in listed}
    for program in listed:
        assert program.figure is not None
        agrees = program.figure.printed(kept[program.name]["found"]) == program.figure.measured
        assert agrees == (not program.why), program.name


@BY_NIGHT
@pytest.mark.parametrize("program", survey.programs(survey.PUBLISHED), ids=lambda program: program.name)
def test_a_published_script_takes_what_it_took(program: survey.Program, tmp_path: Path):
    if missing := survey.lacking(program):
        pytest.skip(f"not installed: {', '.join(missing)}")
    before = next(row for row in survey.kept(survey.PUBLISHED_KEPT) if row["name"] == program.name)
    assert survey.summary(program, survey.run(program, tmp_path)) == before
