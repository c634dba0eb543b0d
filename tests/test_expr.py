"""Sizes as expressions: the printed formula gives the value, for a number and for a column."""

from __future__ import annotations

import numpy as np
import pytest

from tests.formulas import evaluate
from zeroplan.expr import NOTHING, Size, at_least, at_most, ceil, symbols
from zeroplan.numeric import Int

VALUES = {"T": 10, "h": 3, "f": 4, "s": 5, "b": 2, "a": 6, "e": 2}
e, T, h, f, s, b, a = symbols("e T h f s b a")


@pytest.mark.parametrize(
    ("size", "text", "number"),
    [
        (T, "T", 10),
        (2 * T * h, "2·T·h", 60),
        (T * (h + f), "T·(h+f)", 70),
        (2 * T * (h + 2 * f) + 8 * T, "2·T·(h+2·f) + 8·T", 300),
        (4 * a * T * s - 4 * T * a, "4·a·T·s - 4·T·a", 960),
        (b * s * s, "b·s²", 50),
        (1 - T * (h - f), "1 - T·(h-f)", 11),
        (T - (h - f), "T - h + f", 11),
        (16 * ceil(s, 16) - 1, "16·ceil(s/16) - 1", 15),
        (T * at_most(1, b - 1), "T·min(1, b-1)", 10),
        (T * at_least(0, 2 - b), "T·max(0, 2-b)", 0),
        (at_most(1, 16 * ceil(s, 16) - s), "min(1, 16·ceil(s/16)-s)", 1),
        (ceil(h * f, 64) * 4, "ceil(h·f/64)·4", 4),
        ((h + f) * (h + f), "(h+f)·(h+f)", 49),
        (NOTHING + T, "T", 10),
    ],
)
def test_prints_the_formula_of_its_number(size: Size, text: str, number: int) -> None:
    assert str(size) == text
    assert size.value(VALUES) == number
    assert evaluate(text, VALUES) == number


def test_of_columns_there_is_a_column() -> None:
    column: dict[str, Int] = {**VALUES, "s": np.array([5, 16, 17]), "b": np.array([1, 2, 3])}
    size = T * ceil(s, 16) * at_most(1, b - 1) + h
    assert np.array_equal(size.value(column), [3, 13, 23])


def test_symbols_are_replaced_but_in_functions() -> None:
    (share,) = symbols("h/p")
    size = (T * (h + f) * h + ceil(h, 2)).replacing({"h": share, "f": 4})
    assert str(size) == "T·(h/p+4)·h/p + ceil(h/2)"


def test_says_which_symbols_it_has() -> None:
    assert (T * (h + f)).has(f)
    assert not (T * (h + f)).has(b)


def test_multiplied_out_it_is_the_same_however_it_was_written() -> None:
    assert (
        (e * T * (h + f)).multiplied_out({"e": 2})
        == (f * T * 2 + h * 2 * T).multiplied_out({})
        == {("T", "h"): 2, ("T", "f"): 2}
    )


def test_equal_where_written_alike() -> None:
    assert T * h == symbols("T")[0] * h
    assert hash(T * h) == hash(symbols("T")[0] * h)
    assert T * h != h * T
    assert T != 10


def test_a_symbol_without_a_number_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="z"):
        (T * symbols("z")[0]).value(VALUES)
