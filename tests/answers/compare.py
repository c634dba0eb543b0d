"""Compare the answers of two checkouts and print what differs: ``python -m tests.answers.compare BEFORE``.

BEFORE is a folder with a checkout, or a git revision; for a revision, a temporary working tree is made. Both checkouts answer the
jobs of the snapshot, the stored records and random jobs (``--random N``, from ``--seed K``). A random job is estimated alone, and
again with other layouts of its structure in one pass over columns. The exit code is 1 if an answer differs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from tests import strategies
from tests.answers.figures import moved
from tests.answers.jobs import kept
from tests.measured import stored
from tests.properties.columns import points_of
from zeroplan.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tests.answers.figures import Figures, Moved
    from zeroplan.spec.job import JobSpec

HERE = Path(__file__).parents[2]


class Question(NamedTuple):
    """A job, or several layouts of one structure, with a name."""

    name: str
    jobs: tuple[JobSpec, ...]


class Difference(NamedTuple):
    """A question that the two checkouts answer differently, with the figures that differ, the largest difference first."""

    name: str
    moved: list[Moved]


def questions(n_random: int, seed: int) -> Iterator[Question]:
    """Yield the snapshot's jobs, the records of ``SAMPLES`` and ``VERSIONS``, and ``n_random`` random jobs with their layouts."""
    for one in kept():
        yield Question(one.words, (one.job,))
    for path in (*stored.SAMPLES, stored.VERSIONS):
        for number, measured in enumerate(stored.records(path), 1):
            yield Question(f"record {number} of {path.name}", (measured.job,))
    for case in range(seed, seed + n_random):
        yield from _drawn(case)


def _drawn(case: int) -> Iterator[Question]:
    """Yield a random job and, if its structure has several layouts, those layouts."""
    draw = Random(case)  # noqa: S311  nothing secret is drawn
    job = strategies.job(draw)
    yield Question(f"random job {case}", (job,))
    try:
        layouts = tuple(point for point, _ in points_of(job, draw))
    except SpecError:  # the answer to the job alone is the same refusal
        return
    if len(layouts) > 1:
        yield Question(f"random layouts {case}", layouts)


def answers(checkout: Path, asked: Sequence[Question]) -> dict[str, Figures]:
    """Return the figures that a checkout answers, by the question's name; the checkout's own code runs in a new process."""
    said = ({"name": name, "jobs": jobs} for name, jobs in asked)
    lines = "".join(f"{json.dumps(one, default=_without_defaults)}\n" for one in said)
    done = subprocess.run(
        [sys.executable, "-m", "tests.answers.figures"], input=lines, cwd=checkout, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{checkout} did not answer: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    found = (json.loads(line) for line in done.stdout.splitlines())
    return {one["name"]: one["figures"] for one in found}


def _without_defaults(spec: Any) -> dict[str, object]:
    """Return the fields that are not at their default: an older checkout does not know newer fields."""
    every = {field.name: (field, getattr(spec, field.name)) for field in fields(spec)}
    return {name: value for name, (field, value) in every.items() if not _is_default(field, value)}


def _is_default(field: Field[Any], value: object) -> bool:
    return value == (field.default if field.default_factory is MISSING else field.default_factory())


def differences(before: dict[str, Figures], now: dict[str, Figures]) -> list[Difference]:
    """Return the questions that are answered differently, the largest relative difference first."""
    found = [Difference(name, moved(before[name], now[name])) for name in now]
    return sorted((one for one in found if one.moved), key=lambda one: -max(each.share for each in one.moved))


def told(found: Sequence[Difference], n_asked: int, shown: int) -> Iterator[str]:
    """Yield lines: how many answers differ, then the first ``shown`` of them."""
    yield f"{len(found):,} of {n_asked:,} answers differ"
    for one in found[:shown]:
        yield one.name
        yield from (f"    {each}" for each in one.moved[:_FIGURES])
        if len(one.moved) > _FIGURES:
            yield f"    and {len(one.moved) - _FIGURES} more figures"
    if len(found) > shown:
        yield f"and {len(found) - shown:,} more; --show {len(found)} has all"


#: Figures that are shown for one answer.
_FIGURES = 5


@contextmanager
def checkout_of(named: str) -> Iterator[Path]:
    """Yield the folder, or a temporary working tree of the revision, which is removed afterwards."""
    if (Path(named) / "zeroplan").is_dir():
        yield Path(named).resolve()
        return
    with TemporaryDirectory() as folder:
        tree = Path(folder) / "before"
        made = _git("worktree", "add", "--detach", str(tree), named)
        if made.returncode:
            raise SystemExit(
                f"{named!r} is neither a folder with a checkout nor a revision: {made.stderr.strip().splitlines()[-1]}"
            )
        try:
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=HERE, capture_output=True, text=True, check=False)


def main(words: Sequence[str] | None = None) -> int:
    """Ask both checkouts, print what differs, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.answers.compare", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("before", help="a folder with a checkout, or a git revision")
    parser.add_argument("--random", type=int, default=200, metavar="N", help="random jobs, each also as columns [200]")
    parser.add_argument("--seed", type=int, default=0, metavar="K", help="the first of them [0]")
    parser.add_argument("--show", type=int, default=20, metavar="N", help="answers that are shown [20]")
    given = parser.parse_args(words)
    asked = list(questions(given.random, given.seed))
    with checkout_of(given.before) as before:
        found = differences(answers(before, asked), answers(HERE, asked))
    _print(told(found, len(asked), given.show))
    return 1 if found else 0


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main())
