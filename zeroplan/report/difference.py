"""Renders the difference between two estimates, runs or snapshots: on one screen, in full, as Markdown, as JSON data."""

import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zeroplan.differences import At, Changed, Difference, Grain, SameMoment, Setting, Side
from zeroplan.report.screen import LINES, notes_that_fit
from zeroplan.report.words import COLUMNS, WIDTH, cells, headline_of, notes_part, paragraphs, plural
from zeroplan.units import GIBIBYTES, Unit

SCHEMA_VERSION = 1
_FEWEST_ROWS, _ROWS_BEFORE_NOTES, _MOST_SENT, _MOST_OF_SETTINGS, _MOST_OF_MOMENTS, _GAPS = 3, 3, 4, 2, 4, 3
_HAPPENED, _AMOUNT, _CHANGE = 7, 10, 11
"""Columns of a row beside its name. [characters]"""


class _Table(NamedTuple):
    unit: Unit
    width: int

    def head(self, title: str) -> str:
        room = self.width - 2 * _AMOUNT - _CHANGE - len(self.unit.name) - 1
        return f"{title:<{room}.{room}} {self.unit.name}{'A':>{_AMOUNT}}{'B':>{_AMOUNT}}{'change':>{_CHANGE}}"

    def row(self, row: Changed, *, mark: str = "  ") -> str:
        room = self.width - len(mark) - _HAPPENED - 2 * _AMOUNT - _CHANGE
        return f"{mark}{row.happened:<{_HAPPENED}}{_shortened(row, room):<{room}}{self._amounts(row)}"

    def total(self, row: Changed, mark: str = "= ") -> str:
        room = self.width - len(mark) - 2 * _AMOUNT - _CHANGE
        return f"{mark}{_shortened(row, room):<{room}}{self._amounts(row)}"

    def _amounts(self, row: Changed) -> str:
        sides = (self.unit.amount(size) if size else "-" for size in (row.before_bytes, row.after_bytes))
        change = f"{row.change_bytes / self.unit.n_bytes:+,.2f}" if row.change_bytes else "same"
        return "".join(f"{side:>{_AMOUNT}}" for side in sides) + f"{change:>{_CHANGE}}"


def named(row: Changed) -> str:
    """A row's name: its kind, and the tensor, module or place in the code."""
    return f"{row.kind}: {row.what}" if row.what else row.kind


def _shortened(row: Changed, room: int) -> str:
    """A row's name, cut to ``room`` columns; without the kind if both are too long."""
    name = named(row) if len(named(row)) < room else row.what or row.kind
    return _cut(name, room - 1)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1].rstrip()}…"


def difference_text(
    found: Difference, unit: Unit = GIBIBYTES, *, limit: float | None = None, verbose: bool = False
) -> str:  # fmt: skip
    """Return the changes on one screen (26 lines of 80 columns); all of them with ``verbose``.

    ``limit`` is the allowed growth of B's peak as a fraction of A's; the answer says if B exceeds it.
    """
    if verbose:
        return _whole(found, _Table(_small(found, unit), WIDTH), limit)
    return _screen(found, _Table(_small(found, unit), COLUMNS), limit)


def _small(found: Difference, unit: Unit) -> Unit:
    """The unit, or a smaller one if the peaks are below it."""
    highest = max(found.peak.before_bytes, found.peak.after_bytes)
    while unit.smaller and highest < unit.n_bytes:
        (name, n_bytes), *smaller = unit.smaller
        unit = Unit(name, n_bytes, tuple(smaller))
    return unit


def _screen(found: Difference, table: _Table, limit: float | None) -> str:
    top = [*_filled(_verdict(found, table.unit)), *_filled(_above(found, limit)), *_sides(found, table, most=1)]
    if found.equal:
        return "\n".join(top)
    top += _filled(_step_line(found))
    top += _at_most(_filled(_settings_line(_main_settings(found))), _MOST_OF_SETTINGS)
    rows = found.kinds if found.of_two_engines else found.changes
    totals = [table.total(row, "  ") for row in found.totals if row.change_bytes or row.kind == "held between steps"]
    below = [*_others(found.peak, rows, table), table.total(found.peak), *totals]
    moments = _moments(found, table.unit)
    free = LINES - sum(map(len, (top, below, moments))) - 1 - _FEWEST_ROWS
    sent = _sent(found, table, min(_MOST_SENT, free - bool(found.notes) - 1))
    room = min(free - len(sent), max(1, free - len(sent) - _ROWS_BEFORE_NOTES))
    notes = list(notes_that_fit(found.notes, room))
    free -= len(sent) + len(notes)
    gaps = max(0, min(_GAPS, free))
    peaks = [table.head(_title(found)), *_rows(rows, table, _FEWEST_ROWS + free - gaps), *below]
    return _spaced([top, peaks, moments, [*sent, *notes]], gaps)


