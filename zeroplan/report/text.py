"""Renders an estimate for a terminal: on one screen, or in full with every kind, collective and note."""

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from zeroplan.estimator import Estimate
from zeroplan.ledger import Line
from zeroplan.report.card import card_rows
from zeroplan.report.formulas import symbols_of, with_numbers
from zeroplan.report.screen import main_reason, screen_text
from zeroplan.report.tables import Table
from zeroplan.report.words import (
    WIDTH,
    every_note,
    headline,
    is_data_parallel,
    job_lines,
    kinds_by_size,
    no_change,
    notes_part,
    paragraphs,
    per_parameter,
    replay_sentence,
    verdict_sentence,
)
from zeroplan.traffic import wire_time
from zeroplan.transformer.legend import SYMBOLS
from zeroplan.units import GIBIBYTES, Unit

if TYPE_CHECKING:
    from zeroplan.remedies import Remedy

_COMMON_SYMBOLS = {"Ψ": "parameters", "L": "blocks", "N": "ranks that share one copy"}
_REASON = 52
"""Columns of a reason in the whole answer. [characters]"""


def estimate_text(
    answer: Estimate,
    notes: Sequence[str] = (),
    changes: "Sequence[Remedy] | None" = None,
    *,
    verbose: bool = False,
    explain: bool = False,
    unit: Unit = GIBIBYTES,
    lengths: Sequence[str] = (),
) -> str:
    """Return the answer on one screen (26 lines of 80 columns), or whole.

    ``verbose`` adds every kind of memory, every pipeline rank, every collective and every note; ``explain`` also adds each
    line's formula, numbers and source. ``changes`` is None if zeroplan did not look for any. If it found none, the answer says
    that none helps. ``lengths`` are lines on the steps' peaks if sequence lengths vary.
    """
    if verbose or explain:
        return _whole(answer, notes, changes, Table(unit), lengths, explain=explain)
    return screen_text(answer, notes, changes, unit, lengths)


def _whole(
    answer: Estimate,
    notes: Sequence[str],
    changes: "Sequence[Remedy] | None",
    table: Table,
    lengths: Sequence[str],
    *,
    explain: bool,
) -> str:
    return paragraphs(
        [
            list(_verdict(answer, changes, table)),
            [headline(answer), *job_lines(answer)],
            lengths,
            list(_states(answer, table, explain=explain)),
            list(_peak(answer, table, explain=explain)),
            textwrap.wrap(replay_sentence(answer, table.unit), WIDTH),
            list(_pipeline(answer, table)),
            [table.head("On the card at the peak", "range"), *card_rows(answer, table)],
            list(_communication(answer, table.unit, explain=explain)),
            list(_kept(answer, table.unit)) if explain else [],
            list(_legend(answer)) if explain else [],
            notes_part(every_note(answer, notes)),
        ]
    )


def _states(answer: Estimate, table: Table, *, explain: bool) -> Iterator[str]:
    yield table.head("Model states per GPU", "bytes, for Ψ parameters")
    for kind, n_bytes in answer.states_by_kind.items():
        yield table.row(kind.value, n_bytes, per_parameter(answer, kind))
        if explain:
            yield from _explained(answer, [line for line in answer.states if line.kind is kind], table.unit)
    yield table.total("together", sum(answer.states_by_kind.values()), per_parameter(answer))


def _peak(answer: Estimate, table: Table, *, explain: bool) -> Iterator[str]:
    yield f"Peak allocated: {table.unit.size(answer.peak_bytes)}"
    yield f"  at this moment: {answer.peak.name}"
    yield table.head("  alive then", "" if explain else "its largest tensor; --explain lists all")
    for kind, n_bytes in kinds_by_size(answer.peak.lines):
        lines = [line for line in answer.peak.lines if line.kind is kind]
        yield table.row(kind.value, n_bytes, "" if explain else main_reason(lines, _REASON))
        if explain:
            yield from _explained(answer, lines, table.unit)


def _pipeline(answer: Estimate, table: Table) -> Iterator[str]:
    """Yield every pipeline rank's peak and part of the model."""
    if not answer.pipeline:
        return
    yield table.head("Pipeline ranks, allocated by tensors")
    for one in sorted(answer.pipeline, key=lambda one: one.rank):
        mark = " <- this one" if one is answer.pipeline[0] else ""
        yield table.row(f"rank {one.rank}: {one.parameters:,} parameters", int(one.peak_bytes), f"{one.stages}{mark}")


