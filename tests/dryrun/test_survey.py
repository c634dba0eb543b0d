"""Programs of others' libraries, of the survey: with the same releases they take what they took."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dryrun import survey

pytestmark = pytest.mark.torch
TRIED = ("Trainer, FSDP2", "Trainer, LoRA and checkpointing", "accelerate, DDP")


@pytest.mark.parametrize("name", TRIED)
def test_a_program_takes_what_it_took(name: str, tmp_path: Path):
    program = next(one for one in survey.programs() if one.name == name)
    if missing := survey.lacking(program):
        pytest.skip(f"not installed: {', '.join(missing)}")
    before = next(row for row in survey.kept() if row["name"] == name)
    now = survey.summary(program, survey.run(program, tmp_path))
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
