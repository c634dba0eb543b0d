"""What changed between two dry runs: peak, kinds, modules, lines of code, traffic? As data, and as one table."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from zeroplan.report.dryrun import shown_name, small_unit
from zeroplan.report.words import COLUMNS
from zeroplan.script_run import DryRun
from zeroplan.script_trace import SavedRun
from zeroplan.units import GIBIBYTES, Unit

_TOTALS = "In all"
_MOST = 4
"""Rows of each group; with headings and totals at most 26 lines."""
_NAME, _AMOUNT, _CHANGE = 42, 11, 12
"""Columns of the table. [characters]"""


class Change(NamedTuple):
    """One figure before and after; 0 where it did not exist. [bytes]"""

    group: str
    name: str
    before_bytes: int
    after_bytes: int

    @property
    def change_bytes(self) -> int:
        """The growth."""
        return self.after_bytes - self.before_bytes


def changes(before: SavedRun, after: SavedRun) -> tuple[Change, ...]:
    """Return the totals of two runs, and every kind, module, line and collective that changed, the largest first.

    Kinds, modules and lines are those at the peak of each run's last step. A line of code is identified by file and text, so
    the line number may change.
    """
    first, second = before.run, after.run
    groups: tuple[tuple[str, Mapping[str, int], Mapping[str, int]], ...] = (
        ("By kind at the peak", first.steps[-1].peak.kinds, second.steps[-1].peak.kinds),
        ("By module at the peak", _modules(first), _modules(second)),
        ("By line of code at the peak", *_lines(before, after)),
        ("Collectives of a step", _sent(first), _sent(second)),
    )
    ours, theirs = _totals(first), _totals(second)
    totals = [Change(_TOTALS, name, ours[name], theirs[name]) for name in ours]
    return (*totals, *(change for group in groups for change in _of_group(*group)))


def _totals(run: DryRun) -> dict[str, int]:
    return {
        "peak allocated": run.steps[-1].peak.peak_bytes,
        "highest of the whole run": run.peak_bytes,
        "held between steps": run.steps[-1].held_bytes,
        "reserved by the allocator": run.allocator[0].reserved_bytes,
    }


def _of_group(group: str, before: Mapping[str, int], after: Mapping[str, int]) -> list[Change]:
    every = (Change(group, name, before.get(name, 0), after.get(name, 0)) for name in before | after)  # type: ignore[operator]
    return sorted((one for one in every if one.change_bytes), key=lambda one: (-abs(one.change_bytes), one.name))


def _modules(run: DryRun) -> Counter[str]:
    found: Counter[str] = Counter()
    for part in run.modules:
        found[shown_name(part.name)] += part.n_bytes
    return found


def _sent(run: DryRun) -> Counter[str]:
    found: Counter[str] = Counter()
    for one in run.collectives:
        found[f"{one.operation} of {one.dtype}"] += one.n_bytes
    return found


def _lines(before: SavedRun, after: SavedRun) -> tuple[Counter[str], Counter[str]]:
    """Return bytes by line, under the later run's name for it."""
    now = {key: name for name, key in _keys(after).items()}
    found: list[Counter[str]] = []
    for saved in (before, after):
        keys, one = _keys(saved), Counter[str]()
        for part in saved.run.lines:
            key = keys.get(part.name, part.name)
            one[now.get(key, part.name) or "no line of Python"] += part.n_bytes
        found.append(one)
    return found[0], found[1]


def _keys(saved: SavedRun) -> dict[str, str]:
    """Return each line's identity: file and text, or only its name if the text is unknown."""
    if saved.trace is None:
        return {}
    named = zip(saved.trace.lines, saved.trace.sources, strict=True)
    return {line: f"{line.rpartition(':')[0]}: {text}" if text else line for line, text in named}


def changes_text(before: SavedRun, after: SavedRun, *, where: str, unit: Unit = GIBIBYTES) -> str:
    """Return the changes as one table of at most 26 lines of ``COLUMNS`` columns; ``where`` names the earlier run's file."""
    small = small_unit(max(before.run, after.run, key=lambda run: run.peak_bytes), unit)
    rows = changes(before, after)
    lines = [_head(before.run, after.run, where), _columns(small)]
    for group in dict.fromkeys(row.group for row in rows):
        mine = [row for row in rows if row.group == group]
        lines += _rows(mine, small) if group == _TOTALS else [group, *_few(mine, small)]
    if len(rows) == len(_totals(before.run)):
        lines.append("Nothing else changed.")
    return "\n".join(line[:COLUMNS] for line in lines)


def _head(before: DryRun, after: DryRun, where: str) -> str:
    """Return the earlier run's file, and the differences between the jobs."""
    sides = ((before.gpus, after.gpus, "ranks"), (before.gpu, after.gpu, "GPU"), (before.rank, after.rank, "rank"))
    other = "".join(f"; {name} {one} before, {two} after" for one, two, name in sides if one != two)
    room = COLUMNS - len("Against ") - len(other) - 1
    return f"Against {where if len(where) <= room else '…' + where[-max(room - 1, 1) :]}{other}."


def _columns(unit: Unit) -> str:
    return f"{unit.name:<{_NAME + 2}}{'before':>{_AMOUNT}}{'after':>{_AMOUNT}}{'change':>{_CHANGE}}"


def _few(rows: Sequence[Change], unit: Unit) -> Iterator[str]:
    """Yield the largest changes, and the rest in one row."""
    shown = rows if len(rows) <= _MOST else rows[: _MOST - 1]
    yield from _rows(shown, unit)
    if rest := rows[len(shown) :]:
        sums = (sum(row.before_bytes for row in rest), sum(row.after_bytes for row in rest))
        yield from _rows([Change("", f"{len(rest)} smaller changes", *sums)], unit)


def _rows(rows: Sequence[Change], unit: Unit) -> Iterator[str]:
    for row in rows:
        before, after = (unit.amount(one) if one else "-" for one in (row.before_bytes, row.after_bytes))
        change = f"{row.change_bytes / unit.n_bytes:+,.2f}" if row.change_bytes else "same"
        yield f"  {_shortened(row.name):<{_NAME}}{before:>{_AMOUNT}}{after:>{_AMOUNT}}{change:>{_CHANGE}}"


def _shortened(name: str) -> str:
    return name if len(name) <= _NAME else f"…{name[1 - _NAME :]}"
