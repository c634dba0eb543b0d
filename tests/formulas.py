"""Evaluates the formula of a ledger line, so that a test can hold it against the line's number."""

from __future__ import annotations

import re
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_SYMBOL = re.compile(r"[A-Za-zΨ][A-Za-z_0-9]*")
_FUNCTIONS = {"ceil": ceil, "max": max, "min": min, "pow2": lambda value: 1 << (int(value) - 1).bit_length()}


def evaluate(formula: str, legend: Mapping[str, int]) -> Fraction:
    """Evaluate exactly; an unknown symbol is a KeyError."""
    values = {name: Fraction(legend[name]) for name in set(_SYMBOL.findall(formula)) - set(_FUNCTIONS)}
    source = formula.replace("·", "*").replace("²", "**2")
    return Fraction(eval(source, {"__builtins__": {}}, {**_FUNCTIONS, **values}))  # noqa: S307
