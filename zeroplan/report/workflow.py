"""Renders a loop of phases as text and data: each phase's peak, memory that stays between phases, host memory."""

import textwrap
from collections.abc import Iterator, Sequence

from zeroplan.ledger import Line
from zeroplan.report.layout import layout_words
from zeroplan.report.payload import SCHEMA_VERSION
from zeroplan.report.words import WIDTH, every_note, kinds_by_size, model_words, notes_part, paragraphs
from zeroplan.units import GIB, format_size
from zeroplan.workflow import Loop, LoopPhase

NOT_RUN = "read, not run"
_BAR = 16
"""Characters of a bar as long as the GPU's memory."""


def loop_text(loop: Loop, notes: Sequence[str], *, explain: bool) -> str:
    """Return the answer of ``zeroplan workflow`` for a terminal."""
    job, gpu = loop.answer.job, loop.answer.job.cluster.gpu
    head = f"{model_words(job)}, {loop.workflow} on {job.mesh.world_size:,} x {'GPU' if gpu is None else gpu.full_name}"
    notes_shown = every_note(loop.answer, (*notes, *loop.notes))
    reasons = list(_reasons(loop)) if explain else []
    return paragraphs(
        [textwrap.wrap(verdict_of(loop), WIDTH), textwrap.wrap(f"{head}: {layout_words(job)}", WIDTH), list(_phases(loop)),
         list(_between(loop.resident)), list(_host(loop)), reasons, notes_part(notes_shown)]
    )  # fmt: skip


def verdict_of(loop: Loop) -> str:
    """Return whether every phase fits, and which one has the highest peak."""
    highest, capacity = loop.highest, loop.answer.capacity_bytes
    where = f"the highest phase is {highest.name!r} ({format_size(highest.total_bytes)})"
    if capacity is None:
        return f"It needs a GPU of {format_size(loop.least_bytes)}; {where}."
    room = format_size(abs(capacity - loop.least_bytes))
    if loop.least_bytes > capacity:
        broken = [one.name for one in loop.phases if not loop.fits(one)]
        return f"It does not fit: {room} too much. These phases break: {', '.join(broken)}."
    return f"It fits, with {room} of room; {where}."


def _phases(loop: Loop) -> Iterator[str]:
    yield f"{'Peak of each phase':<46}{'GiB':>10}  fits"
    most = max(loop.least_bytes, loop.answer.capacity_bytes or 0)
    for one in loop.phases:
        bar = "#" * round(_BAR * (one.total_bytes + int(loop.outside.expected_bytes)) / most)
        mark = "" if one.compared_with else f"  {NOT_RUN}"
        fits = {True: "yes", False: "no", None: "-"}[loop.fits(one)]
        yield f"  {one.name:<44.44}{one.total_bytes / GIB:>10.2f}  {fits:<3}  {bar:<{_BAR}}{mark}".rstrip()
        yield from textwrap.wrap(f"{one.moment}: {_kinds(one)}", WIDTH, initial_indent="    ", subsequent_indent="      ")
    yield f"  {'CUDA context and communicators, in each':<44}{int(loop.outside.expected_bytes) / GIB:>10.2f}"


def _kinds(one: LoopPhase) -> str:
    return ", ".join(f"{kind} {n_bytes / GIB:.2f}" for kind, n_bytes in kinds_by_size(one.lines)[:4])


def _between(lines: tuple[Line, ...]) -> Iterator[str]:
    yield f"{'On the GPU between the phases':<46}{'GiB':>10}"
    for line in sorted(lines, key=lambda one: -int(one.n_bytes)):
        if line.n_bytes >= GIB // 200:
            yield f"  {textwrap.shorten(line.reason, 44, placeholder='…'):<44}{int(line.n_bytes) / GIB:>10.2f}"


def _host(loop: Loop) -> Iterator[str]:
    yield f"{'Host memory of a node':<36}{'GiB':>10}  processes x GiB each"
    for one in loop.host:
        mark = "" if one.compared_with else f"; {NOT_RUN}"
        yield f"  {one.when:<34.34}{one.total_bytes / GIB:>10.1f}  {one.processes} x {one.each_bytes / GIB:.1f}: {one.reason}{mark}"


def _reasons(loop: Loop) -> Iterator[str]:
    for one in loop.phases:
        yield f"{one.name}, compared with: {one.compared_with or 'nothing; its source was read'}"
        for line in one.lines:
            if line.n_bytes:
                yield f"  {format_size(int(line.n_bytes))}: {line.reason}"
                yield f"      source: {line.source}"


def loop_payload(loop: Loop, notes: Sequence[str]) -> dict[str, object]:
    """Return the answer of ``zeroplan workflow`` as plain data. [bytes]"""
    return {
        "schema_version": SCHEMA_VERSION,
        "workflow": loop.workflow,
        "layout": layout_words(loop.answer.job),
        "verdict": loop.verdict,
        "least_bytes": loop.least_bytes,
        "highest": loop.highest.name,
        "phases": [_phase_payload(loop, one) for one in loop.phases],
        "resident": [_line_payload(line) for line in loop.resident],
        "host": [{**one._asdict(), "total_bytes": one.total_bytes} for one in loop.host],
        "notes": every_note(loop.answer, (*notes, *loop.notes)),
    }


def _phase_payload(loop: Loop, one: LoopPhase) -> dict[str, object]:
    return {"phase": one.name, "moment": one.moment, "peak_bytes": one.total_bytes, "fits": loop.fits(one),
            "compared_with": one.compared_with or None, "lines": [_line_payload(line) for line in one.lines]}  # fmt: skip


def _line_payload(line: Line) -> dict[str, object]:
    return {"kind": str(line.kind), "bytes": int(line.n_bytes), "reason": line.reason, "source": line.source}
