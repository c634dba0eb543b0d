"""The difference of two sides, line by line: it adds up to the difference of their peaks, to the byte."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from zeroplan.differences.settings import NOT_SET
from zeroplan.differences.side import At, Grain, Held, Sent, Side, by_kind, from_the_nearer_end, loosened

Happened = Literal["came", "went", "grew", "shrank", "stayed"]


class Changed(NamedTuple):
    """Something before and after; 0 where it is not there. [bytes]"""

    kind: str
    """What the memory is for, or the operation of a collective."""
    what: str
    """Which tensor, module or place; empty where kinds are compared."""
    before_bytes: int
    """In the first of the two."""
    after_bytes: int
    """In the second."""
    before_blocks: tuple[tuple[int, int], ...] = ()
    """Sizes of blocks and how many of each, where both are snapshots."""
    after_blocks: tuple[tuple[int, int], ...] = ()
    """Likewise of the second."""
    elsewhere: str = ""
    """Of what came or went: the moment at which the other of the two has it, though not at its peak."""

    @property
    def change_bytes(self) -> int:
        """How much it grew. [bytes]"""
        return self.after_bytes - self.before_bytes

    @property
    def happened(self) -> Happened:
        """What happened to it.

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
    """The moment of one side's peak, and what the other has at the moment that is most like it."""

    of_before: bool
    """Whether it is the first side's peak."""
    before: At
    after: At
    changes: tuple[Changed, ...]
    """Empty where only sums are known."""


class Setting(NamedTuple):
    """A setting that is another one."""

    name: str
    before: str
    after: str


class Difference(NamedTuple):
    """What changed between two things. The changes at their peaks add up to the difference of the peaks. [bytes]"""

    before: Side
    """The first of the two."""
    after: Side
    """The second."""
    grain: Grain
    """How finely they are compared: by ``tensor``, ``module``, ``place`` in the code, or ``kind``."""
    changes: tuple[Changed, ...]
    """What came, went, grew or shrank between the peaks, each side at its own; the largest first."""
    kinds: tuple[Changed, ...]
    """The same by kind of memory."""
    same_moments: tuple[SameMoment, ...]
    """Where the peaks are at different moments: both at the moment of each."""
    held: tuple[Changed, ...]
    """What changed of that which is held between steps."""
    sent: tuple[Changed, ...]
    """Collectives: bytes that one GPU sends per step, or where a side does not know that, of their buffers."""
    totals: tuple[Changed, ...]
    """Sums that both sides have, those that stayed among them."""
    settings: tuple[Setting, ...]
    """Settings that differ, by the names of the flags."""
    notes: tuple[str, ...]
    """What a reader must know to judge it."""

    @property
    def peak(self) -> Changed:
        """The two peaks."""
        return Changed("peak allocated", "", self.before.peak.n_bytes, self.after.peak.n_bytes)

    @property
    def sent_by_one(self) -> bool:
        """Whether ``sent`` has what one GPU sends, and not the bytes of buffers."""
        return _known_sent(self.before, self.after)

    @property
    def of_two_engines(self) -> bool:
        """Whether both are of a job, each with an engine of its own, whose tensors have other names."""
        return _of_two_engines(self.before, self.after)

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        moved = (one.change_bytes for one in self.totals)
        return not (self.changes or self.same_moments or self.held or self.sent or self.settings or any(moved))

    @property
    def growth(self) -> float:
        """By which part of the first peak the second is higher; infinite where the first is of nothing."""
        if self.peak.before_bytes:
            return self.peak.change_bytes / self.peak.before_bytes
        return float("inf") if self.peak.change_bytes else 0.0


def between(before: Side, after: Side) -> Difference:
    """The difference of two sides, as finely as both tell their memory apart."""
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
    """What changed between two lists of lines, the largest first. Lines of one kind and name count as one."""
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
    assert one is not None  # noqa: S101  a row is of one side at least
    ours, theirs = before or Held(one.kind, one.what, 0), after or Held(one.kind, one.what, 0)
    return Changed(one.kind, one.what, ours.n_bytes, theirs.n_bytes, ours.blocks, theirs.blocks)


def _paired(rows: list[Changed]) -> list[Changed]:
    """The rows, with what went and what came as one where their names differ in numbers alone and no other is like them."""
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
    """Both at the moment of each side's peak, where these are two; nothing where a side has no other moments."""
    if _is_same(before.peak, after.peak, grain):
        return
    theirs, ours = _like(before.peak, after.moments), _like(after.peak, before.moments)
    if theirs is not None:
        yield SameMoment(of_before=True, before=before.peak, after=theirs, changes=_at_both(before.peak, theirs, grain))
    if ours is not None:
        yield SameMoment(of_before=False, before=ours, after=after.peak, changes=_at_both(ours, after.peak, grain))


def _is_same(one: At, other: At, grain: Grain) -> bool:
    """Whether two peaks are at one moment; names of different programs' moments are not alike, and their phases are."""
    return one.phase == other.phase if grain == "kind" else from_the_nearer_end(one.name) == from_the_nearer_end(other.name)


def _at_both(before: At, after: At, grain: Grain) -> tuple[Changed, ...]:
    return changes(before.lines, after.lines, grain) if before.lines and after.lines else ()


def _like(at: At, moments: tuple[At, ...]) -> At | None:
    """The highest moment of the same name, of the block at the same place, of any block, or of the same phase."""
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
    """The rows, each of what came or went with the moment at which the other side has it."""
    moments = {"came": _moments_of(before, grain), "went": _moments_of(after, grain)}
    return tuple(row._replace(elsewhere=moments.get(row.happened, {}).get((row.kind, row.what), "")) for row in rows)


def _moments_of(side: Side, grain: Grain) -> dict[tuple[str, str], str]:
    """Of everything that a side has at some moment, the moment at which there is most of it."""
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
    """By operation with the bytes of its buffers; where both know what is sent with that, and of one engine by what it is for."""
    if before.sent is None or after.sent is None:
        return ()
    known, named = _known_sent(before, after), not _of_two_engines(before, after)
    ours, theirs = ([_call(one, sent=known, named=known and named) for one in side] for side in (before.sent, after.sent))
    return changes(ours, theirs, "tensor")


def _call(one: Sent, *, sent: bool, named: bool) -> Held:
    """As a line; engines and their users write all-reduce, torch writes all_reduce."""
    operation = one.operation.replace("-", "_").replace(" ", "_")
    return Held(operation, one.what if named else "", one.sent_bytes or 0 if sent else one.payload_bytes)


def _notes(before: Side, after: Side) -> Iterator[str]:
    """What is known of both, and that what only CUDA's kernels take is on one side alone."""
    yield from dict.fromkeys((*before.notes, *after.notes))
    on = {"A": before.tensors, "B": after.tensors}
    without = [letter for letter, tensors in on.items() if tensors not in ("", "cuda")]
    if len(without) == 1 and all(on.values()):
        yield (
            f"{without[0]} was measured on {on[without[0]]} tensors, which have no library workspaces and no scratch of CUDA's "
            "kernels; `zeroplan compare` leaves them out of an estimate"
        )


def _settings(before: Side, after: Side) -> Iterator[Setting]:
    """Settings that differ: of things of one sort all of them, else those that both have."""
    ours, theirs = before.settings, after.settings
    every: Mapping[str, str] = {**ours, **theirs}
    for name in every:
        both = name in ours and name in theirs
        if (both or before.is_a == after.is_a) and (pair := (ours.get(name, NOT_SET), theirs.get(name, NOT_SET)))[0] != pair[1]:
            yield Setting(name, *pair)
