"""Converts a recording to the stored trace: columns of numbers, and every name once."""

import linecache
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from zeroplan.dryrun.operators import Operator
from zeroplan.script_run import OperatorsOfStep
from zeroplan.script_trace import Blocks, CollectiveRecorded, OperatorsRecorded, PoolsRecorded, SpanRecorded, Trace
from zeroplan.verify.fake_cuda.stand_ins import shown_file
from zeroplan.verify.watching.recording import Block, Recording
from zeroplan.verify.watching.timeline import Timeline

_LONGEST_SOURCE = 120
"""Longest line of source code to store. [characters]"""


def trace_of(
    timeline: Timeline, lines: Mapping[Block, str], *, target: str, operators: OperatorsRecorded | None = None
) -> Trace:  # fmt: skip
    """The stored data of a recording, with the source line of every block; ``target`` is the script's file."""
    recording = timeline.recording
    operations, modules, kinds, where = (_Names() for _ in range(4))
    blocks = Blocks(
        n_bytes=tuple(block.n_bytes for block in recording.blocks),
        born=tuple(block.born for block in recording.blocks),
        died=tuple(min(block.died, recording.now + 1) for block in recording.blocks),
        operation=operations.numbered([block.operation for block in recording.blocks]),
        module=modules.numbered([block.module for block in recording.blocks]),
        kind=kinds.numbered([timeline.kind(block).value for block in recording.blocks]),
        line=where.numbered([lines.get(block, "") for block in recording.blocks]),
        span=tuple(block.span for block in recording.blocks),
        stream=tuple(block.stream for block in recording.blocks),
    )
    return Trace(
        moments=recording.now,
        operations=tuple(operations.known),
        modules=tuple(modules.known),
        kinds=tuple(kinds.known),
        lines=tuple(where.known),
        sources=_sources(tuple(where.known), target),
        spans=tuple(SpanRecorded(step=span.step, phase=span.phase.value, start=span.start) for span in recording.spans),
        collectives=tuple(
            CollectiveRecorded(
                operation=call.operation, dtype=call.dtype, group=call.group, n_bytes=call.n_bytes, moment=call.moment
            )
            for call in recording.calls
        ),
        blocks=blocks,
        operators=operators,
        emptied=recording.emptied,
        pools=_pools(recording),
    )


def _pools(recording: Recording) -> PoolsRecorded | None:
    of_block = tuple(block.pool for block in recording.blocks)
    if not any(of_block):
        return None
    return PoolsRecorded(
        of_block=of_block,
        let_go=tuple(pool for _, pool in recording.let_go),
        let_go_at=tuple(moment for moment, _ in recording.let_go),
    )


def operators_recorded(rows: Sequence[Operator], groups: Iterable[tuple[int, ...]]) -> OperatorsRecorded:
    """The operators of a step as columns."""
    names, modules, lines = (_Names() for _ in range(3))
    name, module, line, *rest = (list(column) for column in zip(*rows, strict=True)) if rows else ([] for _ in Operator._fields)
    columns = dict(zip(Operator._fields[3:], (tuple(map(int, column)) for column in rest), strict=True))
    return OperatorsRecorded(
        name=names.numbered(name), module=modules.numbered(module), line=lines.numbered(line), names=tuple(names.known),
        modules=tuple(modules.known), lines=tuple(lines.known), groups=tuple(groups), **columns,
    )  # fmt: skip


def operators_summed(rows: Sequence[Operator]) -> OperatorsOfStep:
    """The totals of a step's operators; collectives and synchronisations count no bytes."""
    computing = [row for row in rows if row.read_bytes]
    return OperatorsOfStep(
        count=len(computing), streams=len({row.stream for row in computing}), flops=sum(row.flops for row in rows),
        recomputed_flops=sum(row.flops for row in rows if row.recomputed),
        read_bytes=sum(row.read_bytes for row in computing), written_bytes=sum(row.written_bytes for row in computing),
    )  # fmt: skip


class _Names:
    """A table of names in order of appearance."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def numbered(self, names: Sequence[str]) -> tuple[int, ...]:
        return tuple(self.known.setdefault(name, len(self.known)) for name in names)


def _sources(lines: Sequence[str], target: str) -> tuple[str, ...]:
    """The text of source lines named in reports; empty if the file is not found."""
    files = _files(target)
    return tuple(_text(files.get(name, ""), number) for name, _, number in (line.rpartition(":") for line in lines))


def _files(target: str) -> dict[str, str]:
    """The file behind each name in reports: a user's relative path, or a library's module."""
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(file, str):
            found[name] = found[shown_file(file)] = file
    return found | {shown_file(target): target, Path(target).name: target}


def _text(file: str, number: str) -> str:
    return linecache.getline(file, int(number)).strip()[:_LONGEST_SOURCE] if file and number.isdecimal() else ""
