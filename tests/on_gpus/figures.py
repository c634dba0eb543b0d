"""Figures of GPUs that others published, each beside what zeroplan says: one form for every source. Needs no torch."""

from __future__ import annotations

import tomllib
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.dryrun.survey import PUBLISHED as PUBLISHED_SCRIPTS
from tests.dryrun.survey import PUBLISHED_KEPT, kept, programs
from tests.measured import hf_stack, megatron_b200, megatron_blocks, megatron_golden
from zeroplan.units import GIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

FOLDER = Path(__file__).parent
PUBLISHED, CAUSES = FOLDER / "published.toml", FOLDER / "causes.toml"
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
    held: Mapping[str, Sequence[float]] = {}
    """Errors of what is held between steps by kind of run, as shares; negative where zeroplan's figure is too low."""
    room: Sequence[float] = ()
    """How far what the allocator is expected to reserve lies above the measured peak, as shares. A card with just that room is said
    to fit the job: below 0 this is wrong."""


@cache
def sources() -> tuple[Source, ...]:
    """Every source that is scored here, in the order of the page."""
    return _megatron(), _b200(), *_hf_stack(), _reports()


def _megatron() -> Source:
    held, refused = megatron_golden.score(megatron_golden.kept())
    name = "Megatron-LM's functional tests"
    figures = (
        Figure(name, "megatron", megatron_golden.CLASSES[one.run.kind], one.run.gpu, one.run.name, one.run.peak,
               one.run.peak * (1 + one.peak))
        for one in held
    )  # fmt: skip
    where = "NVIDIA/Megatron-LM d98e8a64, tests/functional_tests/test_cases"
    segments = {
        f"{words} expandable segments": [one.held for one in held if bool(one.run.features.get("expandable")) is with_them]
        for words, with_them in (("with", True), ("without", False))
    }
    in_blocks = [one.held + megatron_blocks.beyond(one.run) / one.run.held for one in held]
    kept_bytes = {"all": [one.held for one in held], **segments, "all, with blocks that are not split": in_blocks}
    room = [one.reserved / one.run.peak - 1 for one in held]
    return Source(name, where, "peak allocated, last rank", tuple(figures), refused, kept_bytes, room)


def _b200() -> Source:
    name = "SimuMax's runs of Megatron-LM"
    figures = (
        Figure(name, "megatron", "latent attention" if one.run.experts else "dense", "B200", one.run.name, one.run.gib * GIB,
               one.run.gib * GIB * (1 + one.peak))
        for one in megatron_b200.score()
    )  # fmt: skip
    where = "MooreThreads/SimuMax 4dcaae51, docs/b200/b200_release_v1.2_summary.md"
    return Source(name, where, "peak allocated, fullest rank", tuple(figures), Counter())


def _hf_stack() -> Iterator[Source]:
    """Runs whose every setting is known, and those of which only mean lengths are stated."""
    held, refused = hf_stack.kept()
    where = "foundation-model-stack/fms-acceleration 876e2ed and earlier revisions, scripts/benchmarks/refs*"
    for name, drawn in ((_FMS, False), (f"{_FMS}, lengths unknown", True)):
        ones = [one for one in held if (one.run.row.get("seq_len") is None) is drawn]
        figures = (
            Figure(name, "one GPU" if one.run.row["gpus"] == 1 else "fsdp1", hf_stack.method_of(one.run), "A100 80GB",
                   hf_stack.name_of(one.run), one.run.row["peak_allocated_bytes"], one.found_peak)
            for one in ones
        )  # fmt: skip
        why_not = Counter[str]() if drawn else refused
        room = [one.reserved / one.run.row["peak_allocated_bytes"] - 1 for one in ones]
        yield Source(name, where, "peak allocated, rank 0", tuple(figures), why_not, {"all": [one.held for one in ones]}, room)


_FMS = "fms-acceleration's benchmarks"


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
