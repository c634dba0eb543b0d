"""How engines write the formula of a line, in the symbols of the estimate's legend.

A formula describes one job. In a grid of jobs sizes are columns. A line whose formula would contain such a size as a number has
no formula then.
"""

from collections.abc import Callable
from functools import lru_cache

from zeroplan.ledger import Kind, Line, Tag
from zeroplan.numeric import Int, for_each_value


@lru_cache(maxsize=8192)
def blocks_sum(letter: str, layers: tuple[int, ...], kinds: tuple[str, ...], outside: str = "") -> str:
    """Write the sum of ``letter`` over the blocks of each kind, plus ``outside``.

    >>> blocks_sum("S", (3, 28), ("dense", "moe")), blocks_sum("P", (31,), ("dense",), "P_root"), blocks_sum("S", (0,), ("moe",))
    ('3·S_dense + 28·S_moe', '31·P_dense + P_root', '0')
    """
    terms = [f"{count}·{letter}_{kind}" for count, kind in zip(layers, kinds, strict=True) if count]
    return " + ".join([*terms, *([outside] if outside else [])]) or "0"


@lru_cache(maxsize=8192)
def kept_by(layers: tuple[int, ...], kinds: tuple[str, ...]) -> tuple[str, Tag]:
    """Return the formula and the tag of the activations that these blocks keep for their backward.

    >>> formula, tag = kept_by((3, 28), ("dense", "moe"))
    >>> formula, tag.blocks
    ('3·S_dense + 28·S_moe', (('dense', 3), ('moe', 28)))
    """
    return blocks_sum("S", layers, kinds), Tag(blocks=tuple(zip(kinds, layers, strict=True)))


@lru_cache(maxsize=1024)
def times(width: int, symbol: str) -> str:
    """Write ``width`` bytes times a symbol.

    >>> times(4, "Ψ")
    '4·Ψ'
    """
    return f"{width}·{symbol}"


@lru_cache(maxsize=4096)
def total_formula(formulas: tuple[str, ...]) -> str:
    """Write the sum of several lines' formulas.

    >>> total_formula(("e·T·h", "4·T"))
    'e·T·h + 4·T'
    """
    return " + ".join(formulas)


def product(width: int, elements: Int) -> str:
    """Write bytes of an element times a count that no symbol represents.

    >>> product(2, 4096), product(4, 0)
    ('2·4096', '0')
    """
    return _product(width, elements) if isinstance(elements, int) else ""


@lru_cache(maxsize=4096)
def _product(width: int, elements: int) -> str:
    return f"{width}·{elements}" if elements else "0"


def sized(kind: Kind, width: int, elements: Int, reason: str, source: str, symbol: str = "") -> Line:
    """Return a line of ``width`` bytes for each of so many elements, which its formula calls by a symbol or by their number.

    >>> sized(Kind.PARAMETERS, 2, 4096, "weights", "").formula, sized(Kind.PARAMETERS, 2, 4096, "weights", "", "Ψ").formula
    ('2·4096', '2·Ψ')
    """
    formula = times(width, symbol) if symbol else product(width, elements)
    return Line(kind, width * elements, reason, formula, source)


def several(*terms: tuple[Int, Int]) -> str:
    """Write a sum of counts times sizes; an empty text if one of them is a column.

    >>> several((3, 4096), (0, 10), (1, 512)), several((0, 8))
    ('3·4096 + 1·512', '0')
    """
    for count, size in terms:
        if not (isinstance(count, int) and isinstance(size, int)):
            return ""
    return " + ".join([f"{count}·{size}" for count, size in terms if count and size]) or "0"


def unless_zero(n_bytes: Int, formula: str) -> str:
    """Return the formula of an optional line: ``0`` if its size is 0.

    >>> unless_zero(8, "8·N"), unless_zero(0, "8·N")
    ('8·N', '0')
    """
    return "0" if isinstance(n_bytes, int) and not n_bytes else formula


def for_ranks(make: Callable[[int], tuple[Line, ...]], ranks: Int) -> tuple[Line, ...]:
    """Return the lines of ``make`` for a number of ranks, or for each of a column. Their number and names do not depend on it."""
    if isinstance(ranks, int):
        return make(ranks)

    def size(index: int) -> Int:
        return for_each_value(lambda n: int(make(n)[index].n_bytes), ranks)

    return tuple(line._replace(n_bytes=size(index)) for index, line in enumerate(make(1)))