def _spaced(parts: Sequence[Sequence[str]], gaps: int) -> str:
    """The non-empty parts, with at most ``gaps`` empty lines between them."""
    there = [part for part in parts if part]
    return "\n".join(line for at, part in enumerate(there) for line in (*([""] if 0 < at <= gaps else []), *part))


def _at_most(lines: list[str], most: int) -> list[str]:
    """At most ``most`` lines; an ellipsis marks the cut."""
    return lines if len(lines) <= most else [*lines[: most - 1], f"{lines[most - 1][: COLUMNS - 2]} …"]


def _moments(found: Difference, unit: Unit) -> list[str]:
    """The sentence on different moments; without causes if it gets too long."""
    full = _filled(_moments_sentence(found, unit))
    if len(full) <= _MOST_OF_MOMENTS:
        return full
    bare = found._replace(same_moments=tuple(moment._replace(changes=()) for moment in found.same_moments))
    return _at_most(_filled(_moments_sentence(bare, unit)), _MOST_OF_MOMENTS)


def _whole(found: Difference, table: _Table, limit: float | None) -> str:
    every = [_rows(found.changes, table, len(found.changes), sizes=True), _others(found.peak, found.changes, table)]
    peaks = [table.head(_title(found, found.grain)), *(line for part in every for line in part), table.total(found.peak)]
    return paragraphs(
        [
            [*_filled(_verdict(found, table.unit), WIDTH), *_filled(_above(found, limit), WIDTH)],
            [*_sides(found, table, most=9), *_filled(_step_line(found), WIDTH)],
            _settings_part(found.settings),
            _kinds(found, table),
            [*peaks, *(table.total(row, "  ") for row in found.totals if row.before_bytes or row.after_bytes)],
            [*_filled(_moments_sentence(found, table.unit), WIDTH)],
            *([*_at_both(moment, table)] for moment in found.same_moments if moment.changes),
            [table.head("Held between steps"), *_rows(found.held, table, len(found.held))] if found.held else [],
            _sent(found, table, len(found.sent)),
            notes_part(found.notes),
        ]
    )


def _filled(text: str, width: int = COLUMNS) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False)


def _verdict(found: Difference, unit: Unit) -> str:
    peak, size = found.peak, unit.size(found.peak.after_bytes)
    if found.equal:
        return f"A and B are equal in everything that both contain: the peak is {size}."
    if not peak.change_bytes:
        return f"The peaks are equal, {size}."
    than = f"{unit.size(abs(peak.change_bytes))} {'higher' if peak.change_bytes > 0 else 'lower'} than A's"
    return f"B's peak is {than}: {unit.size(peak.before_bytes)} -> {size}{_percent(found)}."


def _percent(found: Difference) -> str:
    return f" ({100 * found.growth:+.1f} %)" if found.growth != float("inf") else ""


def _above(found: Difference, limit: float | None) -> str:
    if limit is None:
        return ""
    allowed = f"than {100 * limit:g} % (--fail-above)"
    return f"That is more {allowed}." if found.growth > limit else f"It is not higher by more {allowed}."


def _sides(found: Difference, table: _Table, *, most: int) -> Iterator[str]:
    """Yield what A and B are, and the moment of each peak."""
    for letter, side in _lettered(found):
        lines = textwrap.wrap(f"{letter}  {_called(side)}", table.width, subsequent_indent="   ", break_on_hyphens=False)
        yield from lines if len(lines) <= most else [_cut(f"{lines[0]} {lines[1]}", table.width)]
        verdict = "" if side.verdict in ("", "unknown") else f"{side.verdict}; "
        yield _cut(f"   {verdict}peak {table.unit.size(side.peak.n_bytes)} at the moment: {side.peak.name}", table.width)


def _lettered(found: Difference) -> tuple[tuple[str, Side], ...]:
    return (("A", found.before), ("B", found.after))


def _called(side: Side) -> str:
    """A side's name, sort of file and job."""
    name = side.name if side.is_a == "estimate" else f"{side.name} ({side.is_a})"
    return ": ".join(part for part in (name, "" if side.job is None else headline_of(side.job)) if part)


def _step_line(found: Difference) -> str:
    """The estimated step time and tokens/s of both sides; empty if one has none."""
    sides = (found.before, found.after)
    (before, rate), (after, later_rate) = ((side.step_s or 0.0, side.tokens_per_s or 0.0) for side in sides)
    if not before or not after:
        return ""
    if (before, rate) == (after, later_rate):
        return f"A step takes {before:.3g} s in both, by estimate."
    times = f"{before:.3g} s -> {after:.3g} s ({100 * (after / before - 1):+.1f} %)"
    return f"A step takes {times}; {rate:,.0f} -> {later_rate:,.0f} tokens/s per GPU."


