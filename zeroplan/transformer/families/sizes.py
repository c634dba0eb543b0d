"""The formulas of lines as data: read once, then worked out for any batch.

A formula is a sum of products in the legend's symbols: ``e·T·(q+k+v) + 8·T``. Factors that are no plain product, such as
``ceil(s/32)``, are names of their own, and :func:`quantities` gives their value.
"""

from collections.abc import Mapping
from functools import cache

from zeroplan.numeric import Int, ceil_div, maximum, minimum
from zeroplan.spec.model import MoeSpec
from zeroplan.transformer.families.widths import Widths, symbols

Factor = int | str | tuple[tuple["Factor", ...], ...]
Terms = tuple[tuple[Factor, ...], ...]


def quantities(x: Widths, intermediate_size: int, moe: MoeSpec | None = None) -> dict[str, Int]:
    """Return what a formula's symbols and the functions in it stand for."""
    return {
        **symbols(x, intermediate_size, moe),
        "x": moe.num_experts // x.expert_ranks if moe else 0,
        "T/2": x.tokens // 2,
        "q/4": x.heads * (x.head_dim // 4),
        "k/4": x.key // x.head_dim * (x.head_dim // 4),
        "k/d": x.key // x.head_dim,
        "ceil(s/128)": ceil_div(x.seq_len, 128),
        "ceil(s/32)": ceil_div(x.seq_len, 32),
        "ceil(s/16)": ceil_div(x.seq_len, 16),
        "ceil(d/32)": ceil_div(x.head_dim, 32),
        "min(1, 16·ceil(s/16)-s)": minimum(1, -x.seq_len % 16),
        "min(1, b-1)": minimum(1, x.micro_batch - 1),
        "max(0, 2-b)": maximum(0, 2 - x.micro_batch),
    }


def worked_out(formula: str, values: Mapping[str, Int]) -> Int:
    """Give the number a formula stands for.

    >>> worked_out("2·T·(h+f) + 8·T", {"T": 10, "h": 3, "f": 4})
    220
    """
    return _sum(terms(formula), values)


@cache
def terms(formula: str) -> Terms:
    """Read a formula: a sum or difference of products of numbers, names and sums in brackets."""
    signed = formula.replace(" - ", " + -1·").replace("s²", "s·s")
    return tuple(tuple(_factor(factor) for factor in _split(term, "·")) for term in _split(signed, "+"))


Monomial = tuple[str, ...]


@cache
def expanded(formula: str, element: int, residual: int) -> Mapping[Monomial, int]:
    """Multiply a formula out, with so many bytes for ``e`` and ``r``."""
    return _polynomial(terms(formula), {"e": element, "r": residual})


def _polynomial(factor: Factor, widths: Mapping[str, int]) -> dict[Monomial, int]:
    if isinstance(factor, int):
        return {(): factor}
    if isinstance(factor, str):
        return {(): widths[factor]} if factor in widths else {(factor,): 1}
    polynomial: dict[Monomial, int] = {}
    for term in factor:
        product: dict[Monomial, int] = {(): 1}
        for each in term:
            product = _product(product, _polynomial(each, widths))
        for monomial, times in product.items():
            polynomial[monomial] = polynomial.get(monomial, 0) + times
    return polynomial


def _product(first: dict[Monomial, int], second: dict[Monomial, int]) -> dict[Monomial, int]:
    return {tuple(sorted(one + other)): a * b for one, a in first.items() for other, b in second.items()}


def _sum(every: Terms, values: Mapping[str, Int]) -> Int:
    total: Int = 0
    for term in every:
        product: Int = 1
        for factor in term:
            if isinstance(factor, str):
                product = product * values[factor]
            else:
                product = product * (factor if isinstance(factor, int) else _sum(factor, values))
        total = total + product
    return total


def _factor(text: str) -> Factor:
    if text.lstrip("-").isdecimal():
        return int(text)
    return terms(text[1:-1]) if text.startswith("(") else text


def _split(text: str, sign: str) -> list[str]:
    """Split at a sign outside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == sign and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]
