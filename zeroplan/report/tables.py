"""Formats rows for a terminal: a name, a size in one unit, and a remark."""

from typing import NamedTuple

from zeroplan.ledger import Band
from zeroplan.units import GIBIBYTES, Unit

_AMOUNT = 10
"""Columns of a number. [characters]"""


class Table(NamedTuple):
    """The width of the first column, and the unit of the second."""

    unit: Unit = GIBIBYTES
    what: int = 34

    def head(self, title: str, remark: str = "") -> str:
        """Return the heading of the columns, with the unit."""
        return f"{title:<{self.what + 2}}{self.unit.name:>{_AMOUNT}}  {remark}".rstrip()

    def row(self, what: str, n_bytes: int, remark: str = "") -> str:
        """Return one row, indented below its heading."""
        return f"  {what:<{self.what}.{self.what}}{self.unit.amount(n_bytes):>{_AMOUNT}}  {remark}".rstrip()

    def total(self, what: str, n_bytes: int, remark: str = "") -> str:
        """Return the sum of the rows above."""
        return f"= {what:<{self.what}.{self.what}}{self.unit.amount(n_bytes):>{_AMOUNT}}  {remark}".rstrip()

    def band_row(self, what: str, band: Band) -> str:
        """Return one row with the expected size, and the band's limits if they differ."""
        return self.row(what, int(band.expected_bytes), self.span(band))

    def span(self, band: Band) -> str:
        """Return a band's least and largest value; empty if both print like the expected one."""
        low, high = (self.unit.amount(int(end)) for end in (band.low_bytes, band.high_bytes))
        return "" if low == high else f"{low} to {high}"
