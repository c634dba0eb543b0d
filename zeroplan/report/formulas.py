"""Puts the job's numbers into a line's formula."""

import re
from collections.abc import Iterable

from zeroplan.estimator import Estimate

_SYMBOL = re.compile(r"[A-Za-zΨ][A-Za-z_0-9]*")
_WORDS = {"ceil", "max", "min", "pow2"}


def symbols_of(formulas: Iterable[str]) -> set[str]:
    """The symbols of formulas."""
    return {name for formula in formulas for name in _SYMBOL.findall(formula)} - _WORDS


def with_numbers(formula: str, answer: Estimate) -> str:
    """Return a formula with numbers instead of symbols: ``4·P/N`` becomes ``4·6738415616/8``."""
    values = answer.legend

    def number(match: re.Match[str]) -> str:
        name = match[0]
        return name if name in _WORDS or name not in values else f"{int(values[name])}"

    return _SYMBOL.sub(number, formula)
