"""The answer as text for a terminal: the account, the peak, the verdict, the traffic; with ``explain``, every formula."""

import textwrap
from collections.abc import Iterator, Sequence

from zeroplan.estimator import Estimate
from zeroplan.ledger import Band, Line
from zeroplan.remedies import Remedy
from zeroplan.report.formulas import symbols_of, with_numbers
from zeroplan.report.words import (
    NO_CHANGE,
    WIDTH,
    every_note,
    headline,
    job_lines,
    kinds_by_size,
    notes_part,
    paragraphs,
    per_parameter,
    verdict_sentence,
)
from zeroplan.traffic import wire_time
from zeroplan.transformer.legend import SYMBOLS
from zeroplan.units import GB, GIB, MB, MIB, format_size

_COMMON_SYMBOLS = {"Ψ": "parameters", "L": "blocks", "N": "ranks that share one copy"}
#: Columns: what a line is, and why; with the two figures between them a line has 100.
_WHAT = 34
_REASON = 42


def estimate_text(
    answer: Estimate, notes: Sequence[str] = (), changes: Sequence[Remedy] | None = None, *, explain: bool = False
) -> str:
    """Return the whole answer, about 40 lines, or with ``explain`` every line with its formula, numbers and source.

    ``changes`` None means that none were looked for; where they were and there are none, the answer says so.
    """
    parts = [
        [headline(answer), *job_lines(answer)],
        list(_states(answer, explain=explain)),
        list(_peak(answer, explain=explain)),
        list(_pipeline(answer)),
        list(_card(answer)),
        list(_verdict(answer, changes)),
        list(_communication(answer, explain=explain)),
        list(_kept(answer)) if explain else [],
        list(_legend(answer)) if explain else [],
        notes_part(every_note(answer, notes)),
    ]
    return paragraphs(parts)


def _row(what: str, n_bytes: int, reason: str = "") -> str:
    return f"  {what:<{_WHAT}.{_WHAT}}{n_bytes / GB:>10,.2f}{n_bytes / GIB:>10,.2f}  {reason}".rstrip()


def _head(title: str, last: str = "") -> str:
    return f"{title:<{_WHAT + 2}}{'GB':>10}{'GiB':>10}  {last}".rstrip()


def _states(answer: Estimate, *, explain: bool) -> Iterator[str]:
    yield _head("Model states per GPU", "bytes, for Ψ parameters")
    for kind, n_bytes in answer.states_by_kind.items():
        yield _row(kind.value, n_bytes, per_parameter(answer, kind))
        if explain:
            yield from _explained(answer, [line for line in answer.states if line.kind is kind])
    yield _row("together", sum(answer.states_by_kind.values()), per_parameter(answer))


def _peak(answer: Estimate, *, explain: bool) -> Iterator[str]:
    yield f"Peak allocated: {format_size(answer.peak_bytes)}"
    yield f"at this moment: {answer.peak.name}"
    yield _head("  alive then", "" if explain else "the largest of it; --explain lists all")
    for kind, n_bytes in kinds_by_size(answer.peak.lines):
        lines = [line for line in answer.peak.lines if line.kind is kind and line.n_bytes]
        yield _row(kind.value, n_bytes, "" if explain else _main_reason(lines))
        if explain:
            yield from _explained(answer, lines)


def _pipeline(answer: Estimate) -> Iterator[str]:
    """The peak of every pipeline rank, and what it has of the model."""
    if not answer.pipeline:
        return
    yield _head("Pipeline ranks, allocated by tensors")
    for one in sorted(answer.pipeline, key=lambda one: one.rank):
        mark = " <- this one" if one is answer.pipeline[0] else ""
        yield _row(f"rank {one.rank}: {one.parameters:,} parameters", int(one.peak_bytes), f"{one.stages}{mark}")


def _main_reason(lines: list[Line]) -> str:
    """The largest line's reason, and how many more there are: ``--explain`` lists them."""
    largest = max(lines, key=lambda line: int(line.n_bytes))
    others = "" if len(lines) == 1 else f"; {len(lines) - 1} more"
    return f"{textwrap.shorten(largest.reason, _REASON - len(others), placeholder='…')}{others}"


def _explained(answer: Estimate, lines: Sequence[Line]) -> Iterator[str]:
    for line in lines:
        if not line.n_bytes:
            continue
        yield f"      {format_size(int(line.n_bytes))}: {line.reason}"
        if line.formula:
            yield f"          = {line.formula} = {with_numbers(line.formula, answer)}"
        if line.source:
            yield f"          source: {line.source}"


