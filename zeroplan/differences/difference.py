"""Computes the difference of two sides line by line; the lines add up to the difference of the peaks, to the byte."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from zeroplan.differences.settings import NOT_SET
from zeroplan.differences.side import At, Grain, Held, Sent, Side, by_kind, from_the_nearer_end, loosened

Happened = Literal["came", "went", "grew", "shrank", "stayed"]


class Changed(NamedTuple):
    """One line of a comparison: bytes before and after, 0 if absent. [bytes]"""

    kind: str
    """The kind of memory, or the operation of a collective."""
    what: str
    """The tensor, module or place in code; empty if kinds are compared."""
    before_bytes: int
    """Its size in A."""
    after_bytes: int
    """Its size in B."""
    before_blocks: tuple[tuple[int, int], ...] = ()
    """For snapshots: each size of block in A, and the number of blocks of that size."""
    after_blocks: tuple[tuple[int, int], ...] = ()
    """The same for B."""
    elsewhere: str = ""
    """For lines that came or went: the moment at which the other side has the most of it, outside its peak."""

    @property
    def change_bytes(self) -> int:
        """After minus before. [bytes]"""
        return self.after_bytes - self.before_bytes

    @property
    def happened(self) -> Happened:
        """Whether the line came, went, grew, shrank or stayed.

        >>> Changed("gradients", "", 0, 5).happened, Changed("gradients", "", 5, 3).happened
        ('came', 'shrank')
        """
        if not self.change_bytes:
            return "stayed"
        if not self.before_bytes:
            return "came"
        if not self.after_bytes:
            return "went"
        return "grew" if self.change_bytes > 0 else "shrank"


class SameMoment(NamedTuple):
    """The moment of one side's peak compared with the corresponding moment of the other side."""

    of_before: bool
    """Whether it is the first side's peak."""
    before: At
    after: At
    changes: tuple[Changed, ...]
    """Empty if only the sums are known."""


class Setting(NamedTuple):
    """A setting that differs."""

    name: str
    before: str
    after: str


class Difference(NamedTuple):
    """The result of a comparison. Its ``changes`` add up to the difference of the peaks. [bytes]"""

    before: Side
    """A."""
    after: Side
    """B."""
    grain: Grain
    """The unit of comparison: ``tensor``, ``module``, ``place`` in the code, or ``kind``."""
    changes: tuple[Changed, ...]
    """The lines that changed from one peak to the other, the largest first."""
    kinds: tuple[Changed, ...]
    """The changes by kind of memory."""
    same_moments: tuple[SameMoment, ...]
    """If the peaks are at different moments: both sides at each of these moments."""
    held: tuple[Changed, ...]
    """The changes of the memory held between steps."""
    sent: tuple[Changed, ...]
    """Collectives: the bytes that one GPU sends per step, or if a side does not know them, the bytes of the buffers."""
    totals: tuple[Changed, ...]
    """Sums that both sides have, equal ones included."""
    settings: tuple[Setting, ...]
    """Settings that differ, by the names of the flags."""
    notes: tuple[str, ...]
    """Remarks on the limits of the comparison."""

    @property
    def peak(self) -> Changed:
        """The peaks of both sides."""
        return Changed("peak allocated", "", self.before.peak.n_bytes, self.after.peak.n_bytes)

    @property
    def sent_by_one(self) -> bool:
        """Whether ``sent`` has the bytes that one GPU sends; otherwise it has the bytes of buffers."""
        return _known_sent(self.before, self.after)

    @property
    def of_two_engines(self) -> bool:
        """Whether the sides are of jobs with different engines, whose tensors have different names."""
        return _of_two_engines(self.before, self.after)

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        moved = (one.change_bytes for one in self.totals)
        return not (self.changes or self.same_moments or self.held or self.sent or self.settings or any(moved))

    @property
    def growth(self) -> float:
        """The relative increase of the peak; infinite if the first peak is 0."""
        if self.peak.before_bytes:
            return self.peak.change_bytes / self.peak.before_bytes
        return float("inf") if self.peak.change_bytes else 0.0


