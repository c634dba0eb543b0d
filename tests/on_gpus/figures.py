"""Figures of GPUs that others published, each beside what zeroplan says: one form for every source. Needs no torch.

A source is scored here from rows that are kept, or read from a file in ``tests/on_gpus/scored`` that :func:`write` made: it
holds what a scorer found whose rows are not kept.
"""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.dryrun.survey import PUBLISHED as PUBLISHED_SCRIPTS
from tests.dryrun.survey import PUBLISHED_KEPT, kept, programs
from tests.measured import megatron_b200, megatron_golden
from zeroplan.units import GIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

FOLDER = Path(__file__).parent
PUBLISHED, CAUSES, SCORED = FOLDER / "published.toml", FOLDER / "causes.toml", FOLDER / "scored"
#: How zeroplan found its figure: from the settings alone, or by the source's own program, run without a GPU.
ESTIMATE, SIMULATED, DRY_RUN = "estimate", "simulated", "dry run"
#: Figures further off than this need a cause.
FAR = 0.03
OPEN = "open"


class Figure(NamedTuple):
    """One measured figure and zeroplan's, in the same unit."""

    source: str
    engine: str
    method: str
    """What is trained, in a few words: the kind of model, or full weights, LoRA and the like."""
    gpu: str
    name: str
    """The row, as its source calls it."""
    measured: float
    found: float
    how: str = ESTIMATE
    why: str = ""
    """What the source of the figure says of a difference."""

    @property
    def error(self) -> float:
        """How far zeroplan's figure is off, as a share of the measured one; negative where it is too low."""
        return self.found / self.measured - 1


def ninety(errors: Sequence[float]) -> float:
    """The error that 90 of 100 rows stay within, as a share.

    >>> ninety([0.01, -0.02, 0.03, -0.04, 0.05, 0.06, 0.07, 0.08, 0.09, 0.5])
    0.09
    """
    return sorted(map(abs, errors))[-(-9 * len(errors) // 10) - 1]


class Source(NamedTuple):
    """All figures of a source, and what of it is no job of zeroplan's."""

    name: str
    where: str
    """Repository and commit, or page."""
    counter: str
    """What was counted."""
    figures: tuple[Figure, ...]
    refused: Counter[str]
    """Rows by the reason why they cannot be expressed."""


@cache
def sources() -> tuple[Source, ...]:
    """Every source that is scored here, in the order of the page."""
    return _megatron(), _b200(), *_scored(SCORED), _reports()


def _megatron() -> Source:
    held, refused = megatron_golden.score(megatron_golden.kept())
    name = "Megatron-LM's functional tests"
    figures = (
        Figure(name, "megatron", megatron_golden.CLASSES[one.run.kind], one.run.gpu, one.run.name, one.run.peak,
               one.run.peak * (1 + one.peak))
        for one in held
    )  # fmt: skip
    where = "NVIDIA/Megatron-LM d98e8a64, tests/functional_tests/test_cases"
    return Source(name, where, "peak allocated, last rank", tuple(figures), refused)


def _b200() -> Source:
    name = "SimuMax's runs of Megatron-LM"
    figures = (
        Figure(name, "megatron", "latent attention" if one.run.experts else "dense", "B200", one.run.name, one.run.gib * GIB,
               one.run.gib * GIB * (1 + one.peak))
        for one in megatron_b200.score()
    )  # fmt: skip
    where = "MooreThreads/SimuMax 4dcaae51, docs/b200/b200_release_v1.2_summary.md"
    return Source(name, where, "peak allocated, fullest rank", tuple(figures), Counter())


def _reports() -> Source:
    """Single figures from reports, and the sources' own scripts under the dry run."""
    name = "single figures"
    rows = tomllib.loads(PUBLISHED.read_text(encoding="utf-8"))["row"]
    figures = [
        Figure(name, row["engine"], row["method"], row["gpu"] or "not stated", f"{row['what']} ({row['source']})",
               _number(row["measured"]), _number(row["predicted"]), row["how"])
        for row in rows
    ]  # fmt: skip
    return Source(
        name, "the last two tables name each source", "counters as in those tables", (*figures, *_scripts(name)), Counter()
    )


def _number(text: str) -> float:
    """A figure as its source prints it."""
    return float(text.replace(",", ""))


def _scripts(source: str) -> Iterator[Figure]:
    found = {row["name"]: row for row in kept(PUBLISHED_KEPT)}
    for program in programs(PUBLISHED_SCRIPTS):
        if program.figure is not None and program.name in found:
            shown = program.figure.printed(found[program.name]["found"])
            figures = _number(program.figure.measured), _number(shown)
            yield Figure(source, "its own", "its own", "not stated", program.name, *figures, DRY_RUN, program.why)


# --- figures whose rows are not kept ----------------------------------------------------------------------------------------


def write(source: Source, folder: Path = SCORED) -> Path:
    """Keep what a scorer found: a line for the source, and one for each figure."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{source.name.lower().replace(' ', '-')}.jsonl"
    head = {"name": source.name, "where": source.where, "counter": source.counter, "refused": dict(source.refused)}
    lines = [head, *(one._asdict() for one in source.figures)]
    path.write_text("".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines), encoding="utf-8")
    return path


def _scored(folder: Path) -> Iterator[Source]:
    for path in sorted(folder.glob("*.jsonl")):
        head, *rest = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        refused = Counter[str](head.pop("refused"))
        yield Source(**head, figures=tuple(Figure(**line) for line in rest), refused=refused)


# --- causes -----------------------------------------------------------------------------------------------------------------


def cause_of(figure: Figure, causes: Iterable[dict[str, Any]]) -> str:
    """Why a figure is far off; ``open`` where nothing explains it.

    A cause applies to the rows of a source whose name has one of its words, on its GPU, in its direction.
    """
    for cause in causes:
        gpu, high = cause.get("gpu"), cause.get("high")
        fits = figure.source == cause["source"] and (gpu is None or gpu == figure.gpu)
        named = any(word in figure.name for word in cause["names"])
        if fits and named and (high is None or high == (figure.error > 0)):
            return str(cause["cause"])
    return figure.why or OPEN


def causes() -> list[dict[str, Any]]:
    """The causes that are known, as ``causes.toml`` has them."""
    found: list[dict[str, Any]] = tomllib.loads(CAUSES.read_text(encoding="utf-8"))["cause"]
    return found
