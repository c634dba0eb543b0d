"""A table with one row per case, and a summary, for ``verify --matrix`` and ``compare``."""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from zeroplan.comparison import Comparison
from zeroplan.report.comparison import percent
from zeroplan.units import format_size

if TYPE_CHECKING:
    from zeroplan.verify.cases.verdicts import Judged


class Row(NamedTuple):
    """One case with its prediction. [bytes]

    ``fits`` is the estimate's verdict in words, empty without a GPU; ``outcome`` is the result of the run and ``why`` its reason;
    ``agrees`` is None if the case cannot be judged.
    """

    name: str
    predicted: int
    comparison: Comparison | None
    agrees: bool | None
    fits: str = ""
    outcome: str = "measured"
    why: str = ""

    @classmethod
    def of(cls, one: "Judged") -> "Row":
        """The row of a matrix's result."""
        fits = "" if one.fits is None else ("fits" if one.fits else "does not fit") + (_EDGE if one.at_the_edge else "")
        result = one.result
        return cls(result.name, one.predicted, one.comparison, one.agrees, fits, result.outcome, result.says)

    @property
    def cells(self) -> tuple[str, ...]:
        """The content of each column of :data:`_COLUMNS`."""
        measured, error = "", ""
        if self.comparison is not None:
            peak = self.comparison.peak
            measured, error = size(peak.measured), percent(peak.error)
        return (self.name, size(self.predicted), measured, error, self.fits, self.outcome, word(self.agrees))


_EDGE = " ~"
_COLUMNS = ("case", "predicted", "measured", "error", "verdict", "outcome", "")
_NUMBERS = ("predicted", "measured", "error")


def size(n_bytes: int) -> str:
    """The size in binary units only.

    >>> size(14_000_000_000), size(512)
    ('13.04 GiB', '512 B')
    """
    return format_size(n_bytes).partition(" = ")[0]


def word(agrees: bool | None) -> str:
    """The word for a case; disagreement is in capitals."""
    return {True: "agrees", False: "DISAGREES", None: "not judged"}[agrees]


def table(rows: Sequence[Row], *, tolerance: float) -> str:
    """Return the table and the summary. Empty columns are left out."""
    shown = _shown(rows)
    widths = [max(len(line[at]) for line in shown) for at in range(len(shown[0]))]
    lines = [
        "  ".join(
            part.rjust(width) if title in _NUMBERS else part.ljust(width)
            for title, part, width in zip(shown[0], line, widths, strict=True)
        ).rstrip()
        for line in shown
    ]
    return "\n".join([*lines, "", *summary(rows, tolerance)])


def table_markdown(rows: Sequence[Row], *, tolerance: float) -> str:
    """Return the table and the summary in Markdown."""
    shown = _shown(rows)
    ruler = ["---:" if title in _NUMBERS else "---" for title in shown[0]]
    lines = [f"| {' | '.join(line)} |" for line in (shown[0], ruler, *shown[1:])]
    return "\n".join([*lines, "", *(f"- {line}" for line in summary(rows, tolerance))])


def _shown(rows: Sequence[Row]) -> list[list[str]]:
    """The header and the rows, without the verdict's column if it is empty, and the outcome's if all cases were measured."""
    left_out = {
        "verdict": not any(row.fits for row in rows),
        "outcome": all(row.outcome == "measured" for row in rows),
    }
    kept = [at for at, title in enumerate(_COLUMNS) if not left_out.get(title)]
    return [[line[at] for at in kept] for line in (_COLUMNS, *(row.cells for row in rows))]


def summary(rows: Sequence[Row], tolerance: float) -> Iterator[str]:
    """Yield the errors of peaks, the cases that disagree or were not judged with reasons, and the counts."""
    from zeroplan.verify.cases.verdicts import BAND  # noqa: PLC0415  a single record needs no modules of verify

    errors = [abs(row.comparison.peak.error) for row in rows if row.comparison is not None]
    if errors:
        yield f"Peaks of {len(errors)} cases: off by {median(errors):.2%} in the median, {max(errors):.2%} at most."
    replayed = [one for row in rows if row.comparison is not None for one in row.comparison.reserved]
    if outside := sum(not one.inside for one in replayed):
        yield f"What the allocator reserves lies outside the estimate's band in {outside} of {len(replayed)} replays."
    if any(row.fits.endswith(_EDGE) for row in rows):
        yield f"~ so near to the card's capacity ({BAND:.0%}) that either verdict may be right."
    for row in rows:
        if row.agrees is False:
            yield f"{row.name} disagrees: {_where(row, tolerance)}"
        elif row.agrees is None:
            yield f"{row.name}, {row.outcome}: {row.why}"
    agree, wrong, open_ = (sum(row.agrees is said for row in rows) for said in (True, False, None))
    yield f"{len(rows)} cases: {agree} agree within {tolerance:.1%}, {wrong} disagree, {open_} not judged."


def _where(row: Row, tolerance: float) -> str:
    if row.comparison is None:
        return "it ran out of memory, and the estimate fits the GPU"
    off = ", ".join(f"{one.what} {percent(one.error)}" for one in row.comparison.beyond(tolerance))
    if not off and row.comparison.contradicted:
        return "the estimate fits the GPU, and a replay with a card of its size runs out of memory"
    return off or "it ran, and the estimate does not fit the GPU"
