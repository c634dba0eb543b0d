"""Converts units: bytes to GB and GiB, and a user's text such as ``7b`` or ``80GiB`` to an integer. No other file does.

A unit is a plain number: multiply it in, divide it out. GB is 10^9 bytes and GiB is 2^30 bytes, everywhere.
"""

import re
from typing import TYPE_CHECKING, NamedTuple

from zeroplan.errors import SpecError

if TYPE_CHECKING:
    from decimal import Decimal

KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12
KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_COUNT_SUFFIX = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_BYTE_SUFFIX = {
    "": 1, "b": 1, "kb": KB, "mb": MB, "gb": GB, "tb": TB, "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB,
}  # fmt: skip
#: A comma must separate thousands. ``7,5e9`` is refused: some countries write 7.5e9 like this.
_WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+(?:_[0-9]+)*)"
_NUMBER = re.compile(rf"\s*({_WHOLE}(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{{1,3}})?|\.[0-9]+)\s*([A-Za-z]*)\s*", re.ASCII)
_LARGEST = 10**18
_HEXADECIMAL = re.compile(r"0[xX][0-9a-fA-F]{1,15}")


def parse_count(
    text: str, *, what: str = "count", examples: str = "7e9, 7b, 350M or 7_000_000_000", least: int = 1, most: int = _LARGEST
) -> int:
    """Return the count, from ``least`` to ``most``, that a text such as ``7e9``, ``7b``, ``7_000_000_000`` or ``1.5T`` means.

    >>> parse_count("7b"), parse_count("7_000_000_000"), parse_count("0.5B"), parse_count("4k")
    (7000000000, 7000000000, 500000000, 4000)
    """
    return _parse(text, _COUNT_SUFFIX, what, examples, least=least, most=most)


def parse_tokens(text: str, *, what: str, most: int = _LARGEST) -> int:
    """Return a sequence length from text. ``4k`` is refused: it may mean 4,000 or 4,096. [tokens]

    >>> parse_tokens("4096", what="--seq-len")
    4096
    """
    count = parse_count(text, what=what, examples="4096 or 8192", most=most)
    powers = {"k": (KB, KIB), "m": (MB, MIB)}.get(text.strip()[-1].lower())
    if powers is not None:
        suffixes, meant = powers
        raise SpecError(f"{what} {text!r} may mean {count:,} tokens or {count * meant // suffixes:,}; write the number")
    return count


def parse_size(text: str, *, what: str = "size") -> int:
    """Return the size that a text such as ``80GiB``, ``79.1GiB``, ``25 MB`` or ``500000000`` means, to the nearest byte. [bytes]

    >>> parse_size("80GiB") == 80 * GIB, parse_size("25 MB")
    (True, 25000000)
    """
    return _parse(text, _BYTE_SUFFIX, what, "80GiB, 80GB or a number of bytes", rounded=text.strip()[-1:].isalpha())


def parse_fraction(text: str) -> float | None:
    """Return a fraction from ``0.45`` or ``45%``; None for other text.

    >>> parse_fraction("0.45"), parse_fraction("45%"), parse_fraction("much")
    (0.45, 0.45, None)
    """
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return None


def _parse(
    text: str, suffixes: dict[str, int], what: str, examples: str, *, rounded: bool = False, least: int = 1, most: int = _LARGEST
) -> int:  # fmt: skip
    match = _NUMBER.fullmatch(text)
    if _HEXADECIMAL.fullmatch(text):
        raise SpecError(f"{what} {text!r} is not a decimal number; write {int(text, 16):,}")
    if match is None or match[2].lower() not in suffixes:
        raise SpecError(f"{what} {text!r} is not a number zeroplan reads; write {examples}")
    value = _exact(match[1].replace("_", "").replace(",", "")) * suffixes[match[2].lower()]
    if value < least or value > most:
        largest = "1e18" if most == _LARGEST else f"{most:,}"
        raise SpecError(f"{what} {text!r} is out of range; write a number from {least} to {largest}, like {examples}")
    if value != round(value) and not rounded:
        raise SpecError(f"{what} {text!r} is not a whole number; write {examples}")
    return round(value)


