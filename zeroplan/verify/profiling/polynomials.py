"""Exact polynomials through counts at a few shapes, checked at shapes that were held out. Needs no torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from fractions import Fraction
from typing import NamedTuple

from zeroplan.spec.profile import Amount


class Shape(NamedTuple):
    """The number of sequences in a batch, and the tokens of each."""

    sequences: int
    length: int


#: The terms of a polynomial, named as in :class:`~zeroplan.spec.profile.Amount`.
_PRODUCTS: dict[str, Callable[[int, int], int]] = {
    "constant": lambda *_: 1,
    "micro_batch": lambda b, _: b,
    "seq_len": lambda _, s: s,
    "tokens": lambda b, s: b * s,
    "seq_len_squared": lambda _, s: s * s,
    "tokens_seq_len": lambda b, s: b * s * s,
}  # fmt: skip
#: The terms that one sequence, several sequences, several of a fixed length, and one of a fixed length can distinguish.
OF_ONE = ("constant", "tokens", "tokens_seq_len")
OF_MORE = tuple(_PRODUCTS)
OF_SEQUENCES = ("constant", "micro_batch")
OF_NOTHING = ("constant",)


class Fit:
    """Solves for polynomials through numbers at fixed shapes; the matrix is inverted once."""

    def __init__(self, shapes: Sequence[Shape], products: Sequence[str]) -> None:
        self._products = tuple(products)
        self._shapes = tuple(shapes)
        self._solving = _inverse([[Fraction(_PRODUCTS[name](*shape)) for name in products] for shape in shapes])

    def amount(self, counted: Sequence[int]) -> Amount | None:
        """The polynomial through as many numbers as there are terms; None if it has fractions."""
        solved = [sum(a * n for a, n in zip(row, counted, strict=True)) for row in self._solving]
        if any(Fraction(one).denominator != 1 for one in solved):
            return None
        return Amount(**{name: int(one) for name, one in zip(self._products, solved, strict=True)})


MULTIPLES = (8, 16, 32, 64, 128)
"""Lengths to which kernels are known to pad; the determining lengths are multiples of all of them."""


def padded(found: Amount, counted: Mapping[Shape, int], multiples: Sequence[int] = MULTIPLES) -> tuple[Amount, int] | None:
    """The polynomial with padding to one of ``multiples`` that explains every count, and that multiple; None without one.

    >>> padded(Amount(tokens=2), {Shape(2, 5): 20 + 6 * 4, Shape(1, 9): 18 + 7 * 4})
    (Amount(constant=0, micro_batch=0, seq_len=0, tokens=2, seq_len_squared=0, tokens_seq_len=0, padding=4), 8)
    """
    for multiple in multiples:
        shape = next((one for one in counted if one.length % multiple), None)
        if shape is None:
            continue
        each, rest = divmod(counted[shape] - value(found, shape), shape.sequences * (-shape.length % multiple))
        amount = replace(found, padding=each)
        if not rest and all(value(amount, one, multiple) == n_bytes for one, n_bytes in counted.items()):
            return amount, multiple
    return None


def value(amount: Amount, shape: Shape, multiple: int = 1) -> int:
    """The value of a polynomial at a shape, with sequences padded to a multiple.

    >>> value(Amount(constant=3, tokens=2), Shape(2, 5))
    23
    """
    padding = amount.padding * shape.sequences * (-shape.length % multiple)
    amounts: list[int] = [getattr(amount, name) for name in _PRODUCTS]
    return padding + sum(each * product(*shape) for each, product in zip(amounts, _PRODUCTS.values(), strict=True))


def _inverse(matrix: list[list[Fraction]]) -> list[list[Fraction]]:
    """The inverse of a matrix, by Gauss-Jordan elimination in fractions."""
    size = len(matrix)
    rows = [row + [Fraction(int(at == other)) for other in range(size)] for at, row in enumerate(matrix)]
    for at in range(size):
        pivot = next(other for other in range(at, size) if rows[other][at])
        rows[at], rows[pivot] = rows[pivot], rows[at]
        rows[at] = [one / rows[at][at] for one in rows[at]]
        for other in range(size):
            if other != at and (times := rows[other][at]):
                rows[other] = [a - times * b for a, b in zip(rows[other], rows[at], strict=True)]
    return [row[size:] for row in rows]


#: For each term, the terms that are at least as large with one sequence and one token or more.
_LARGER = {
    "constant": ("micro_batch", "seq_len", "tokens", "seq_len_squared", "tokens_seq_len"),
    "micro_batch": ("tokens", "tokens_seq_len"),
    "seq_len": ("tokens", "seq_len_squared", "tokens_seq_len"),
    "tokens": ("tokens_seq_len",),
    "seq_len_squared": ("tokens_seq_len",),
    "tokens_seq_len": (),
}  # fmt: skip


def covers(first: Amount, second: Amount) -> bool:
    """Whether ``first`` is at least ``second`` for every batch; a surplus in a larger term can make up for a smaller one."""
    if first.padding < second.padding:
        return False
    surplus = {name: getattr(first, name) - getattr(second, name) for name in _PRODUCTS}
    for name, larger in _LARGER.items():
        lacking = -surplus[name]
        for other in larger if lacking > 0 else ():
            paid = max(0, min(lacking, surplus[other]))
            surplus[other] -= paid
            lacking -= paid
        if lacking > 0:
            return False
    return True


def total(*amounts: Amount) -> Amount:
    """The sum of polynomials."""
    return Amount(**{field.name: sum(getattr(one, field.name) for one in amounts) for field in fields(Amount)})


def less(first: Amount, second: Amount) -> Amount:
    """The difference of two polynomials."""
    return Amount(**{field.name: getattr(first, field.name) - getattr(second, field.name) for field in fields(Amount)})
