"""Turns an answer into named whole numbers, which a file can store and a reader can compare.

A figure has a section (``peak``, ``states``, a phase of the step, ``sent``, ``around``) and a name within the section.
``python -m tests.answers.figures`` reads questions from standard input, one JSON object per line, and prints their figures in the
same form. :mod:`tests.answers.compare` uses it to ask another checkout.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, NamedTuple

from tests.properties.columns import at_place, grid_of
from zeroplan import estimate
from zeroplan.errors import SpecError
from zeroplan.ledger import Phase, bytes_by_kind
from zeroplan.spec.base import read
from zeroplan.spec.hardware import AllocatorSettings
from zeroplan.spec.job import JobSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from zeroplan import Estimate
    from zeroplan.engines.account import Account
    from zeroplan.numeric import Int

#: The caching allocator's settings.
SETTINGS: tuple[AllocatorSettings, ...] = ("default", "expandable_segments")
#: Figures by section, then by name. All are bytes except ``calls``.
Figures = dict[str, dict[str, int]]


class Moved(NamedTuple):
    """A figure that differs; ``before`` or ``now`` is 0 if that side does not have it."""

    section: str
    name: str
    before: int
    now: int

    @property
    def share(self) -> float:
        """The difference as a share of the larger of the two; 1 if only one side has the figure."""
        return abs(self.now - self.before) / max(abs(self.before), abs(self.now))

    def __str__(self) -> str:
        """Return the figure and its difference in one line."""
        return f"{self.section}, {self.name}: {self.before:,} -> {self.now:,} ({self.now - self.before:+,}, {self.share:.2%})"


def figures(given: Estimate) -> Figures:
    """Return the peak, the model states, each phase's memory at its highest moment, the bytes sent, and what is outside the peak.

    The section ``around`` has reserved memory, memory outside the allocator, host and NVMe memory, and the pipeline ranks' peaks.
    """
    return {
        "peak": {given.peak.phase: given.peak_bytes},
        "states": {kind: n_bytes for kind, n_bytes in given.states_by_kind.items() if n_bytes},
        **dict(_phases(given)),
        "sent": dict(_sent(given)),
        "around": dict(_around(given)),
    }


def _phases(given: Estimate) -> Iterator[tuple[str, dict[str, int]]]:
    for phase in Phase:
        moments = [moment for moment in given.moments if moment.phase is phase]
        if moments:
            highest = max(moments, key=lambda moment: int(moment.total_bytes))
            by_kind = sorted(bytes_by_kind(highest.lines).items())
            yield phase, {str(kind): int(n_bytes) for kind, n_bytes in by_kind if n_bytes}


def _sent(given: Estimate) -> Iterator[tuple[str, int]]:
    totals: dict[str, int] = {}
    for call in given.traffic.collectives:
        of = f"{call.operation} of {int(call.group)}"
        for name, figure in (("calls", call.calls), ("payload", call.payload_bytes), ("sent", call.sent_bytes)):
            totals[f"{of}: {name}"] = totals.get(f"{of}: {name}", 0) + int(figure)
    yield from sorted((name, figure) for name, figure in totals.items() if figure)


def _around(given: Estimate) -> Iterator[tuple[str, int]]:
    for settings in SETTINGS:
        band = given.reserved_with(settings)
        for name, n_bytes in zip(("least", "expected", "most"), band, strict=True):
            yield f"reserved, {settings}: {name}", int(n_bytes)
    yield "outside the allocator", int(given.outside_band.expected_bytes)
    yield "held between steps", sum(int(line.n_bytes) for line in given.held)
    yield from ((name, n_bytes) for name, n_bytes in (("host", given.host_bytes), ("NVMe", given.nvme_bytes)) if n_bytes)
    yield from ((f"pipeline rank {one.rank}", int(one.peak_bytes)) for one in given.pipeline)


def moved(before: Figures, now: Figures) -> list[Moved]:
    """Return the figures that differ, the largest difference first."""
    sections = dict.fromkeys((*before, *now))
    found = [one for section in sections for one in _moved_in(section, before.get(section, {}), now.get(section, {}))]
    return sorted(found, key=lambda one: -abs(one.now - one.before))


def _moved_in(section: str, before: dict[str, int], now: dict[str, int]) -> Iterator[Moved]:
    for name in dict.fromkeys((*before, *now)):
        was, is_now = before.get(name, 0), now.get(name, 0)
        if was != is_now:
            yield Moved(section, name, was, is_now)


def answered(jobs: Sequence[JobSpec]) -> Figures:
    """Return the figures of one job, or of several layouts in one pass over columns; of a refused job, the message."""
    try:
        return figures(estimate(jobs[0])) if len(jobs) == 1 else _in_columns(jobs)
    except SpecError as error:
        return {"refused": {str(error): 1}}


def _in_columns(layouts: Sequence[JobSpec]) -> Figures:
    """Return each layout's peak, states and bytes sent; of a pipeline, the largest of its ranks."""
    accounts = grid_of(layouts)
    return {_layout(job): dict(_at(accounts, at)) for at, job in enumerate(layouts)}


def _layout(job: JobSpec) -> str:
    batch = job.batch
    return f"{job.mesh.dp_shard} shards, {batch.grad_accum_steps} x {batch.micro_batch_size} x {batch.seq_len}"


def _at(accounts: tuple[Account, ...], at: int) -> Iterator[tuple[str, int]]:
    def most(found: Iterable[Iterable[Int]]) -> int:
        return max(sum(at_place(one, at) for one in each) for each in found)

    yield "peak", most((moment.total_bytes,) for one in accounts for moment in one.moments)
    yield "states", most([line.n_bytes for line in one.states] for one in accounts)
    yield "sent", most([call.sent_bytes for call in one.collectives] for one in accounts)


def main() -> None:
    """Answer the questions of standard input, one per line: ``{"name": ..., "jobs": [...]}``."""
    for line in sys.stdin:
        question = json.loads(line)
        sys.stdout.write(f"{json.dumps({'name': question['name'], 'figures': _of_question(question['jobs'])})}\n")
        sys.stdout.flush()


def _of_question(jobs: list[object]) -> Figures:
    try:
        return answered([read(JobSpec, job, where="question") for job in jobs])
    except SpecError as error:  # this checkout does not have one of the options
        return {"refused": {str(error): 1}}


if __name__ == "__main__":
    main()
