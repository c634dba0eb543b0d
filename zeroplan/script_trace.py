"""The trace of a dry run: every block of memory that a script requested as one rank of N, as data. Reading it needs no torch."""

from collections.abc import Sequence
from dataclasses import fields
from itertools import accumulate
from operator import lt
from typing import Annotated, Literal

from zeroplan.errors import SpecError
from zeroplan.ledger import OF_A_STEP, Phase
from zeroplan.script_profile import ScriptProfile
from zeroplan.script_run import DryRun
from zeroplan.spec.base import CountOrZero, Range, Spec

SCHEMA_VERSION = 1

_MOST = 10**15
"""The limit of all counts, as in :mod:`zeroplan.spec.base`."""


class Blocks(Spec):
    """One entry per block in the order of requests, each field a column. [bytes]

    A moment is a number of requests and releases so far. A block is alive from ``born`` until before ``died``, which is one
    more than the last moment for blocks never released. ``operation``, ``module``, ``kind`` and ``line`` are indices into the
    trace's tables, ``span`` into its spans.
    """

    n_bytes: tuple[int, ...]
    born: tuple[int, ...]
    died: tuple[int, ...]
    operation: tuple[int, ...]
    module: tuple[int, ...]
    kind: tuple[int, ...]
    line: tuple[int, ...]
    span: tuple[int, ...]
    stream: tuple[int, ...]

    def check_rules(self) -> None:
        """Raise SpecError for columns of different lengths and figures out of range."""
        columns = [getattr(self, field.name) for field in fields(self)]
        _demand(len({len(column) for column in columns}) == 1, "the columns of blocks differ in length")
        _demand(all(_within(column, _MOST) for column in columns), "a figure of a block is out of range")
        _demand(all(map(lt, self.born, self.died)), "a block is released before it is requested")
        _demand(all(map(lt, self.born, self.born[1:])), "blocks are not in the order of their requests")


class SpanRecorded(Spec):
    """A part of the run: its step (the first is 0; -1 before it), its phase, and the moment it began."""

    step: Annotated[int, Range(-1, _MOST)]
    phase: str
    start: CountOrZero


class CollectiveRecorded(Spec):
    """One collective: when it was called, on how many ranks, and the bytes of its largest buffer."""

    operation: str
    dtype: str
    group: CountOrZero
    n_bytes: CountOrZero
    moment: CountOrZero
    among: str = ""
    """Which ranks of the mesh take part, a value of ``Among``; empty for a script's run, where it is unknown."""


class OperatorsRecorded(Spec):
    """The operators of the last step in order, each field a column. [bytes]

    ``name``, ``module`` and ``line`` are indices into these tables. ``flops`` follow torch's formulas; ``recomputed`` is 1 for
    forwards repeated in the backward. A collective has the bytes of its largest buffer as ``written_bytes``, and its place in
    ``groups``, counted from 1, as ``other``. Synchronisations are rows as well: recording an event, and waiting for an event, a
    stream or a collective; ``other`` is then the number of the event or stream. ``span`` and ``moment`` are the time.
    """

    names: tuple[str, ...]
    modules: tuple[str, ...]
    lines: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    name: tuple[int, ...]
    module: tuple[int, ...]
    line: tuple[int, ...]
    moment: tuple[int, ...]
    span: tuple[int, ...]
    stream: tuple[int, ...]
    flops: tuple[int, ...]
    read_bytes: tuple[int, ...]
    written_bytes: tuple[int, ...]
    recomputed: tuple[int, ...]
    other: tuple[int, ...]

    def check_rules(self) -> None:
        """Raise SpecError for columns of different lengths, unknown names, and figures out of range."""
        columns = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in _TABLES}
        _demand(len({len(column) for column in columns.values()}) == 1, "the columns of operators differ in length")
        _demand(all(_within(column, _MOST * _MOST) for column in columns.values()), "a figure of an operator is out of range")
        tables = ((self.name, self.names), (self.module, self.modules), (self.line, self.lines))
        _demand(
            all(_within(column, len(table) - 1) for column, table in tables),
            "an operator's name, module or line is not in its table",
        )


_TABLES = ("names", "modules", "lines", "groups")


class PoolsRecorded(Spec):
    """Private pools of CUDA graphs, numbered from 1: the pool of every block (0 outside captures).

    No graph used the pool ``let_go[i]`` after the moment ``let_go_at[i]``.
    """

    of_block: tuple[int, ...]
    let_go: tuple[int, ...] = ()
    let_go_at: tuple[int, ...] = ()

    def check_rules(self) -> None:
        """Raise SpecError for columns that do not fit together, and figures out of range."""
        _demand(len(self.let_go) == len(self.let_go_at), "the columns of pools differ in length")
        _demand(
            all(_within(column, _MOST) for column in (self.of_block, self.let_go, self.let_go_at)), "a pool is out of range"
        )