def _explained(answer: Estimate, lines: Sequence[Line], unit: Unit) -> Iterator[str]:
    for line in lines:
        if not line.n_bytes:
            continue
        yield f"      {unit.size(int(line.n_bytes))}: {line.reason}"
        if line.formula:
            yield f"          = {line.formula} = {with_numbers(line.formula, answer)}"
        if line.source:
            yield f"          source: {line.source}"


def _verdict(answer: Estimate, changes: "Sequence[Remedy] | None", table: Table) -> Iterator[str]:
    yield textwrap.fill(verdict_sentence(answer, table.unit), WIDTH, break_long_words=False)
    if changes is not None and not changes and answer.fits is False:
        yield textwrap.fill(no_change(), WIDTH)
    if changes:
        yield from _changes(changes, table)


def _changes(changes: "Sequence[Remedy]", table: Table) -> Iterator[str]:
    """Yield each change as flags to copy, with the memory it needs, in words: a table, or one by one if flags are long."""
    title = f"It would fit with {'one of these' if len(changes) > 1 else 'this change'}"
    width = max(table.what, *(len(change.flags) for change in changes))
    if width + 12 > WIDTH:
        yield f"{title}:"
        for one in changes:
            yield f"  {one.flags}"
            yield _indented(f"{_in_words(one)}; needs {table.unit.size(one.needed_bytes)}")
        return
    wide = table._replace(what=width)
    yield wide.head(f"{title}, needing")
    for one in changes:
        row = wide.row(one.flags, one.needed_bytes)
        together = f"{row}  {_in_words(one)}"
        yield together if len(together) <= WIDTH else f"{row}\n{_indented(_in_words(one))}"


def _in_words(one: "Remedy") -> str:
    return f"{one.change}{one.how}"


def _indented(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)


def _communication(answer: Estimate, unit: Unit, *, explain: bool) -> Iterator[str]:
    traffic = answer.traffic
    if not traffic.total_bytes:
        yield "Nothing is sent: there is one rank."
        return
    yield f"Each GPU sends {unit.size(int(traffic.total_bytes))} per step,"
    if is_data_parallel(answer):
        yield (
            f"{traffic.relative_bytes_to_ddp:.2f}x the bytes and {traffic.relative_to_ddp:.2f}x the elements of "
            "plain data parallelism (one all-reduce of the gradients)"
        )
    time = wire_time(answer.bytes_on_slowest_link, answer.job.cluster, gpus=answer.job.mesh.world_size)
    if time is not None:
        yield f"at least {time.seconds:.3g} s on {time.link}, at its full rate and with nothing overlapped"
    small, small_bytes = unit.smaller[0]
    yield f"  {'collective':<14}{'calls':>7}{small + ' each':>10}{unit.name + ' sent':>10}  of what, when"
    for call in traffic.collectives:
        if call.sent_bytes:
            sizes = f"{int(call.n_bytes) / small_bytes:>10,.1f}{unit.amount(int(call.sent_bytes)):>10}"
            figures = f"  {call.operation:<14}{int(call.calls):>7,}{sizes}  "
            yield textwrap.fill(
                f"{call.what}, {call.when}", WIDTH, initial_indent=figures, subsequent_indent=" " * len(figures)
            )
            if explain and call.source:
                yield f"      source: {call.source}"


def _kept(answer: Estimate, unit: Unit) -> Iterator[str]:
    """Yield, tensor by tensor, the activations that one block keeps at the peak."""
    for kind, lines in answer.kept:
        yield f"What one {kind} block keeps from its forward to its backward"
        yield from _explained(answer, lines, unit)


def _legend(answer: Estimate) -> Iterator[str]:
    yield "Symbols"
    written = symbols_of(line.formula for line in (*answer.states, *answer.peak.lines))
    meanings = {**_COMMON_SYMBOLS, **SYMBOLS, **{symbol.name: symbol.meaning for symbol in answer.symbols}}
    for name, value in answer.legend.items():
        if value or name in written:
            yield f"  {name:<10}{value:>20,}  {meanings[name]}"
