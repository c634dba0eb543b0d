"""``zeroplan verify --matrix``: runs many cases with a progress bar, stores each result as a line, and prints a table."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from zeroplan.cli import CANNOT_RUN, DISAGREES, json_text, say
from zeroplan.cli.case_table import Row, size, table, word
from zeroplan.cli.verify import require
from zeroplan.errors import MeasurementError
from zeroplan.measurement import Tensors
from zeroplan.report.comparison import percent
from zeroplan.verify.cases.bulk import run_cases
from zeroplan.verify.cases.matrix import Case, find_matrix, read_matrix
from zeroplan.verify.cases.needs import card_bytes
from zeroplan.verify.cases.results import SETTLED, Result, Results, opened
from zeroplan.verify.cases.verdicts import Judged, judged
from zeroplan.verify.processes.scratch import remove_leftovers
from zeroplan.verify.task import Task

_TENSORS: dict[str, Tensors] = {"simulate": "fake", "cpu": "cpu", "cuda": "cuda"}
SCHEMA_VERSION = 1


class BulkFlags(NamedTuple):
    """The values of the flags."""

    matrix: str
    backend: str
    tolerance: float
    timeout_s: float
    folder: Path | None
    as_json: bool


def verify_matrix(flags: BulkFlags) -> int:
    """Run the cases without a result, and print all; returns 3 if a case disagrees, else 4 if one has no settled result."""
    path = find_matrix(flags.matrix)
    cases = read_matrix(path, tensors=_TENSORS[flags.backend], card_bytes=card_bytes() if flags.backend == "cuda" else None)
    missing = _not_installed(cases)
    with opened((flags.folder or Path()) / f"{path.stem}-{flags.backend}.jsonl", say=say) as results:
        _run_what_is_left(cases, results, flags, missing)
        found = [judged(one, tolerance=flags.tolerance) for case in cases if (one := results.of(case.task)) is not None]
    typer.echo(_as_json(found) if flags.as_json else table([Row.of(one) for one in found], tolerance=flags.tolerance))
    if any(one.agrees is False for one in found):
        return DISAGREES
    return 0 if all(one.result.outcome in SETTLED for one in found) else CANNOT_RUN


def _not_installed(cases: tuple[Case, ...]) -> dict[Task, str]:
    """Return the cases whose engine is not installed, with what to install; raises MeasurementError if none can run."""
    missing: dict[Task, str] = {}
    for case in cases:
        try:
            require(case.task.job)
        except MeasurementError as error:
            missing[case.task] = str(error)
    if len(missing) == len(cases):
        raise MeasurementError(next(iter(missing.values())))
    return missing


def _run_what_is_left(cases: tuple[Case, ...], results: Results, flags: BulkFlags, missing: dict[Task, str]) -> None:
    before = [results.of(case.task) for case in cases]
    left = [case for case, one in zip(cases, before, strict=True) if one is None or one.outcome not in SETTLED]
    again = sum(one is not None and one.outcome not in SETTLED for one in before)
    say(f"results: {results.path}{'; '.join(('', *_found(results, cases=len(cases), left=len(left), again=again)))}")
    left.sort(key=lambda case: case.name == results.broken_off)  # the case that killed the last run comes last
    refused = [
        Result(name=one.name, task=one.task, outcome="refused", says=missing[one.task]) for one in left if one.task in missing
    ]
    here = tuple(case for case in left if case.task not in missing)
    if not left:
        return
    with _progress(len(left)) as told:

        def begin(case: Case) -> None:
            results.begin(case.name)
            told.begin(case)

        for result in chain(refused, run_cases(here, timeout_s=flags.timeout_s, say=told.say, begin=begin)):
            results.append(result)
            told.end(judged(result, tolerance=flags.tolerance))


def _found(results: Results, *, cases: int, left: int, again: int) -> Iterator[str]:
    """Yield remarks on the results of an earlier run."""
    if left < cases:
        yield f"{cases - left} of {cases} cases have a result already"
    if again:
        yield f"{again} failed or {'was' if again == 1 else 'were'} refused and {'is' if again == 1 else 'are'} tried again"
    if results.broken_off is not None:
        yield f"the last run was killed during {results.broken_off or 'a case'}, which runs again, last"
    if results.dropped:
        yield f"its last line was incomplete and is deleted ({results.dropped:,} bytes)"
    if removed := remove_leftovers():
        yield removed


class _Progress(NamedTuple):
    """Callbacks that report the beginning, the end and the progress of a case."""

    begin: Callable[[Case], None]
    end: Callable[[Judged], None]
    say: Callable[[str], None]


@contextmanager
def _progress(total: int) -> Iterator[_Progress]:
    """Show a progress bar on a terminal; elsewhere print a line per case."""
    console = Console(stderr=True)
    if not console.is_terminal:
        numbers = iter(range(1, total + 1))
        yield _Progress(lambda _case: None, lambda one: say(f"{next(numbers)}/{total} {line(one)}"), say)
        return
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=total)

        def end(one: Judged) -> None:
            bar.print(line(one), markup=False, highlight=False)
            bar.advance(task)

        yield _Progress(
            lambda case: bar.update(task, description=case.name),
            end,
            lambda text: bar.print(text, markup=False, highlight=False),
        )


def line(one: Judged) -> str:
    """One case in one line."""
    return f"{one.result.name}: {_what(one)}, {one.result.seconds:.1f} s"


def _what(one: Judged) -> str:
    if one.comparison is None:
        return f"{one.result.outcome}{'' if one.agrees is None else f', {_verdict(one)}'}: {one.result.says}"
    peak = one.comparison.peak
    return f"predicted {size(peak.predicted)}, measured {size(peak.measured)} ({percent(peak.error)}), {word(one.agrees)}"


def _verdict(one: Judged) -> str:
    fits = "does not fit" if one.fits is False else "fits"
    return f"predicted {size(one.needed)}, {fits}{' (at the edge)' if one.at_the_edge else ''}, {word(one.agrees)}"


def _as_json(found: list[Judged]) -> str:
    cases = [
        {
            "name": one.result.name, "outcome": one.result.outcome, "says": one.result.says, "predicted_bytes": one.predicted,
            "needed_bytes": one.needed, "capacity_bytes": one.capacity, "measured_bytes": one.measured, "fits": one.fits,
            "agrees": one.agrees, "seconds": one.result.seconds,
        }
        for one in found
    ]  # fmt: skip
    return json_text({"schema_version": SCHEMA_VERSION, "cases": cases})