def _card(answer: Estimate) -> Iterator[str]:
    outside = answer.outside_band
    on_card = Band(*(int(a) + int(b) for a, b in zip(answer.reserved, outside, strict=True)))
    yield _head("On the card", "from, to in GB (in GiB)")
    yield _band_row("reserved by the caching allocator", answer.reserved)
    for part in answer.outside:
        yield _band_row(part.what, part.band)
    yield _band_row("what nvidia-smi would show", on_card)
    for what, per_rank, per_node in (
        ("host memory per rank", answer.host_bytes, answer.host_bytes_per_node),
        ("NVMe per rank", answer.nvme_bytes, answer.nvme_bytes_per_node),
    ):
        if per_rank:
            yield _row(what, per_rank)
            if per_node is not None:
                yield _row(f"on a node of {answer.ranks_per_node}", per_node)


def _band_row(what: str, band: Band) -> str:
    low, high = band.low_bytes, band.high_bytes
    span = f"{low / GB:,.2f} to {high / GB:,.2f} ({low / GIB:,.2f} to {high / GIB:,.2f})"
    return _row(what, int(band.expected_bytes), span)


def _verdict(answer: Estimate, changes: Sequence[Remedy] | None) -> Iterator[str]:
    yield textwrap.fill(verdict_sentence(answer), WIDTH, break_long_words=False)
    if changes is not None and not changes and answer.fits is False:
        yield textwrap.fill(NO_CHANGE, WIDTH)
    if changes:
        yield from _changes(changes)


def _changes(changes: Sequence[Remedy]) -> Iterator[str]:
    """Each change as flags to copy, with what it would need and in words: a table, or where flags are long, one by one."""
    title = f"It would fit with {'one of these' if len(changes) > 1 else 'this change'}"
    width = max(_WHAT, *(len(change.flags) for change in changes))
    if width + 22 > WIDTH:
        yield f"{title}:"
        for one in changes:
            yield f"  {one.flags}"
            yield _indented(f"{one.change}; needs {format_size(one.needed_bytes)}")
        return
    yield f"{title + ', needing':<{width + 2}}{'GB':>10}{'GiB':>10}"
    for one in changes:
        row = f"  {one.flags:<{width}}{one.needed_bytes / GB:>10,.2f}{one.needed_bytes / GIB:>10,.2f}"
        together = f"{row}  {one.change}"
        yield together if len(together) <= WIDTH else f"{row}\n{_indented(one.change)}"


def _indented(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)


def _communication(answer: Estimate, *, explain: bool) -> Iterator[str]:
    traffic = answer.traffic
    if not traffic.total_bytes:
        yield "Nothing is sent: there is one rank."
        return
    yield f"Each GPU sends {format_size(int(traffic.total_bytes))} per step,"
    yield (
        f"{traffic.relative_to_ddp:.2f}x the elements and {traffic.relative_bytes_to_ddp:.2f}x the bytes of "
        "plain data parallelism (one all-reduce of the gradients)"
    )
    time = wire_time(answer.bytes_on_slowest_link, answer.job.cluster, gpus=answer.job.mesh.world_size)
    if time is not None:
        yield f"at least {time.seconds:.3g} s on {time.link}, at its full rate and with nothing overlapped"
    columns = f"{'MB each':>10}{'MiB each':>10}{'GB sent':>9}{'GiB sent':>9}"
    yield f"  {'collective':<14}{'calls':>7}{columns}  of what, when"
    for call in traffic.collectives:
        if call.sent_bytes:
            each, sent = int(call.n_bytes), int(call.sent_bytes)
            sizes = f"{each / MB:>10,.1f}{each / MIB:>10,.1f}{sent / GB:>9,.2f}{sent / GIB:>9,.2f}"
            figures = f"  {call.operation:<14}{int(call.calls):>7,}{sizes}  "
            yield textwrap.fill(
                f"{call.what}, {call.when}", WIDTH, initial_indent=figures, subsequent_indent=" " * len(figures)
            )
            if explain and call.source:
                yield f"      source: {call.source}"


def _kept(answer: Estimate) -> Iterator[str]:
    """Tensor by tensor what the peak gives as one line: what one block keeps from its forward to its backward."""
    for what, lines in answer.kept:
        yield f"What {what} keeps from its forward to its backward"
        yield from _explained(answer, lines)


def _legend(answer: Estimate) -> Iterator[str]:
    yield "Symbols"
    written = symbols_of(line.formula for line in (*answer.states, *answer.peak.lines))
    meanings = {**_COMMON_SYMBOLS, **SYMBOLS, **{symbol.name: symbol.meaning for symbol in answer.symbols}}
    for name, value in answer.legend.items():
        if value or name in written:
            yield f"  {name:<10}{value:>20,}  {meanings[name]}"
