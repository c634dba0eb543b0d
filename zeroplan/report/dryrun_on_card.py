"""Renders a script's run on real GPUs beside its dry run, as text and data."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import NamedTuple

from zeroplan.comparison import Compared
from zeroplan.engines.device import outside_beside, total_band
from zeroplan.report.dryrun import fits, outside, small_unit, verdict
from zeroplan.report.words import filled, paragraphs
from zeroplan.saved_runs.on_card import OnCard, held_against
from zeroplan.script_card import RankOnCard
from zeroplan.script_run import DryRun
from zeroplan.units import GIBIBYTES, Unit

SCHEMA_VERSION = 1
_WHAT, _AMOUNT = 30, 11
"""Columns of a row. [characters]"""


class CardComparison(NamedTuple):
    """The ranks of a run, the fullest first, its dry run, and the tolerance."""

    ranks: tuple[RankOnCard, ...]
    predicted: DryRun
    tolerance: float

    @property
    def rows(self) -> OnCard:
        """Return the fullest rank beside the dry run."""
        return held_against(self.ranks[0], self.predicted)

    @property
    def agrees(self) -> bool:
        """Whether the dry run's figures are within the tolerance; if the GPU ran out of memory, it must also predict that."""
        if self.ranks[0].ended == "out of memory":
            return not fits(self.predicted) and not self.rows.beyond(self.tolerance)
        return not self.rows.beyond(self.tolerance)


def on_card_text(found: CardComparison, *, unit: Unit = GIBIBYTES) -> str:
    """Return the comparison as text of ``COLUMNS`` columns."""
    small = small_unit(found.predicted, unit)
    return paragraphs(
        [filled(_verdict_on_dry_run(found)), filled(_what(found)), list(_table(found, small)), list(_driver(found, small))]
    )


def on_card_payload(found: CardComparison) -> dict[str, object]:
    """Return the comparison as data: the rows, the measurement and the prediction."""
    rows = found.rows
    return {
        "schema_version": SCHEMA_VERSION,
        "agrees": found.agrees,
        "tolerance": found.tolerance,
        "phases": [_row(one) for one in rows.phases],
        "judged": [_row(one) for one in rows.judged],
        "reserved": _row(rows.reserved),
        "measured": [asdict(one) for one in found.ranks],
        "predicted": asdict(found.predicted),
    }


def _row(one: Compared) -> dict[str, object]:
    return {
        "what": one.what, "measured_bytes": one.measured, "predicted_bytes": one.predicted, "difference_bytes": one.difference,
    }  # fmt: skip


def _verdict_on_dry_run(found: CardComparison) -> str:
    full = found.ranks[0].ended == "out of memory"
    if full:
        which = "Agrees" if found.agrees else "DISAGREES"
        return f"{which}: the script ran out of memory on the GPU. The dry run: {verdict(found.predicted, GIBIBYTES)}"
    beyond = found.rows.beyond(found.tolerance)
    if not beyond:
        worst = max(found.rows.judged, key=lambda row: abs(row.error))
        return f"Agrees: the dry run is within {found.tolerance:.1%} of the GPU; {worst.what}: {_percent(worst)}."
    off = ", ".join(f"{row.what} {_percent(row)}" for row in beyond)
    return f"DISAGREES: beyond {found.tolerance:.1%}, dry run against GPU: {off}."


def _what(found: CardComparison) -> str:
    first, command = found.ranks[0], found.predicted.command[0]
    if first.alone:
        how = "" if first.gpus == 1 else "; its process group sent nothing"
        return f"{command} ran as rank {first.rank} of {first.gpus:,} on one {first.card.name}{how}."
    others = ", ".join(f"rank {one.rank}: {one.peak_bytes:,} bytes" for one in found.ranks[1:])
    return (
        f"{command} ran on {len(found.ranks)} of {first.gpus:,} ranks over NCCL, each on one {first.card.name}; the table has rank "
        f"{first.rank}, the fullest.{f' Peaks of others: {others}.' if others else ''}"
    )


def _table(found: CardComparison, unit: Unit) -> Iterator[str]:
    yield f"{'Allocated':<{_WHAT}}{'GPU ' + unit.name:>{_AMOUNT + 2}}{'dry run':>{_AMOUNT}}{'difference':>{_AMOUNT + 2}}"
    yield from _lines(found.rows.phases, unit)
    yield from _lines(found.rows.judged, unit, sign="=")
    yield from _lines([found.rows.reserved], unit)


def _lines(rows: Sequence[Compared], unit: Unit, sign: str = " ") -> Iterator[str]:
    for row in rows:
        amounts = f"{unit.amount(row.measured):>{_AMOUNT}}{unit.amount(row.predicted):>{_AMOUNT}}"
        yield f"{sign} {row.what:<{_WHAT}}{amounts}{_percent(row):>{_AMOUNT + 2}}"


def _percent(row: Compared) -> str:
    return f"{row.error:+.2%}" if row.measured else f"{row.difference:+,} B"


def _driver(found: CardComparison, unit: Unit) -> Iterator[str]:
    """Yield memory outside the allocator: context, kernels, NCCL's buffers."""
    first = found.ranks[0]
    card, parts = first.card, outside_beside(0, found.predicted.gpu) if first.alone else outside(found.predicted)
    band = total_band(parts)
    yield from filled(
        f"Outside the allocator the driver counts {unit.size(card.outside_bytes)} (all that uses the card beside it; predicted "
        f"{unit.size(int(band.low_bytes))} to {unit.size(int(band.high_bytes))}). "
        f"Driver {card.driver or 'unknown'}, CUDA {card.cuda}."
    )
    if first.said:
        yield from filled(f"torch said: {first.said}")