class Trace(Spec):
    """Every request and release, in order. ``sources`` is the text of each of ``lines``, empty if unknown.

    ``emptied`` lists the moments at which the script emptied the allocator's cache (``torch.cuda.empty_cache``). ``pools``
    exists if the script captured CUDA graphs.
    """

    moments: CountOrZero
    operations: tuple[str, ...]
    modules: tuple[str, ...]
    kinds: tuple[str, ...]
    lines: tuple[str, ...]
    sources: tuple[str, ...]
    spans: tuple[SpanRecorded, ...]
    collectives: tuple[CollectiveRecorded, ...]
    blocks: Blocks
    operators: OperatorsRecorded | None = None
    emptied: tuple[int, ...] = ()
    pools: PoolsRecorded | None = None

    def check_rules(self) -> None:
        """Raise SpecError for a trace whose parts do not fit together."""
        blocks = self.blocks
        tables = (
            (blocks.operation, self.operations), (blocks.module, self.modules), (blocks.kind, self.kinds),
            (blocks.line, self.lines), (blocks.span, self.spans),
        )  # fmt: skip
        _demand(
            all(_within(column, len(table) - 1) for column, table in tables),
            "a block's name, module, kind, line or span is not in its table",
        )
        _demand(len(self.sources) == len(self.lines), "lines and sources differ in length")
        moments = [*blocks.born, *(moment for moment in blocks.died if moment <= self.moments)]
        _demand(
            sorted(moments) == list(range(1, len(moments) + 1)),
            "two requests or releases have the same moment, or one has none",
        )
        _demand(self.moments == len(moments), "the number of moments differs from that of requests and releases")
        starts = [span.start for span in self.spans]
        _demand(starts == sorted(starts) and _within(starts, self.moments), "the parts of the run are not in order")
        _demand(_within([one.moment for one in self.collectives], self.moments), "a collective's moment is outside the run")
        _demand(
            self.pools is None or len(self.pools.of_block) == len(blocks.born),
            "the number of pools differs from that of blocks",
        )
        _demand(_within(self.emptied, self.moments), "a moment of emptying the cache is outside the run")

    @property
    def live(self) -> list[int]:
        """Bytes alive before the first request and after every request and release. [bytes]"""
        return live_bytes(self.moments, self.blocks.n_bytes, self.blocks.born, self.blocks.died)

    @property
    def last_step(self) -> range:
        """The moments of the last step, both ends included; of the whole run if it has no step."""
        last = max((span.step for span in self.spans if span.phase == Phase.STEP), default=-1)
        found = [self.window(at) for at, span in enumerate(self.spans) if span.step == last and span.phase in OF_A_STEP]
        return range(found[0].start, found[-1].stop) if found else range(self.moments + 1)

    def window(self, index: int) -> range:
        """The moments of a span, both ends included."""
        spans = self.spans
        end = spans[index + 1].start if index + 1 < len(spans) else self.moments
        return range(spans[index].start, end + 1)


def live_bytes(moments: int, n_bytes: Sequence[int], born: Sequence[int], died: Sequence[int]) -> list[int]:
    """Bytes alive at every moment, from the blocks' sizes and lives. [bytes]

    >>> live_bytes(3, (10, 5), (1, 2), (3, 4))
    [0, 10, 15, 5]
    """
    changes = [0] * (moments + 2)
    for size, start, end in zip(n_bytes, born, died, strict=True):
        changes[start] += size
        changes[min(end, moments + 1)] -= size
    return list(accumulate(changes[:-1]))


class SavedRun(Spec):
    """A dry run, with its trace and a profile of its model if requested."""

    content: Literal["zeroplan dryrun"] = "zeroplan dryrun"
    schema_version: Annotated[int, Range(1, SCHEMA_VERSION)] = SCHEMA_VERSION
    run: DryRun
    trace: Trace | None = None
    general: ScriptProfile | None = None


def as_data(spec: object) -> dict[str, object]:
    """A spec's fields, as ``default`` of ``json.dumps``; columns are not copied as by ``asdict``."""
    if not isinstance(spec, Spec):
        raise TypeError(f"a {type(spec).__name__} is not a Spec")
    return {field.name: getattr(spec, field.name) for field in fields(spec)}


def _demand(holds: bool, otherwise: str) -> None:  # noqa: FBT001
    if not holds:
        raise SpecError(otherwise)


def _within(column: Sequence[int], most: int) -> bool:
    return not column or (min(column) >= 0 and max(column) <= most)