def between(before: Side, after: Side) -> Difference:
    """Return the difference of two sides, in their common unit of comparison, or else by kind."""
    grain: Grain = before.grain if before.grain == after.grain else "kind"
    return Difference(
        before=before,
        after=after,
        grain=grain,
        changes=_placed(changes(before.peak.lines, after.peak.lines, grain), before, after, grain),
        kinds=changes(before.peak.lines, after.peak.lines, "kind"),
        same_moments=tuple(_same_moments(before, after, grain)),
        held=() if before.held is None or after.held is None else changes(before.held, after.held, grain),
        sent=_sent(before, after),
        totals=tuple(
            Changed(name, "", size, after.totals[name]) for name, size in before.totals.items() if name in after.totals
        ),
        settings=tuple(_settings(before, after)),
        notes=tuple(_notes(before, after)),
    )


def changes(before: Iterable[Held], after: Iterable[Held], grain: Grain) -> tuple[Changed, ...]:
    """Return the changes between two lists of lines, the largest first. Lines with the same kind and name are summed."""
    if grain == "kind":
        before, after = by_kind(before), by_kind(after)
    ours, theirs = _summed(before), _summed(after)
    rows = [_row(ours.get(key), theirs.get(key)) for key in ours | theirs]
    return _largest_first(_paired(rows))


def _summed(lines: Iterable[Held]) -> dict[tuple[str, str], Held]:
    sums: dict[tuple[str, str], Held] = {}
    for line in lines:
        key = (line.kind, line.what)
        known = sums.get(key)
        sums[key] = line if known is None else known._replace(n_bytes=known.n_bytes + line.n_bytes)
    return sums


def _row(before: Held | None, after: Held | None) -> Changed:
    one = after or before
    assert one is not None  # noqa: S101  at least one side has the line
    ours, theirs = before or Held(one.kind, one.what, 0), after or Held(one.kind, one.what, 0)
    return Changed(one.kind, one.what, ours.n_bytes, theirs.n_bytes, ours.blocks, theirs.blocks)


