"""Sizes as expressions in symbols. An expression prints its formula, has a value for any batch, and compares as data.

Code writes a size once, as arithmetic on symbols. Its text is the formula that ``--explain`` prints:


>>> e, T, s, h, f, b = symbols("e T s h f b")
>>> size = e * T * (h + f) + 8 * T
>>> str(size)
'e·T·(h+f) + 8·T'
>>> size.value({"e": 2, "T": 10, "h": 3, "f": 4})
220
>>> print(16 * b * s * ceil(s, 16) - s * s * at_most(1, b - 1))
16·b·s·ceil(s/16) - s²·min(1, b-1)
"""

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple, TypeAlias, Union

from zeroplan.numeric import Int, ceil_div, maximum, minimum

Values: TypeAlias = Mapping[str, Int]
"""The value of every symbol: a number, or a column with one number per layout."""
Monomial: TypeAlias = tuple[str, ...]
"""A product of symbols and of functions of them, in alphabetical order."""


class Symbol(NamedTuple):
    """A symbol of the legend, such as ``T``."""

    text: str


class Call(NamedTuple):
    """A function of sizes, such as ``ceil``: its text, and how to compute it from the symbols' values."""

    text: str
    value: Callable[[Values], Int]


Factor: TypeAlias = Union[int, Symbol, Call, "Size"]
Term: TypeAlias = tuple[Factor, ...]


class Size:
    """A sum of products, in the order in which it was written. Two sizes are equal if their texts are.

    Immutable. ``+``, ``-`` and ``*`` accept sizes and ints.
    """

    __slots__ = ("_products", "terms", "text")

    def __init__(self, terms: tuple[Term, ...]) -> None:
        """``terms``: the products. One that begins with -1 is subtracted."""
        self.terms = terms
        self.text = _text(terms)
        self._products: tuple[_Product, ...] | None = None

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Size({self.text})"

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Size) and self.text == other.text

    def __add__(self, other: "Size | int") -> "Size":
        """Append the other's products."""
        return Size((*self.terms, *_terms(other)))

    def __radd__(self, other: int) -> "Size":
        """Prepend a number."""
        return Size(((other,), *self.terms))

    def __sub__(self, other: "Size | int") -> "Size":
        """Append the other's products, negated."""
        return Size((*self.terms, *map(_negative, _terms(other))))

    def __rsub__(self, other: int) -> "Size":
        """Subtract this size from a number."""
        return Size(((other,), *map(_negative, self.terms)))

    def __mul__(self, other: "Size | int") -> "Size":
        """Append the other's factors; a sum becomes one factor."""
        return Size(((*_factors(self), *_factors(other)),))

    def __rmul__(self, other: int) -> "Size":
        """Prepend a number as a factor."""
        return Size(((other, *_factors(self)),))

    def value(self, values: Values) -> Int:
        """Return the number, or a column where a symbol's value is one.

        Raises KeyError for a symbol without a value.
        """
        if self._products is None:
            self._products = tuple(map(_product_of, self.terms))
        total: Int = 0
        for product, names, others in self._products:
            for name in names:
                product = product * values[name]  # noqa: PLW2901  hundreds of sizes per estimate
            for other in others:
                product = product * other.value(values)  # noqa: PLW2901
            total = total + product
        return total

    def has(self, symbol: "Size") -> bool:
        """Whether a symbol is a factor of this size; arguments of functions are not searched."""
        if symbol.text not in self.text:  # nearly always
            return False
        ((name,),) = symbol.terms
        factors = (factor for term in self.terms for factor in term)
        return any(factor.has(symbol) if isinstance(factor, Size) else factor == name for factor in factors)

    def replacing(self, others: "Mapping[str, Size | int]") -> "Size":
        """Return the size with symbols replaced by other sizes; arguments of functions stay as they are."""
        return Size(tuple(tuple(part for factor in term for part in _replaced(factor, others)) for term in self.terms))

    def multiplied_out(self, widths: Mapping[str, int]) -> Mapping[Monomial, int]:
        """Return the coefficient of each product of symbols; symbols in ``widths`` are numbers.

        >>> e, T, h = symbols("e T h")
        >>> dict((e * T * (h + 1)).multiplied_out({"e": 2}))
        {('T', 'h'): 2, ('T',): 2}
        """
        return _polynomial(self, widths)


