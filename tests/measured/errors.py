"""Lists the errors of the estimate against the records of the matrix, by engine, family and recipe. Needs no torch."""

from __future__ import annotations

from functools import cache
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from tests.measured import stored
from zeroplan.comparison import Comparison, compare_with_estimate
from zeroplan.report.series.validation import group_of as engine_of
from zeroplan.units import GIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from tests.measured.stored import Refusal
    from zeroplan.comparison import Compared
    from zeroplan.measurement import Measurement
    from zeroplan.spec.job import JobSpec

#: What the estimate is meant to reach: every peak, nineteen in twenty, and the median. [fraction of what was measured]
EVERY, MOST, MEDIAN = 0.01, 0.0025, 0.0005
_WORST = 25


class Held(NamedTuple):
    """A record and the estimate of its job."""

    measured: Measurement
    found: Comparison

    @property
    def error(self) -> float:
        """The error of the peak, as a fraction of the measured peak."""
        return self.found.peak.error

    @property
    def same_phase(self) -> bool:
        """Whether the estimate's peak is in the measured phase."""
        return self.predicted_phase == self.measured.steady.peak.phase

    @property
    def same_kinds(self) -> bool:
        """Whether every kind of line at the peak is within 2 % or 16 MiB."""
        return not different_kinds(self.found)

    @property
    def same_traffic(self) -> bool:
        """Whether every collective sends the predicted bytes."""
        return not any(row.difference for row in self.found.collectives)

    @property
    def predicted_phase(self) -> str:
        """Return the phase with the highest predicted moment."""
        return max(self.found.phases, key=lambda row: row.predicted).what


def different_kinds(found: Comparison, small: int = 16 * MIB) -> list[Compared]:
    """Return the kinds at the peak that differ by more than 2 % and by more than ``small`` bytes."""
    return [row for row in found.kinds if abs(row.difference) > max(0.02 * row.measured, small)]


def held(records: list[Measurement]) -> list[Held]:
    """Estimate the job of every record."""
    return [Held(record, compare_with_estimate(record)) for record in records]


@cache
def held_in(path: Path = stored.RECORDS) -> tuple[Held, ...]:
    """Estimate the jobs of a file's records, once per process, since it takes seconds."""
    return tuple(held(stored.records(path)))


_SIDES: dict[str, Callable[[JobSpec], object]] = {
    "engine": engine_of,
    "family": lambda job: job.model.family,
    "recompute": lambda job: job.recipe.recompute,
    "precision": lambda job: job.recipe.precision,
    "optimizer step": lambda job: job.recipe.optimizer_impl,
    "accumulation": lambda job: job.batch.grad_accum_steps,
    "ranks": lambda job: job.mesh.world_size,
    "batch": lambda job: (job.batch.micro_batch_size, job.batch.seq_len),
}


def table(records: list[Measurement], refusals: list[Refusal]) -> str:
    """Return the errors of the peak in Markdown."""
    all_held = held(records)
    parts = [_HEAD, _row("all", all_held)]
    for name, side in _SIDES.items():
        parts.append(f"| **{name}** {'| ' * 9}|")
        values = sorted({side(one.measured.job) for one in all_held}, key=str)
        parts += [_row(str(value), [one for one in all_held if side(one.measured.job) == value]) for value in values]
    parts += ["", *_others(all_held), "", f"The worst {_WORST}:", "", *_worst(all_held), ""]
    parts += [f"Refused: {what(refusal.job)}: {refusal.reason}" for refusal in refusals]
    return "\n".join(parts)


_HEAD = f"""\
| peak | records | median | 95 in 100 | highest | lowest | within {MOST:.2%} | within {EVERY:.0%} | phase right | kinds right |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"""


def _row(name: str, some: list[Held]) -> str:
    errors = sorted(abs(one.error) for one in some)
    cells = (
        name,
        f"{len(some)}",
        f"{median(errors):.3%}",
        f"{errors[min(len(errors) - 1, 95 * len(errors) // 100)]:.3%}",
        f"{max(one.error for one in some):+.3%}",
        f"{min(one.error for one in some):+.3%}",
        *(f"{share_of(error <= limit for error in errors):.0%}" for limit in (MOST, EVERY)),
        f"{share_of(one.same_phase for one in some):.0%}",
        f"{share_of(one.same_kinds for one in some):.0%}",
    )
    return f"| {' | '.join(cells)} |"


def share_of(truths: Iterable[bool]) -> float:
    """Return the share that is true."""
    found = list(truths)
    return sum(found) / len(found)


def _others(all_held: list[Held]) -> list[str]:
    """Return differences outside the peak: what is held between steps, and what the collectives send."""
    between = [one for one in all_held if abs(one.found.held.difference) > one.found.peak.measured // 1000]
    moved = [one for one in all_held if not one.same_traffic]
    return [
        f"Held between steps: {len(between)} records differ by more than a thousandth of the peak.",
        f"Collectives: {len(moved)} records differ in the bytes of some operation.",
    ]


def _worst(all_held: list[Held]) -> list[str]:
    rows = sorted(all_held, key=lambda one: -abs(one.error))[:_WORST]
    return [
        "| job | error | predicted GiB | measured GiB | phase | where | kinds that differ (MiB) |",
        "| --- | ---: | ---: | ---: | --- | --- | --- |",
        *(_at_the_peak(one) for one in rows),
    ]


def _at_the_peak(one: Held) -> str:
    peak, seen = one.found.peak, one.measured.steady.peak
    cells = (
        what(one.measured.job),
        f"{one.error:+.2%}",
        f"{peak.predicted / GIB:.3f}",
        f"{peak.measured / GIB:.3f}",
        seen.phase if one.same_phase else f"{seen.phase}, not {one.predicted_phase}",
        f"{seen.module or 'root'} {seen.operation}",
        kinds(one),
    )
    return f"| {' | '.join(cells)} |"


def kinds(one: Held, most: int = 4) -> str:
    """Return the kinds at the peak that differ most, predicted minus measured. [MiB]"""
    rows = [row for row in one.found.kinds if row.difference][:most]
    return ", ".join(f"{row.what} {row.difference / MIB:+.1f}" for row in rows)


def what(job: JobSpec) -> str:
    """Return a job in one line: its layers in brackets, its batch as accumulation x micro-batch x sequence."""
    recipe, batch = job.recipe, job.batch
    model = f"{job.model.name} ({job.model.num_hidden_layers})"
    shape = f"{batch.grad_accum_steps}x{batch.micro_batch_size}x{batch.seq_len}"
    return f"{engine_of(job)} {model} {recipe.precision} {recipe.recompute} {recipe.optimizer_impl} N={job.mesh.world_size} {shape}"
