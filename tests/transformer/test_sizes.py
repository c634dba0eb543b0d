"""Formulas as data: what they say and what they come to."""

from __future__ import annotations

import pytest

from tests.formulas import evaluate
from zeroplan.transformer.families.sizes import worked_out

VALUES = {"T": 10, "h": 3, "f": 4, "s": 5, "b": 2, "a": 6}


@pytest.mark.parametrize(
    ("formula", "n_bytes"),
    [("T", 10), ("2·T·h", 60), ("T·(h+f)", 70), ("2·T·(h+2·f) + 8·T", 300), ("4·a·T·s - 4·T·a", 960), ("b·s²", 50)],
)
def test_gives_the_number_that_the_reader_of_the_formula_gets(formula: str, n_bytes: int) -> None:
    assert worked_out(formula, VALUES) == n_bytes
    assert evaluate(formula, VALUES) == n_bytes


def test_a_factor_can_be_a_function() -> None:
    assert worked_out("2·min(1, b-1)·T", {**VALUES, "min(1, b-1)": 1}) == 20
