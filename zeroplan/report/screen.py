"""Renders an estimate on one screen: verdict, peak, the GPU's memory, traffic.

At most 28 lines of 80 columns. The table of the peak and the notes are shortened first; ``--verbose`` shows all of them.
"""

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from zeroplan.estimator import Estimate
from zeroplan.ledger import Line
from zeroplan.report.card import card_rows
from zeroplan.report.tables import Table
from zeroplan.report.words import (
    every_note,
    filled,
    headline,
    is_data_parallel,
    job_lines,
    kinds_by_size,
    no_change,
    plural,
    replay_sentence,
    verdict_sentence,
)
from zeroplan.units import Unit

if TYPE_CHECKING:
    from zeroplan.remedies import Remedy

LINES = 28
_KINDS_AT_LEAST, _FEWEST_KINDS, _MOST_KINDS = 2, 4, 7
_KINDS_BESIDE_LENGTHS = 3
_MOST_CHANGES, _CHANGES_BESIDE_LENGTHS = 3, 1
_GAPS = 4
_REMARK = 33
"""Columns for a remark beside a row's name and number. [characters]"""


def screen_text(
    answer: Estimate, notes: Sequence[str], changes: "Sequence[Remedy] | None", unit: Unit, lengths: Sequence[str] = ()
) -> str:
    """Return at most ``LINES`` lines of ``COLUMNS`` columns, all sizes in one unit; ``lengths`` are lines on varying lengths."""
    table = Table(unit, what=33)
    most = _CHANGES_BESIDE_LENGTHS if len(lengths) > 1 else _MOST_CHANGES  # ways of batching are changes, too
    top = [*filled(verdict_sentence(answer, unit)), *_changes(answer, changes, unit, most=most)]
    job = filled(headline(answer)) + filled("; ".join(job_lines(answer)))
    summary = list(_summary(answer, unit))
    card = [table.head("On the card at the peak", "range"), *card_rows(answer, table)]
    sent = [] if lengths else filled(_sent(answer, unit))
    free = LINES - sum(len(part) for part in (top, job, summary, lengths, card, sent))
    every = every_note(answer, notes)
    least, usual = (0, _KINDS_BESIDE_LENGTHS) if lengths else (_KINDS_AT_LEAST, _FEWEST_KINDS)
    first = _lines_of_the_first(every)  # it may say that figures are too low, so it replaces empty lines and small kinds
    gaps = max(0, min(_GAPS, free - first - usual))
    fewest = min(usual, max(least, free - first))
    room = max(bool(every), free - gaps - fewest)
    shown = list(notes_that_fit(every, room, " and every collective"))
    kinds = _kinds(answer, table, at_most=min(_MOST_KINDS, max(fewest, free - gaps - len(shown))))
    return _spaced([top, job, summary, *([lengths] if lengths else []), [card[0], *kinds, *card[1:]], [*sent, *shown]], gaps)


def _lines_of_the_first(notes: Sequence[str]) -> int:
    """Return the lines of the first note and of the number of the others."""
    return (len(filled(f"Note: {notes[0]}")) if notes else 0) + (len(notes) > 1)


def _spaced(parts: Sequence[Sequence[str]], gaps: int) -> str:
    """Return the parts with at most ``gaps`` empty lines between them."""
    spaced = [[*part, ""] if at < gaps else part for at, part in enumerate(parts)]
    return "\n".join(line for part in spaced for line in part)


def _changes(answer: Estimate, changes: "Sequence[Remedy] | None", unit: Unit, *, most: int) -> Iterator[str]:
    """Yield up to ``most`` of the nearest changes as flags to copy, each with the memory it needs."""
    if changes is not None and not changes and answer.fits is False:
        yield from filled(no_change())
    for one in (changes or ())[:most]:
        yield from filled(f"It fits with {one.flags} ({unit.size(one.needed_bytes)}{one.how}).")


def _summary(answer: Estimate, unit: Unit) -> Iterator[str]:
    yield from filled(f"Peak allocated: {unit.size(answer.peak_bytes)}, at the moment: {answer.peak.name}")
    states, together = answer.states_by_kind, sum(answer.states_by_kind.values())
    parts = ", ".join(f"{kind.value} {unit.part(n_bytes, together)}" for kind, n_bytes in states.items())
    yield from filled(f"Model states: {unit.size(together)} ({parts})")
    yield from filled(replay_sentence(answer, unit, briefly=True))
    if answer.pipeline:
        ranks = sorted(answer.pipeline, key=lambda one: int(one.peak_bytes))
        lowest = f"the lowest, rank {ranks[0].rank}, {unit.size(int(ranks[0].peak_bytes))}"
        yield from filled(f"Pipeline: rank {answer.pipeline[0].rank} of {len(ranks)} has the highest peak; {lowest}")


def _kinds(answer: Estimate, table: Table, *, at_most: int) -> list[str]:
    """Return the lines of the peak, the largest first; the smallest in one row if there are too many."""
    kinds = kinds_by_size(answer.peak.lines) if at_most else []
    shown = kinds if len(kinds) <= at_most else kinds[: at_most - 1]
    rest = kinds[len(shown) :]
    lines = answer.peak.lines
    rows = [
        table.row(kind.value, size, main_reason([line for line in lines if line.kind is kind], _REMARK)) for kind, size in shown
    ]
    if rest:
        names = textwrap.shorten(", ".join(kind.value for kind, _ in rest), _REMARK, placeholder="…")
        title = f"{len(rest)} smaller kinds" if shown else "all kinds together"
        rows.append(table.row(title, sum(size for _, size in rest), names))
    return rows


def main_reason(lines: Sequence[Line], width: int) -> str:
    """Return the reason of the largest line, shortened to a width, and the number of other lines."""
    there = [line for line in lines if line.n_bytes]
    largest = max(there, key=lambda line: int(line.n_bytes))
    others = "" if len(there) == 1 else f"; {len(there) - 1} more"
    return f"{textwrap.shorten(largest.reason, width - len(others), placeholder='…')}{others}"


def _sent(answer: Estimate, unit: Unit) -> str:
    traffic = answer.traffic
    if not traffic.total_bytes:
        return "Nothing is sent: there is one rank."
    sentence = f"Each GPU sends {unit.size(int(traffic.total_bytes))} per step"
    if not is_data_parallel(answer):
        return f"{sentence}."
    elements, sent = traffic.relative_to_ddp, traffic.relative_bytes_to_ddp
    return f"{sentence}: {sent:.2f}x the bytes of DDP, {elements:.2f}x its elements."


def notes_that_fit(notes: Sequence[str], room: int, others: str = "") -> Iterator[str]:
    """Yield as many whole notes as fit into ``room`` lines. Then name the flag that prints the rest, and ``others``."""
    lines = [filled(f"Note: {note}") for note in notes]
    shown = next(n for n in range(len(notes), -1, -1) if not n or sum(map(len, lines[:n])) + (n < len(notes)) <= room)
    yield from (line for note in lines[:shown] for line in note)
    if left := len(notes) - shown:
        yield f"-v adds {plural(left, 'more note' if shown else 'note')}{others}."
