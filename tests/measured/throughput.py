"""Scores step times on published training throughput: ``python -m tests.measured.throughput``.

Kept in ``tests/golden/published_throughput.jsonl`` are the runs that are jobs; ``--from FILE`` scores another collection, and
``--keep`` keeps it. Every row of a file becomes a job (:mod:`tests.measured.published_rows`). The error is predicted time over
measured time, less one: a positive error is a step that zeroplan takes for too slow. Rows are halved by a hash of their
``config_group``; while a clock is built only the ``open`` half is looked at (``--half open``).
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from tests.measured import deviations
from tests.measured.published_rows import (
    Case,
    RefusedError,
    Row,
    as_the_program_runs,
    as_the_program_sends,
    case_of,
    half_of,
    keep,
    kept,
    program,
    rows_of,
    running_of_row,
)
from zeroplan.errors import SpecError
from zeroplan.estimator import account_of, estimate
from zeroplan.steptime import Running, StepTime, step_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zeroplan.spec.job import JobSpec

#: Classes of size, by the most parameters of each.
_SIZES = {2e9: "under 2B", 10e9: "2B to 10B", 50e9: "10B to 50B", 150e9: "50B to 150B", float("inf"): "above 150B"}
#: The part of a step that waits for the CPU, and the name of rows of which it is more than a tenth.
_LAUNCHING, BY_THE_CPU = "launching kernels", "bound by the CPU"
#: Layouts count as different in speed from this on.
_APART = 1.05
#: What a pair may differ in.
_AXES = ("micro_batch", "tp", "pp", "vpp", "cp", "ep", "recompute", "flash", "stage", "compile", "sequence_parallel")


class Scored(NamedTuple):
    """A row and its predicted step."""

    case: Case
    job: JobSpec
    time: StepTime

    @property
    def error(self) -> float:
        """Predicted divided by measured time, minus one."""
        return float(self.time.seconds) / self.case.step_s - 1


def predicted(job: JobSpec, running: Running | None = None) -> StepTime:
    """Return the predicted time of a job's step."""
    return step_time(account_of(job, job.batch), job.model, job.recipe, job.mesh, job.batch, job.cluster, running=running)


def _predicted_of_row(row: Row, job: JobSpec) -> StepTime:
    running, account = running_of_row(row, job), as_the_program_sends(row, job, account_of(job, job.batch))
    with as_the_program_runs(row):
        return step_time(account, job.model, job.recipe, job.mesh, job.batch, job.cluster, running=running)


def scored(case: Case) -> Scored:
    """Predict a case; if the row may describe several jobs, the fastest that fits."""
    every = [Scored(case, job, _predicted_of_row(case.row, job)) for job in case.jobs]
    if len(every) == 1:
        return every[0]
    fitting = [one for one in every if estimate(one.job).fits]
    return min(fitting or every, key=lambda one: float(one.time.seconds))


def score(rows: Sequence[Row]) -> tuple[list[Scored], Counter[str]]:
    """Score every row that is a job, and count the other rows by reason."""
    found, refused = list[Scored](), Counter[str]()
    for row in rows:
        if row["duplicate_of"]:
            refused["printed twice"] += 1
            continue
        try:
            found.append(scored(case_of(row)))
        except (RefusedError, SpecError) as reason:
            refused[str(reason)] += 1
    return found, refused


# --- tables -----------------------------------------------------------------------------------------------------------------


def _size(row: Row) -> str:
    return next(name for most, name in _SIZES.items() if (row.get("params") or 0) < most)


def _generation(one: Scored) -> str:
    gpu = one.job.cluster.gpu
    return "" if gpu is None else f"{gpu.architecture} ({gpu.name.partition('-')[0]})"


def engine_class(one: Scored) -> str:
    """Return a row's engine, apart where the predicted step waits for the CPU: sources do not state hosts, and ours is slow."""
    waits = sum(float(part.seconds) for part in one.time.parts if part.name == _LAUNCHING)
    engine = one.job.recipe.engine
    return f"{engine}, {BY_THE_CPU}" if waits > 0.1 * float(one.time.seconds) else engine


def _operands(one: Scored) -> str:
    return f"matrices in {running_of_row(one.case.row, one.job).operands or 'bf16'}"


GROUPS: dict[str, Callable[[Scored], str]] = {
    "half": lambda one: half_of(one.case.row),
    "source": lambda one: program(one.case.row),
    "engine": engine_class,
    "GPU": _generation,
    "size": lambda one: _size(one.case.row),
    "operands": _operands,
}


def figures(found: Sequence[Scored]) -> tuple[int, float, float, float]:
    """Return the number of rows, the median absolute error, the error that 90 in 100 do not exceed, and the signed median."""
    errors = [one.error for one in found]
    ordered = sorted(map(abs, errors))
    return len(errors), median(ordered), ordered[min(int(0.9 * len(ordered)), len(ordered) - 1)], median(errors)


