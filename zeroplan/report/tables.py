"""Rows of an answer in a terminal: what something is, how large it is in one unit, and a remark."""

from typing import NamedTuple

from zeroplan.ledger import Band
from zeroplan.units import GIBIBYTES, Unit

_AMOUNT = 10
"""Columns of a number. [signs]"""


class Table(NamedTuple):
    """How wide the first column is, and the unit of the second."""

    unit: Unit = GIBIBYTES
    what: int = 34

    def head(self, title: str, remark: str = "") -> str:
        """The heading of the columns, with the unit."""
        return f"{title:<{self.what + 2}}{self.unit.name:>{_AMOUNT}}  {remark}".rstrip()

    def row(self, what: str, n_bytes: int, remark: str = "") -> str:
        """One row, indented below its heading."""
        return f"  {what:<{self.what}.{self.what}}{self.unit.amount(n_bytes):>{_AMOUNT}}  {remark}".rstrip()

    def total(self, what: str, n_bytes: int, remark: str = "") -> str:
        """The sum of the rows above."""
        return f"= {what:<{self.what}.{self.what}}{self.unit.amount(n_bytes):>{_AMOUNT}}  {remark}".rstrip()

    def band_row(self, what: str, band: Band) -> str:
        """One row with its expected size, and the ends of the band where they differ."""
        return self.row(what, int(band.expected_bytes), self.span(band))

    def span(self, band: Band) -> str:
        """The ends of a band; empty where both print alike, and alike to what is expected between them."""
        low, high = (self.unit.amount(int(end)) for end in (band.low_bytes, band.high_bytes))
        return "" if low == high else f"{low} to {high}"
