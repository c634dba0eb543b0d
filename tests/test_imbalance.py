"""Routers that send more tokens to some experts: how ``--imbalance`` reads loads, and how much memory the fullest rank needs.

``tests/verify/training/test_experts_simulated.py`` compares jobs of ``tests/expert_jobs.py`` with the engine's own code.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from zeroplan.errors import SpecError
from zeroplan.estimator import estimate
from zeroplan.resolve import Request, resolve
from zeroplan.resolve.imbalance import imbalance_of

MIXTRAL = {"model": "mixtral-8x7b", "gpus": 64, "expert_parallel": 4, "recompute": "full"}


def _file(folder: Path, text: str) -> str:
    path = folder / "loads.txt"
    path.write_text(text)
    return str(path)


def test_measured_loads_are_those_of_the_fullest_rank_in_the_worst_layer(tmp_path: Path) -> None:
    loads = _file(tmp_path, "1 1 1 1 1 1 1 1\n5 3 0 0 0 0 4 4\n")  # two neighbouring experts share a rank: 8, 0, 0 and 8 of 16
    ratio, note = imbalance_of(loads, experts=8, ranks=4)
    assert ratio == 2
    assert "up to 2.50 times" in note  # five of two on average
    assert "drop up to 37.5%" in note  # 2.5, 0.5, 1.5 and 1.5 of 16 are beyond 1.25 times the two of the mean
    assert imbalance_of(_file(tmp_path, "3\n1\n1\n1\n"), experts=4, ranks=2)[0] == pytest.approx(4 / 3)


def test_drawn_loads_are_even_without_a_spread_and_worse_with_more() -> None:
    ratios = [imbalance_of(f"lognormal({spread})", experts=64, ranks=8)[0] for spread in (0, 0.5, 1.5)]
    assert ratios[0] == pytest.approx(1)
    assert ratios == sorted(ratios)
    assert ratios == [imbalance_of(f"lognormal({spread})", experts=64, ranks=8)[0] for spread in (0, 0.5, 1.5)]


@pytest.mark.parametrize("more", [{}, {"engine": "megatron", "stage": 1}, {"pipeline_parallel": 2, "grad_accum": 2}])
def test_a_fuller_rank_takes_more_and_none_takes_less(more: dict[str, object]) -> None:
    even, same, fuller, fullest = (
        estimate(resolve(Request(**{**MIXTRAL, **more, **said})).job)
        for said in ({}, {"imbalance": "1"}, {"imbalance": "1.5"}, {"imbalance": 4.0})
    )
    assert even.peak_bytes == same.peak_bytes < fuller.peak_bytes < fullest.peak_bytes
    assert even.states_by_kind == fullest.states_by_kind


def test_the_job_keeps_the_loads_as_a_number_and_says_what_it_assumes(tmp_path: Path) -> None:
    resolved = resolve(Request(**MIXTRAL, imbalance=_file(tmp_path, "2 2 1 1 1 1 0 0")))
    assert resolved.job.recipe.imbalance == 2
    assert any("the fullest rank gets 2.00 times the mean" in note for note in resolved.notes)
    assert any("2 times the even share" in note for note in estimate(resolved.job).notes)
    other = replace(resolved.job, recipe=replace(resolved.job.recipe, engine="megatron", zero_stage=1, recompute="none"))
    assert any("read from Megatron-Core's dispatcher, not run" in note for note in estimate(other).notes)


@pytest.mark.parametrize(("said", "why"), [
    ("0.5", "has 1 to 4 times the mean"), ("5", "has 1 to 4 times the mean"), ("nan", "has 1 to 4 times"),
    ("lognormal(9)", "a SPREAD of 0 to 5"),
    ("no-such-file", "neither a number from 1 on"), (".", "is not a file"),
])  # fmt: skip
def test_what_is_no_imbalance_is_refused(said: str, why: str) -> None:
    with pytest.raises(SpecError, match=why):
        resolve(Request(**MIXTRAL, imbalance=said))


@pytest.mark.parametrize(("text", "why"), [
    ("1 2 3\n", "the model's 8 experts"), ("1 2 3 4 5 6 7 -8\n", "loads are 0 or more"),
    ("0 0 0 0 0 0 0 0\n", "loads are 0 or more"),
    ("a b c d e f g h\n", "neither a number"), ("", "8 experts"), ("1 2 3 4 5 6 7 8\n1 2\n", "neither a number"),
])  # fmt: skip
def test_loads_of_other_experts_are_refused(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(SpecError, match=why):
        resolve(Request(**MIXTRAL, imbalance=_file(tmp_path, text)))


def test_experts_that_every_rank_has_are_not_uneven() -> None:
    with pytest.raises(SpecError, match="needs experts on several ranks"):
        resolve(Request(**{**MIXTRAL, "expert_parallel": 1, "imbalance": "1.5"}))
    with pytest.raises(SpecError, match="needs experts on several ranks"):
        resolve(Request(model="llama-3.1-8b", gpus=4, expert_parallel=2, imbalance="1.5"))