def table(found: Sequence[Scored]) -> Iterator[tuple[str, str, int, float, float, float]]:
    """Yield a row of figures for all, and for each group of each kind."""
    yield ("all", "", *figures(found))
    for kind, name_of in GROUPS.items():
        groups: dict[str, list[Scored]] = defaultdict(list)
        for one in found:
            groups[name_of(one)].append(one)
        for name, ones in sorted(groups.items()):
            yield (kind, name, *figures(ones))


def pairs(found: Sequence[Scored]) -> dict[str, tuple[int, int]]:
    """Return how many pairs of a sheet more than 5 % apart are ordered correctly, and of how many:

    all, and those that differ in one setting.
    """
    sheets: dict[tuple[object, ...], list[Scored]] = defaultdict(list)
    for one in found:
        sheets[one.case.sheet].append(one)
    right, every = Counter[str](), Counter[str]()
    for ones in sheets.values():
        for a, b in combinations(ones, 2):
            apart = [axis for axis in _AXES if a.case.row.get(axis) != b.case.row.get(axis)]
            slow, quick = max(a.case.step_s, b.case.step_s), min(a.case.step_s, b.case.step_s)
            if not apart or slow < _APART * quick:
                continue
            correct = (a.case.step_s > b.case.step_s) == (float(a.time.seconds) > float(b.time.seconds))
            for name in ("all", *(apart if len(apart) == 1 else ())):
                every[name] += 1
                right[name] += correct
    return {name: (right[name], count) for name, count in every.items()}


def first_choices(found: Sequence[Scored]) -> list[float]:
    """Return, for each sheet of at least three layouts, how much slower the first-ranked one is than the fastest measured."""
    sheets: dict[tuple[object, ...], list[Scored]] = defaultdict(list)
    for one in found:
        sheets[one.case.sheet].append(one)
    losses = []
    for ones in sheets.values():
        layouts = {tuple(str(one.case.row.get(axis)) for axis in _AXES) for one in ones}
        if len(layouts) > 2:
            first = min(ones, key=lambda one: float(one.time.seconds))
            losses.append(first.case.step_s / min(one.case.step_s for one in ones) - 1)
    return sorted(losses)


def main() -> None:
    """Print the tables, the reasons for refusals and, on request, every row."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--from", dest="file", type=Path, help="rows of throughput, JSON; without it those kept")
    parser.add_argument("--keep", action="store_true", help="keep those of them that are jobs")
    parser.add_argument("--half", choices=("open", "held"), help="one half alone")
    parser.add_argument("--every", action="store_true", help="print every row, the quickest prediction first")
    parser.add_argument(
        "--deviations",
        action="store_true",
        help="estimate what runs share, and print the errors of rows that others calibrated",
    )
    parser.add_argument("--parts", help="print the parts of these rows' steps, separated by commas")
    asked = parser.parse_args()
    rows = [row for row in (kept() if asked.file is None else rows_of(asked.file)) if asked.half in (None, half_of(row))]
    found, refused = score(rows)
    if asked.keep:
        keep([one.case.row for one in found])
    print(f"{'':10}{'':26}{'rows':>6}{'|median|':>10}{'90 in 100':>11}{'signed':>9}")
    for kind, name, count, middle, wide, signed in table(found):
        print(f"{kind:10}{name:26}{count:6}{middle:10.1%}{wide:11.1%}{signed:+9.1%}")
    for name, (right, count) in sorted(pairs(found).items()):
        print(f"pairs {name:14}{right:5} of {count:5} ordered right, {right / count:.0%}")
    losses = first_choices(found)
    if losses:
        print(f"first choices: {len(losses)} sheets, median loss {median(losses):.1%}, nine of ten within {_ninth(losses):.1%}")
    for line in deviations.lines(found) if asked.deviations else ():
        print(line)
    for reason, count in refused.most_common():
        print(f"refused {count:4}  {reason}")
    for one in sorted(found, key=lambda one: one.error) if asked.every else ():
        print(_line(one))
    for one in found:
        if asked.parts and one.case.row["id"] in asked.parts.split(","):
            print(_line(one), *map(_part_line, one.time.parts), sep="\n")


def _ninth(ordered: Sequence[float]) -> float:
    return ordered[min(int(0.9 * len(ordered)), len(ordered) - 1)]


def _line(one: Scored) -> str:
    row, mesh, batch = one.case.row, one.job.mesh, one.job.batch
    degrees = f"dp{mesh.dp_shard * mesh.dp_replicate} tp{mesh.tp} pp{mesh.pp} cp{mesh.cp} ep{mesh.ep}"
    size = f"b{batch.micro_batch_size} x{batch.grad_accum_steps} s{batch.seq_len}"
    chunks = one.job.recipe.pipeline_stages_per_rank or 1
    what = f"{row['model'][:28]:28} {row['gpu'][:10]:10} {degrees} v{chunks} {size} {row['recompute']} {row['flash']}"
    return f"{one.error:+7.1%} {row['id']:13}{one.case.step_s:9.3f} s  {what} {row['precision']}"


def _part_line(part: object) -> str:
    return f"      {part.name:44}{float(part.seconds):10.4f}{float(part.hidden_s):10.4f}  {part.reason}"  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
