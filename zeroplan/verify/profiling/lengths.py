"""At which batch shapes is a module traced? Some determine the polynomials, others are held out to check them."""

from typing import NamedTuple

from zeroplan.verify.profiling.polynomials import OF_MORE, OF_NOTHING, OF_ONE, OF_SEQUENCES, Shape

#: Lengths that kernels do not pad; the odd held-out ones show whether a kernel pads. [tokens]
UNIT = 128
#: The longest traced length, in units: it shows whether short sequences run the same operators as long ones.
_FAR = 64
#: Longest sequence tried when no configuration states the maximum. [tokens]
_LEAST_LIMIT = 16
_SEVERAL, _OTHER = (2, 3), 5
"""Numbers of sequences that determine polynomials, and the one held out."""


class Shapes(NamedTuple):
    """Shapes that determine polynomials, held-out shapes, and the products they distinguish."""

    solved: list[Shape]
    held_out: list[Shape]
    products: tuple[str, ...]


class Lengths(NamedTuple):
    """The sequence lengths with which a module is traced. [tokens]

    From ``least`` in steps of ``unit`` up to ``longest``; or the single length ``only``, where 0 means the batch's own.
    """

    unit: int
    least: int
    longest: int
    only: int | None = None

    @property
    def solved(self) -> tuple[int, int, int]:
        """The three lengths that distinguish a constant, a linear and a squared term."""
        first = 0 if self.least else 1
        return (self.least + first * self.unit, self.least + (first + 1) * self.unit, self.least + (first + 4) * self.unit)

    @property
    def far(self) -> int:
        """The longest traced length."""
        return self.longest // self.unit * self.unit

    @property
    def probed(self) -> Shape:
        """The shape that shows which blocks are alike."""
        return Shape(_SEVERAL[0], self.solved[1] if self.only is None else self.only)

    def shapes(self, *, several: bool) -> Shapes:
        """The shapes to trace for one sequence, or for several."""
        counts, other = (_SEVERAL, _OTHER) if several else ((1,), 1)
        if self.only is not None:
            held_out = [Shape(other, self.only)] if several else []
            return Shapes([Shape(count, self.only) for count in counts], held_out, OF_SEQUENCES if several else OF_NOTHING)
        unit = self.unit
        odd = (self.least + unit + unit // 3, self.least + 2 * unit + unit // 2 + unit // 8 + 1)
        held_out = [Shape(counts[-1], self.far), *(Shape(other, length) for length in odd)]
        return Shapes(
            [Shape(count, length) for count in counts for length in self.solved], held_out, OF_MORE if several else OF_ONE
        )


def lengths(longest: int | None, shortest: int | None) -> Lengths:
    """The lengths for a module with sequences up to ``longest`` that runs the same operators from ``shortest`` on.

    The unit is a power of two, so that the lengths to which kernels pad are multiples of it. Without room for several lengths, only
    the shortest is traced.

    >>> lengths(None, None).solved, lengths(512, None).solved, lengths(512, 300), lengths(512, 510).only
    ((128, 256, 640), (64, 128, 320), Lengths(unit=32, least=320, longest=512, only=None), 510)
    """
    low, steps = (0, 5) if shortest is None else (shortest, 5)
    unit = UNIT
    while longest is not None and unit > 1 and -(-low // unit) * unit + steps * unit > longest:
        unit //= 2
    least = -(-low // unit) * unit
    if longest is not None and least + steps * unit > longest:
        return Lengths(unit, least, longest, only=shortest or longest)
    far = least + _FAR * UNIT
    return Lengths(unit, least, far if longest is None else min(longest, far))


def limits(found: Lengths) -> list[int]:
    """Maximum lengths to try, the longest first, if no configuration states the maximum.

    >>> limits(lengths(None, None))
    [8192, 4096, 2048, 1024, 512, 256, 128, 64, 32, 16]
    """
    tried = [found.longest]
    while tried[-1] // 2 >= max(_LEAST_LIMIT, found.least):
        tried.append(tried[-1] // 2)
    return tried