def _exact(number: str) -> "int | Decimal":
    if number.isdigit() and len(number) < len(str(_LARGEST)):
        return int(number)
    from decimal import Decimal  # noqa: PLC0415  keeps start-up fast

    return Decimal(number)


def format_gb(n_bytes: int) -> str:
    """Decimal gigabytes with their unit.

    >>> format_gb(14_000_000_000)
    '14.00 GB'
    """
    return f"{n_bytes / GB:,.2f} GB"


def format_gib(n_bytes: int) -> str:
    """Binary gigabytes with their unit.

    >>> format_gib(14_000_000_000)
    '13.04 GiB'
    """
    return f"{n_bytes / GIB:,.2f} GiB"


class Unit(NamedTuple):
    """The unit of an answer's sizes (GiB or GB), with the smaller units for small sizes."""

    name: str
    n_bytes: int
    smaller: tuple[tuple[str, int], ...]
    """Units for sizes below a tenth of this one, the largest first, with their bytes."""

    def amount(self, n_bytes: int) -> str:
        """The number without its unit, for a column whose header names the unit.

        >>> GIBIBYTES.amount(14_000_000_000)
        '13.04'
        """
        return f"{n_bytes / self.n_bytes:,.2f}"

    def size(self, n_bytes: int) -> str:
        """The number with its unit.

        >>> GIBIBYTES.size(14_000_000_000), GIGABYTES.size(14_000_000_000), GIBIBYTES.size(8_519_680), GIGABYTES.size(512)
        ('13.04 GiB', '14.00 GB', '8.12 MiB', '512 B')
        """
        return f"{self.part(n_bytes, n_bytes)} {self._unit_of(n_bytes)[0]}"

    def part(self, n_bytes: int, of: int) -> str:
        """The number without its unit, in the unit that :meth:`size` chooses for ``of``.

        >>> GIBIBYTES.part(1_114_112, 8_519_680)
        '1.06'
        """
        _, unit = self._unit_of(of)
        return f"{n_bytes:,}" if unit == 1 else f"{n_bytes / unit:,.2f}"

    def _unit_of(self, n_bytes: int) -> tuple[str, int]:
        """The name and bytes of the largest unit that the size is at least a tenth of; else bytes."""
        every = ((self.name, self.n_bytes), *self.smaller)
        return next(((name, unit) for name, unit in every if abs(n_bytes) >= max(unit // 10, 10 * KB)), ("B", 1))


GIBIBYTES = Unit("GiB", GIB, (("MiB", MIB), ("KiB", KIB)))
GIGABYTES = Unit("GB", GB, (("MB", MB), ("kB", KB)))


def unit_named(name: str) -> Unit:
    """The unit for a value of ``--unit``; raises SpecError for another value.

    >>> unit_named("gb").name
    'GB'
    """
    units = {"gib": GIBIBYTES, "gb": GIGABYTES}
    if name.lower() not in units:
        raise SpecError(f"--unit {name!r} is not a unit; write gib (2^30 bytes) or gb (10^9 bytes)")
    return units[name.lower()]


def format_size(n_bytes: int) -> str:
    """The size in GiB and GB; small sizes in MiB and MB, KiB and kB, or bytes.

    >>> format_size(14_000_000_000), format_size(8_519_680), format_size(65_536), format_size(512)
    ('13.04 GiB = 14.00 GB', '8.12 MiB = 8.52 MB', '64.00 KiB = 65.54 kB', '512 B')
    """
    magnitude = abs(n_bytes)
    if magnitude >= GB // 10:
        return f"{format_gib(n_bytes)} = {format_gb(n_bytes)}"
    if magnitude >= MB // 10:
        return f"{n_bytes / MIB:,.2f} MiB = {n_bytes / MB:,.2f} MB"
    if magnitude >= 10 * KB:
        return f"{n_bytes / KIB:,.2f} KiB = {n_bytes / KB:,.2f} kB"
    return f"{n_bytes:,} B"