def _main_settings(found: Difference) -> tuple[Setting, ...]:
    """Settings that differ, without the fields of a setting that differs as a whole (another model)."""
    names = {one.name for one in found.settings}
    return tuple(one for one in found.settings if one.name.partition(".")[0] not in names or "." not in one.name)


def _settings_line(settings: Sequence[Setting]) -> str:
    line = "; ".join(f"{one.name} {one.before} -> {one.after}" for one in settings)
    return f"Settings: {line}" if line else ""


def _settings_part(settings: Sequence[Setting]) -> list[str]:
    return ["Settings that differ", *(f"  {one.name}: {one.before} -> {one.after}" for one in settings)] if settings else []


def _title(found: Difference, grain: Grain | None = None) -> str:
    if grain is None and found.of_two_engines:
        return "At the peaks, by kind (-v: by tensor)" if found.grain == "tensor" else "At the peaks, by kind"
    return f"At the peaks, by {_GRAINS[found.grain]}"


_GRAINS: dict[Grain, str] = {"tensor": "tensor", "module": "module", "place": "place in the code", "kind": "kind"}


def _kinds(found: Difference, table: _Table) -> list[str]:
    """The table by kind; empty if the main table is by kind already."""
    if found.grain == "kind" or not found.kinds:
        return []
    return [table.head("At the peaks, by kind"), *_rows(found.kinds, table, len(found.kinds)), table.total(found.peak)]


def _rows(rows: Sequence[Changed], table: _Table, most: int, *, sizes: bool = False) -> list[str]:
    """The largest changes, and one row for the others; with block sizes if ``sizes``."""
    shown = rows if len(rows) <= most else rows[: most - 1]
    lines = [line for row in shown for line in (table.row(row), *(_details(row, table.unit) if sizes else ()))]
    if rest := rows[len(shown) :]:
        lines.append(table.total(_together(f"{'':<{_HAPPENED}}{plural(len(rest), 'smaller change')}", rest), "  "))
    return lines


def _together(name: str, rows: Sequence[Changed]) -> Changed:
    return Changed(name, "", sum(row.before_bytes for row in rows), sum(row.after_bytes for row in rows))


def _details(row: Changed, unit: Unit) -> Iterator[str]:
    """Yield a row's block sizes, and the moment at which the other side has its tensors."""
    indent = " " * (_HAPPENED + 4)
    if row.before_blocks or row.after_blocks:
        before, after = (_sizes(blocks, unit) for blocks in (row.before_blocks, row.after_blocks))
        yield f"{indent}blocks: {before} -> {after}"
    if row.elsewhere:
        yield f"{indent}{'A' if row.happened == 'came' else 'B'} has it at another moment: {row.elsewhere}"


def _sizes(blocks: Sequence[tuple[int, int]], unit: Unit, most: int = 3) -> str:
    shown = ", ".join(f"{count:,} x {unit.size(size)}" for size, count in blocks[:most])
    rest = sum(count for _, count in blocks[most:])
    return f"{shown}, {rest:,} smaller" if rest else shown or "none"


def _others(peak: Changed, changes: Sequence[Changed], table: _Table) -> list[str]:
    """The row of memory that is equal on both sides, so that the columns add up."""
    left = peak.before_bytes - sum(row.before_bytes for row in changes)
    return [table.total(Changed(f"{'':<{_HAPPENED}}everything else", "", left, left), "  ")] if left else []


def _moments_sentence(found: Difference, unit: Unit) -> str:
    """Both sides' memory at each peak's moment; empty if both peaks are at the same moment."""
    if not found.same_moments:
        return ""
    return " ".join(("The peaks are at different moments.", *(_at_one(moment, unit) for moment in found.same_moments)))


def _at_one(moment: SameMoment, unit: Unit) -> str:
    letter, other, at, there = ("A", "B", moment.before, moment.after) if moment.of_before else (
        "B", "A", moment.after, moment.before)  # fmt: skip
    apart = there.n_bytes - at.n_bytes
    less = "as much" if not apart else f"{unit.size(abs(apart))} {'more' if apart > 0 else 'less'}"
    where = "" if there.name == at.name else f", or what is most like it ({there.name}),"
    return f"At {letter}'s ({at.name}){where} {other} has {unit.size(there.n_bytes)}, {less}{_largest(moment, unit)}."


def _largest(moment: SameMoment, unit: Unit) -> str:
    if not moment.changes:
        return ""
    row = moment.changes[0]
    return f", most of it {named(row)} ({_signed(row.change_bytes if moment.of_before else -row.change_bytes, unit)})"


def _signed(n_bytes: int, unit: Unit) -> str:
    return f"{'+' if n_bytes > 0 else '-'}{unit.size(abs(n_bytes))}"