class _Product(NamedTuple):
    """A product, its factors by their type."""

    number: Int
    symbols: tuple[str, ...]
    others: tuple["Call | Size", ...]


def _product_of(term: Term) -> _Product:
    number = math.prod([factor for factor in term if isinstance(factor, int)])
    symbols = tuple([factor.text for factor in term if isinstance(factor, Symbol)])
    return _Product(number, symbols, tuple([factor for factor in term if isinstance(factor, (Call, Size))]))


def _terms(size: Size | int) -> tuple[Term, ...]:
    return ((size,),) if isinstance(size, int) else size.terms


def _negative(term: Term) -> Term:
    return term[1:] if len(term) > 1 and term[0] == -1 else (-1, *term)


def _factors(size: Size | int) -> Term:
    if isinstance(size, int):
        return (size,)
    return size.terms[0] if len(size.terms) == 1 else (size,)


def _replaced(factor: Factor, others: "Mapping[str, Size | int]") -> Term:
    if isinstance(factor, Size):
        return (factor.replacing(others),)
    other = others.get(factor.text) if isinstance(factor, Symbol) else None
    return (factor,) if other is None else _factors(other)


# --- the text ----------------------------------------------------------------------------------------------------------


def _text(terms: tuple[Term, ...], *, tight: bool = False) -> str:
    """Return the formula; with ``tight`` without spaces, for use in brackets."""
    minus, plus = ("-", "+") if tight else (" - ", " + ")
    made = ""
    for term in terms:
        negative = len(term) > 1 and term[0] == -1
        sign = (minus if negative else plus) if made else ("-" if negative else "")
        made += sign + "·".join(_powers(term[1:] if negative else term))
    return made


def _powers(term: Term) -> list[str]:
    """Return the text of each factor; two equal neighbours become a square."""
    made: list[str] = []
    for factor in term:
        text = _factor_text(factor)
        if made and made[-1] == text and isinstance(factor, Symbol):
            made[-1] = f"{text}²"
        else:
            made.append(text)
    return made


def _factor_text(factor: Factor) -> str:
    if isinstance(factor, int):
        return str(factor)
    if isinstance(factor, Size):
        return f"({_text(factor.terms, tight=True)})" if factor.terms else "0"
    return factor.text


#: The empty sum, 0.
NOTHING = Size(())


# --- symbols and functions ---------------------------------------------------------------------------------------------


def symbols(names: str) -> tuple[Size, ...]:
    """Return a size for each name in a string of names with spaces."""
    return tuple(Size(((Symbol(name),),)) for name in names.split())


def ceil(size: Size, divisor: int) -> Size:
    """Return the smallest whole number not below ``size / divisor``."""
    return call(f"ceil({_tight(size)}/{divisor})", lambda values: ceil_div(size.value(values), divisor))


def at_most(limit: int, size: Size) -> Size:
    """Return the size, at most ``limit``."""
    return call(f"min({limit}, {_tight(size)})", lambda values: minimum(limit, size.value(values)))


def at_least(limit: int, size: Size) -> Size:
    """Return the size, at least ``limit``."""
    return call(f"max({limit}, {_tight(size)})", lambda values: maximum(limit, size.value(values)))


def call(text: str, work_out: Callable[[Values], Int]) -> Size:
    """Return a size that ``work_out`` computes from the values of symbols, with its text."""
    return Size(((Call(text, work_out),),))


def _tight(size: Size) -> str:
    return _text(size.terms, tight=True)


# --- as a polynomial -----------------------------------------------------------------------------------------------------


def _polynomial(factor: Factor, widths: Mapping[str, int]) -> dict[Monomial, int]:
    if isinstance(factor, int):
        return {(): factor}
    if not isinstance(factor, Size):
        return {(): widths[factor.text]} if factor.text in widths else {(factor.text,): 1}
    polynomial: dict[Monomial, int] = {}
    for term in factor.terms:
        product: dict[Monomial, int] = {(): 1}
        for each in term:
            product = _product(product, _polynomial(each, widths))
        for monomial, times in product.items():
            polynomial[monomial] = polynomial.get(monomial, 0) + times
    return polynomial


def _product(first: dict[Monomial, int], second: dict[Monomial, int]) -> dict[Monomial, int]:
    return {_joined(one, other): a * b for one, a in first.items() for other, b in second.items()}


@lru_cache(maxsize=4096)
def _joined(first: Monomial, second: Monomial) -> Monomial:
    return tuple(sorted(first + second))
