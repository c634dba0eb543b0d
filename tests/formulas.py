"""Evaluates the formulas of ledger lines, and checks every line of an estimate against its formula."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import cache
from math import ceil
from typing import TYPE_CHECKING

from zeroplan.transformer.families.ending import BEFORE_LOSS
from zeroplan.transformer.families.traced import CUDA_EXCESS, EXCESS
from zeroplan.transformer.legend import SYMBOLS
from zeroplan.transformer.megatron import BY_THE_WAY

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import CodeType

    from zeroplan import Estimate
    from zeroplan.ledger import Line

#: The only lines without a formula. They are no tensors but differences: by how much an earlier moment of a forward exceeds the
#: later one that the other lines describe, at least zero.
WITHOUT_FORMULA = (EXCESS, CUDA_EXCESS, BEFORE_LOSS, BY_THE_WAY)

_SYMBOL = re.compile(r"[A-Za-zΨ][A-Za-z_0-9]*")
_FUNCTIONS = {"ceil": ceil, "max": max, "min": min, "pow2": lambda value: 1 << (int(value) - 1).bit_length()}


@cache
def _compiled(formula: str) -> tuple[CodeType, frozenset[str]]:
    """The compiled expression, and its symbols."""
    source = formula.replace("·", "*").replace("²", "**2")
    return compile(source, formula, "eval"), frozenset(_SYMBOL.findall(formula)) - set(_FUNCTIONS)


def evaluate(formula: str, legend: Mapping[str, int]) -> Fraction:
    """The exact value of a formula. Raises KeyError for an unknown symbol."""
    code, names = _compiled(formula)
    values = {name: Fraction(legend[name]) if "/" in formula else int(legend[name]) for name in names}
    return Fraction(eval(code, {"__builtins__": {}}, {**_FUNCTIONS, **values}))  # noqa: S307


def assert_explained(answer: Estimate) -> None:
    """Assert that every line of every moment has a source, and a formula that gives its bytes."""
    values = answer.legend
    seen: set[Line] = set()
    for name, lines in (("states", answer.states), *((moment.name, moment.lines) for moment in answer.moments)):
        for line in lines:
            if line in seen:
                continue
            seen.add(line)
            assert line.source or not line.n_bytes, (name, line)
            if line.reason not in WITHOUT_FORMULA:
                assert line.formula or not line.n_bytes, (name, line)
            if line.formula:
                assert evaluate(line.formula, values) == line.n_bytes, (name, line)


def assert_symbols_mean_one_thing(answer: Estimate) -> None:
    """Assert that no symbol has two meanings, and that none but the paper's p is in the model's legend."""
    names = [symbol.name for symbol in answer.symbols]
    assert len(set(names)) == len(names)
    assert not set(names) & (set(SYMBOLS) - {"p"})
