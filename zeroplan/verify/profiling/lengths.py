"""At which shapes is a module traced? Those that polynomials are solved at, and those that are held out to check them."""

from typing import NamedTuple

from zeroplan.verify.profiling.polynomials import OF_MORE, OF_NOTHING, OF_ONE, OF_SEQUENCES, Shape

#: Lengths that no kernel rounds; the odd ones that are held out show whether one does. [tokens]
UNIT = 128
#: How many units the length has at which it is asked whether short sequences are computed as long ones.
_FAR = 64
#: How long sequences may be is looked for down to this where nothing says it. [tokens]
_LEAST_LIMIT = 16
_SEVERAL, _OTHER = (2, 3), 5
"""How many sequences polynomials are solved at, and how many are held out."""


class Shapes(NamedTuple):
    """Shapes to solve at, shapes held out, and what can be told apart by them."""

    solved: list[Shape]
    held_out: list[Shape]
    products: tuple[str, ...]


class Lengths(NamedTuple):
    """How long the sequences are that a module is traced with. [tokens]

    Those from ``least`` on, in steps of ``unit``, up to ``longest``; or of the one length ``only``, where 0 is the batch's own.
    """

    unit: int
    least: int
    longest: int
    only: int | None = None

    @property
    def solved(self) -> tuple[int, int, int]:
        """The three lengths that tell a constant, a product and a square apart."""
        first = 0 if self.least else 1
        return (self.least + first * self.unit, self.least + (first + 1) * self.unit, self.least + (first + 4) * self.unit)

    @property
    def far(self) -> int:
        """The longest that is traced."""
        return self.longest // self.unit * self.unit

    @property
    def probed(self) -> Shape:
        """The shape that shows which blocks are alike."""
        return Shape(_SEVERAL[0], self.solved[1] if self.only is None else self.only)

    def shapes(self, *, several: bool) -> Shapes:
        """Where to trace for one sequence, or for several."""
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
    """The lengths for a module that takes up to ``longest``, computing those from ``shortest`` on alike.

    The unit is a power of two, so that what kernels fill lengths up to divides it. Where there is no room for several lengths,
    it is the shortest alone.

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
    """How long sequences may be, to be tried from the longest on where nothing says it.

    >>> limits(lengths(None, None))
    [8192, 4096, 2048, 1024, 512, 256, 128, 64, 32, 16]
    """
    tried = [found.longest]
    while tried[-1] // 2 >= max(_LEAST_LIMIT, found.least):
        tried.append(tried[-1] // 2)
    return tried
