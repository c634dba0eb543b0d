"""Renders an estimate as Markdown, to paste into a ticket or a design document."""

from collections.abc import Iterator, Sequence

from zeroplan.estimator import Estimate
from zeroplan.ledger import Line
from zeroplan.remedies import Remedy
from zeroplan.report.formulas import with_numbers
from zeroplan.report.words import (
    cells,
    every_note,
    headline,
    is_data_parallel,
    job_lines,
    kinds_by_size,
    no_change,
    paragraphs,
    per_parameter,
    replay_sentence,
    verdict_sentence,
)
from zeroplan.units import GB, GIB, GIBIBYTES, MB, MIB, format_size


def estimate_markdown(
    answer: Estimate, notes: Sequence[str] = (), changes: Sequence[Remedy] | None = None, *, explain: bool = False,
    lengths: Sequence[str] = (),
) -> str:  # fmt: skip
    """Return the whole answer as Markdown tables; ``explain`` lists the peak line by line with formula and source.

    ``changes`` is None if zeroplan did not look for any. If it found none, the answer says that none helps.
    """
    parts = [
        [f"## {headline(answer)}", "", *(f"{line}  " for line in job_lines(answer))],
        ["```text", *lengths, "```"] if lengths else [],
        list(_states(answer)),
        list(_peak(answer, explain=explain)),
        list(_card(answer)),
        [sentence] if (sentence := replay_sentence(answer, GIBIBYTES)) else [],
        list(_verdict(answer, changes)),
        list(_communication(answer)),
        [f"- {note}" for note in every_note(answer, notes)],
    ]
    return paragraphs(parts)


def _amounts(n_bytes: int) -> tuple[str, str]:
    return f"{n_bytes / GIB:,.2f}", f"{n_bytes / GB:,.2f}"


def _states(answer: Estimate) -> Iterator[str]:
    yield cells("model states per GPU", "GiB", "GB", "bytes per parameter")
    yield "|---|---:|---:|---|"
    for kind, n_bytes in answer.states_by_kind.items():
        yield cells(kind.value, *_amounts(n_bytes), per_parameter(answer, kind))
    yield cells("**together**", *_amounts(sum(answer.states_by_kind.values())), per_parameter(answer))


def _peak(answer: Estimate, *, explain: bool) -> Iterator[str]:
    yield f"**Peak allocated: {format_size(answer.peak_bytes)}**, at this moment: {answer.peak.name}."
    yield ""
    if explain:
        yield cells("kind", "GiB", "GB", "what", "formula", "source")
        yield "|---|---:|---:|---|---|---|"
        yield from (_line(answer, line) for line in answer.peak.lines if line.n_bytes)
        return
    yield cells("alive then", "GiB", "GB")
    yield "|---|---:|---:|"
    for kind, n_bytes in kinds_by_size(answer.peak.lines):
        yield cells(kind.value, *_amounts(n_bytes))


def _line(answer: Estimate, line: Line) -> str:
    formula = f"`{line.formula} = {with_numbers(line.formula, answer)}`" if line.formula else ""
    return cells(line.kind.value, *_amounts(int(line.n_bytes)), line.reason, formula, line.source)


def _card(answer: Estimate) -> Iterator[str]:
    yield cells("on the card", "expected GiB", "expected GB", "from GiB", "to GiB", "from GB", "to GB")
    yield "|---|---:|---:|---:|---:|---:|---:|"
    rows = [("reserved by the caching allocator", answer.reserved), *((part.what, part.band) for part in answer.outside)]
    for what, band in rows:
        ends = (f"{end / unit:,.2f}" for unit in (GIB, GB) for end in (band.low_bytes, band.high_bytes))
        yield cells(what, *_amounts(int(band.expected_bytes)), *ends)


def _verdict(answer: Estimate, changes: Sequence[Remedy] | None) -> Iterator[str]:
    yield verdict_sentence(answer)
    if changes:
        yield ""
        yield from (f"- `{one.flags}`: {one.change}; needs {format_size(one.needed_bytes)}{one.how}" for one in changes)
    elif changes is not None and answer.fits is False:
        yield no_change()


def _communication(answer: Estimate) -> Iterator[str]:
    traffic = answer.traffic
    sends = f"Each GPU sends {format_size(int(traffic.total_bytes))} per step"
    beside = f"{traffic.relative_to_ddp:.2f}x the elements and {traffic.relative_bytes_to_ddp:.2f}x the bytes"
    yield f"{sends}: {beside} of plain data parallelism." if is_data_parallel(answer) else f"{sends}."
    sent = [call for call in traffic.collectives if call.sent_bytes]
    if sent:
        yield ""
        yield cells("collective", "what", "when", "calls", "MiB each", "MB each", "GiB sent", "GB sent")
        yield "|---|---|---|---:|---:|---:|---:|---:|"
    for call in sent:
        each = (f"{int(call.n_bytes) / unit:,.1f}" for unit in (MIB, MB))
        yield cells(call.operation, call.what, call.when, f"{int(call.calls):,}", *each, *_amounts(int(call.sent_bytes)))