def _at_both(moment: SameMoment, table: _Table) -> Iterator[str]:
    letter, at = ("A", moment.before) if moment.of_before else ("B", moment.after)
    yield table.head(f"At {letter}'s: {at.name}")
    yield from _rows(moment.changes, table, len(moment.changes))
    yield table.total(Changed("allocated", "", moment.before.n_bytes, moment.after.n_bytes))


def _sent(found: Difference, table: _Table, most: int) -> list[str]:
    if not found.sent or most < 1:
        return []
    title = "Collectives, sent by one GPU per step" if found.sent_by_one else "Collectives, bytes of their buffers per step"
    return [table.head(title), *_rows(found.sent, table, most)]


def difference_markdown(found: Difference, *, limit: float | None = None) -> str:
    """Return the whole difference as Markdown tables."""
    unit = _small(found, GIBIBYTES)
    return paragraphs(
        [
            [f"**{_verdict(found, unit)}** {_above(found, limit)}".rstrip()],
            [*_sides_markdown(found, unit), *(f"- {line}" for line in [_step_line(found)] if line)],
            list(_settings_markdown(found.settings)),
            list(_table_markdown(_title(found, found.grain).lower(), (*found.changes, found.peak, *found.totals), unit)),
            _filled(_moments_sentence(found, unit), 10**6),
            list(_table_markdown("held between steps", found.held, unit)),
            list(_table_markdown("collectives", found.sent, unit)),
            [f"- {note}" for note in found.notes],
        ]
    )


def _sides_markdown(found: Difference, unit: Unit) -> Iterator[str]:
    for letter, side in _lettered(found):
        yield f"- {letter}: {_called(side)}; peak {unit.size(side.peak.n_bytes)} at the moment: {side.peak.name}"


def _settings_markdown(settings: Sequence[Setting]) -> Iterator[str]:
    if settings:
        yield "| setting | A | B |"
        yield "|---|---|---|"
        yield from (cells(one.name, one.before, one.after) for one in settings)


def _table_markdown(title: str, rows: Sequence[Changed], unit: Unit) -> Iterator[str]:
    if rows:
        yield cells(title, "", f"A {unit.name}", f"B {unit.name}", "change")
        yield "|---|---|---:|---:|---:|"
        for row in rows:
            sides = (unit.amount(size) for size in (row.before_bytes, row.after_bytes))
            yield cells(named(row), row.happened, *sides, f"{row.change_bytes / unit.n_bytes:+,.2f}")


def difference_payload(found: Difference, *, limit: float | None = None) -> dict[str, object]:
    """Return the whole difference as data for ``json.dumps``. [bytes]"""
    return {
        "schema_version": SCHEMA_VERSION,
        "equal": found.equal,
        "compared_by": found.grain,
        "before": _side_payload(found.before),
        "after": _side_payload(found.after),
        "peak": _row_payload(found.peak),
        "changes": [_row_payload(row) for row in found.changes],
        "kinds": [_row_payload(row) for row in found.kinds],
        "same_moments": [_moment_payload(moment) for moment in found.same_moments],
        "held": [_row_payload(row) for row in found.held],
        "collectives": [_row_payload(row) for row in found.sent],
        "totals": [_row_payload(row) for row in found.totals],
        "settings": [one._asdict() for one in found.settings],
        "notes": list(found.notes),
        "fail_above": None if limit is None else {"limit": limit, "failed": found.growth > limit},
    }


def _side_payload(side: Side) -> dict[str, object]:
    return {
        "name": side.name,
        "is_a": side.is_a,
        "verdict": side.verdict or None,
        "step_s": side.step_s,
        "tokens_per_s": side.tokens_per_s,
        **_at_payload(side.peak),
    }


def _at_payload(at: At) -> dict[str, object]:
    return {"moment": at.name, "phase": at.phase, "allocated_bytes": at.n_bytes}


def _row_payload(row: Changed) -> dict[str, object]:
    figures = {"before_bytes": row.before_bytes, "after_bytes": row.after_bytes, "change_bytes": row.change_bytes}
    blocks = {"before_blocks": row.before_blocks, "after_blocks": row.after_blocks}
    known = blocks if row.before_blocks or row.after_blocks else {}
    elsewhere = {"elsewhere": row.elsewhere} if row.elsewhere else {}
    return {"kind": row.kind, "what": row.what, "happened": row.happened, **figures, **known, **elsewhere}


def _moment_payload(moment: SameMoment) -> dict[str, object]:
    return {
        "of": "before" if moment.of_before else "after",
        "before": _at_payload(moment.before),
        "after": _at_payload(moment.after),
        "changes": [_row_payload(row) for row in moment.changes],
    }
