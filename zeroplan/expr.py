"""Sizes as expressions: whole numbers in symbols, which print their formula, have a value for any batch, and compare as data.

A size is written as arithmetic on symbols, once. Its text is the formula that ``--explain`` prints:

>>> e, T, s, h, f, b = symbols("e T s h f b")
>>> size = e * T * (h + f) + 8 * T
>>> str(size)
'e·T·(h+f) + 8·T'
>>> size.value({"e": 2, "T": 10, "h": 3, "f": 4})
220
>>> print(16 * b * s * ceil(s, 16) - s * s * at_most(1, b - 1))
16·b·s·ceil(s/16) - s²·min(1, b-1)
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple, TypeAlias, Union

from zeroplan.numeric import Int, ceil_div, maximum, minimum

Values: TypeAlias = Mapping[str, Int]
"""The number of every symbol, a column where it differs from layout to layout."""
Monomial: TypeAlias = tuple[str, ...]
"""A product of symbols and of functions of them, in alphabetical order."""


class Symbol(NamedTuple):
    """The name of a number, as the legend has it."""

    text: str

    def value(self, values: Values) -> Int:
        """Look the number up."""
        return values[self.text]


class Call(NamedTuple):
    """A function of sizes: its text, and how it is worked out."""

    text: str
    value: Callable[[Values], Int]


Factor: TypeAlias = Union[int, Symbol, Call, "Size"]
Term: TypeAlias = tuple[Factor, ...]


class Size:
    """A sum of products, in the order in which it was written. Equal where the text is.

    Immutable. ``+``, ``-`` and ``*`` take sizes and ints.
    """

    __slots__ = ("terms", "text")

    def __init__(self, terms: tuple[Term, ...]) -> None:
        """Take the products; a difference is a product that begins with -1."""
        self.terms = terms
        self.text = _text(terms)

    def __str__(self) -> str:
        """The formula."""
        return self.text

    def __repr__(self) -> str:
        """The formula, and what it is."""
        return f"Size({self.text})"

    def __hash__(self) -> int:
        """Of the text."""
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        """Whether both are written alike."""
        return isinstance(other, Size) and self.text == other.text

    def __add__(self, other: "Size | int") -> "Size":
        """Put the other's products behind."""
        return Size((*self.terms, *_terms(other)))

    def __radd__(self, other: int) -> "Size":
        """Put the number in front."""
        return Size(((other,), *self.terms))

    def __sub__(self, other: "Size | int") -> "Size":
        """Put the other's products behind, each taken away."""
        return Size((*self.terms, *map(_negative, _terms(other))))

    def __rsub__(self, other: int) -> "Size":
        """Take this away from a number."""
        return Size(((other,), *map(_negative, self.terms)))

    def __mul__(self, other: "Size | int") -> "Size":
        """Put the other's factors behind; a sum becomes one factor."""
        return Size(((*_factors(self), *_factors(other)),))

    def __rmul__(self, other: int) -> "Size":
        """Put the number in front."""
        return Size(((other, *_factors(self)),))

    def value(self, values: Values) -> Int:
        """The number that this stands for; a column where a symbol's is one.

        Raises KeyError for a symbol without a number.
        """
        total: Int = 0
        for term in self.terms:
            product: Int = 1
            for factor in term:
                product = product * (factor if isinstance(factor, int) else factor.value(values))
            total = total + product
        return total

    def has(self, symbol: "Size") -> bool:
        """Whether a symbol is a factor anywhere in this, arguments of functions left out."""
        ((name,),) = symbol.terms
        factors = (factor for term in self.terms for factor in term)
        return any(factor.has(symbol) if isinstance(factor, Size) else factor == name for factor in factors)

    def replacing(self, others: "Mapping[str, Size | int]") -> "Size":
        """The same with other sizes in the place of symbols, by their names; arguments of functions stay."""
        return Size(tuple(tuple(part for factor in term for part in _replaced(factor, others)) for term in self.terms))

    def multiplied_out(self, widths: Mapping[str, int]) -> Mapping[Monomial, int]:
        """A number for each product of symbols; symbols in ``widths`` are numbers.

        >>> e, T, h = symbols("e T h")
        >>> dict((e * T * (h + 1)).multiplied_out({"e": 2}))
        {('T', 'h'): 2, ('T',): 2}
        """
        return _polynomial(self, widths)


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
    """The formula; ``tight`` where it stands in brackets."""
    minus, plus = ("-", "+") if tight else (" - ", " + ")
    made = ""
    for term in terms:
        negative = len(term) > 1 and term[0] == -1
        sign = (minus if negative else plus) if made else ("-" if negative else "")
        made += sign + "·".join(_powers(term[1:] if negative else term))
    return made


def _powers(term: Term) -> list[str]:
    """The text of each factor; two equal ones that stand together are a square."""
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
    return f"({_text(factor.terms, tight=True)})" if isinstance(factor, Size) else factor.text


#: No size at all, where there is one in general.
NOTHING = Size(())


# --- symbols and functions ---------------------------------------------------------------------------------------------


def symbols(names: str) -> tuple[Size, ...]:
    """A size for each of some names, which spaces part."""
    return tuple(Size(((Symbol(name),),)) for name in names.split())


def ceil(size: Size, divisor: int) -> Size:
    """The smallest whole number that is not below ``size / divisor``."""
    return call(f"ceil({_tight(size)}/{divisor})", lambda values: ceil_div(size.value(values), divisor))


def at_most(limit: int, size: Size) -> Size:
    """The size, or the limit where that is less."""
    return call(f"min({limit}, {_tight(size)})", lambda values: minimum(limit, size.value(values)))


def at_least(limit: int, size: Size) -> Size:
    """The size, or the limit where that is more."""
    return call(f"max({limit}, {_tight(size)})", lambda values: maximum(limit, size.value(values)))


def call(text: str, work_out: Callable[[Values], Int]) -> Size:
    """What a function makes of the values of symbols, with the text that stands for it."""
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