def _paired(rows: list[Changed]) -> list[Changed]:
    """The rows; a pair of one that went and one that came becomes one row if their names differ only in numbers."""
    alike: dict[tuple[str, str], dict[Happened, list[Changed]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        alike[row.kind, loosened(row.what)][row.happened].append(row)
    together: list[Changed] = []
    for found in alike.values():
        went, came = found["went"], found["came"]
        if len(went) == len(came) == 1:
            pair = came[0]._replace(before_bytes=went[0].before_bytes, before_blocks=went[0].before_blocks)
            found["went"], found["came"] = [], [pair]
        together += (row for happened in found.values() for row in happened)
    return together


def _largest_first(rows: Iterable[Changed]) -> tuple[Changed, ...]:
    changed = (row for row in rows if row.change_bytes)
    return tuple(sorted(changed, key=lambda row: (-abs(row.change_bytes), row.kind, row.what)))


def _same_moments(before: Side, after: Side, grain: Grain) -> Iterator[SameMoment]:
    """Yield the comparison at each side's peak moment, if these moments differ and the other side has a corresponding one."""
    if _is_same(before.peak, after.peak, grain):
        return
    theirs, ours = _like(before.peak, after.moments), _like(after.peak, before.moments)
    if theirs is not None:
        yield SameMoment(of_before=True, before=before.peak, after=theirs, changes=_at_both(before.peak, theirs, grain))
    if ours is not None:
        yield SameMoment(of_before=False, before=ours, after=after.peak, changes=_at_both(ours, after.peak, grain))


def _is_same(one: At, other: At, grain: Grain) -> bool:
    """Whether two peaks are at the same moment: by name, or by phase if the sides' names differ."""
    return one.phase == other.phase if grain == "kind" else from_the_nearer_end(one.name) == from_the_nearer_end(other.name)


def _at_both(before: At, after: At, grain: Grain) -> tuple[Changed, ...]:
    return changes(before.lines, after.lines, grain) if before.lines and after.lines else ()


def _like(at: At, moments: tuple[At, ...]) -> At | None:
    """The corresponding moment: the highest with the same name, the same block, any block, or the same phase, in this order."""
    names: tuple[Callable[[At], str], ...] = (
        lambda one: one.name,
        lambda one: from_the_nearer_end(one.name),
        lambda one: loosened(one.name),
        lambda one: one.phase,
    )
    for name_of in names:
        alike = [one for one in moments if name_of(one) == name_of(at)]
        if alike:
            return max(alike, key=lambda one: one.n_bytes)
    return None


def _placed(rows: Iterable[Changed], before: Side, after: Side, grain: Grain) -> tuple[Changed, ...]:
    """The rows; those that came or went get the moment at which the other side has the line."""
    moments = {"came": _moments_of(before, grain), "went": _moments_of(after, grain)}
    return tuple(row._replace(elsewhere=moments.get(row.happened, {}).get((row.kind, row.what), "")) for row in rows)


def _moments_of(side: Side, grain: Grain) -> dict[tuple[str, str], str]:
    """For each line of a side, the name of the moment at which it is largest."""
    most: dict[tuple[str, str], tuple[int, str]] = {}
    for moment in side.moments:
        lines = by_kind(moment.lines) if grain == "kind" else moment.lines
        for key, line in _summed(lines).items():
            if line.n_bytes > most.get(key, (0, ""))[0]:
                most[key] = (line.n_bytes, moment.name)
    return {key: name for key, (_, name) in most.items()}


def _of_two_engines(before: Side, after: Side) -> bool:
    return len({side.job.recipe.engine for side in (before, after) if side.job is not None}) > 1


def _known_sent(before: Side, after: Side) -> bool:
    return all(one.sent_bytes is not None for side in (before, after) for one in side.sent or ())


def _sent(before: Side, after: Side) -> tuple[Changed, ...]:
    """The changes of collectives by operation: with sent bytes if both sides know them, and by purpose if engines are equal."""
    if before.sent is None or after.sent is None:
        return ()
    known, named = _known_sent(before, after), not _of_two_engines(before, after)
    ours, theirs = ([_call(one, sent=known, named=known and named) for one in side] for side in (before.sent, after.sent))
    return changes(ours, theirs, "tensor")


def _call(one: Sent, *, sent: bool, named: bool) -> Held:
    """A collective as a line, with torch's spelling of the operation, all_reduce."""
    operation = one.operation.replace("-", "_").replace(" ", "_")
    return Held(operation, one.what if named else "", one.sent_bytes or 0 if sent else one.payload_bytes)


def _notes(before: Side, after: Side) -> Iterator[str]:
    """Yield both sides' notes, and a note if only one side includes the memory of CUDA's kernels."""
    yield from dict.fromkeys((*before.notes, *after.notes))
    on = {"A": before.tensors, "B": after.tensors}
    without = [letter for letter, tensors in on.items() if tensors not in ("", "cuda")]
    if len(without) == 1 and all(on.values()):
        yield (
            f"{without[0]} was measured on {on[without[0]]} tensors, which have no library workspaces and no scratch of CUDA's "
            "kernels; `zeroplan compare` leaves them out of an estimate"
        )


def _settings(before: Side, after: Side) -> Iterator[Setting]:
    """Yield the settings that differ; for sides of different types only those that both have."""
    ours, theirs = before.settings, after.settings
    every: Mapping[str, str] = {**ours, **theirs}
    for name in every:
        both = name in ours and name in theirs
        if (both or before.is_a == after.is_a) and (pair := (ours.get(name, NOT_SET), theirs.get(name, NOT_SET)))[0] != pair[1]:
            yield Setting(name, *pair)
