"""Figures that others measured on GPUs, beside zeroplan's, in one form for all sources. Needs no torch."""

from __future__ import annotations

import tomllib
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.dryrun.survey import PUBLISHED as PUBLISHED_SCRIPTS
from tests.dryrun.survey import PUBLISHED_KEPT, kept, programs
from tests.measured import hf_stack, megatron_b200, megatron_blocks, megatron_golden
from tests.on_gpus import others
from zeroplan.units import GIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

FOLDER = Path(__file__).parent
PUBLISHED, CAUSES = FOLDER / "published.toml", FOLDER / "causes.toml"
#: How zeroplan found its figure: by an estimate from the settings, by a simulation, or by a dry run of the source's own program.
ESTIMATE, SIMULATED, DRY_RUN = "estimate", "simulated", "dry run"
#: Figures whose error is larger need a cause.
FAR = 0.03
OPEN = "open"


class Figure(NamedTuple):
    """One measured figure and zeroplan's, in the same unit."""

    source: str
    engine: str
    method: str
    """What is trained, in a few words: the kind of model, or full weights, LoRA and so on."""
    gpu: str
    name: str
    """The row's name in its source."""
    measured: float
    found: float
    how: str = ESTIMATE
    why: str = ""
    """The source's own explanation of a difference."""

    @property
    def error(self) -> float:
        """Return the relative error of zeroplan's figure; negative if it is too low."""
        return self.found / self.measured - 1


def ninety(errors: Sequence[float]) -> float:
    """Return the absolute error that 90 of 100 rows stay within, as a share.

    >>> ninety([0.01, -0.02, 0.03, -0.04, 0.05, 0.06, 0.07, 0.08, 0.09, 0.5])
    0.09
    """
    return sorted(map(abs, errors))[-(-9 * len(errors) // 10) - 1]


class Source(NamedTuple):
    """All figures of a source, and the rows that zeroplan cannot express."""

    name: str
    where: str
    """The repository and commit, or the page."""
    counter: str
    """The quantity that was measured."""
    figures: tuple[Figure, ...]
    refused: Counter[str]
    """Numbers of rows by the reason why zeroplan cannot express them."""
    held: Mapping[str, Sequence[float]] = {}
    """Relative errors of the memory held between steps, by kind of run; negative if zeroplan's figure is too low."""
    room: Sequence[float] = ()
    """Expected reserved memory over the measured peak, less one. zeroplan says that a card with that much memory fits the job. A
    value below 0 shows that this is wrong."""


@cache
def sources() -> tuple[Source, ...]:
    """Return every source in the order of the page."""
    return _megatron(), _b200(), *_hf_stack(), *_others(), _reports()


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
    """Yield the runs whose settings are all known, then those whose sequence lengths are not stated."""
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


def _others() -> Iterator[Source]:
    """Yield runs of other people's programs, estimated from their own files."""
    found = others.kept()
    for number, (name, where, counter) in enumerate(found.sources):
        figures = (
            Figure(name, row["engine"], row["method"], row["gpu"], row["what"], row["measured"], row["predicted"])
            for row in found.rows
            if row["source"] == number
        )
        yield Source(name, where, counter, tuple(figures), found.refused_of(number))


def _reports() -> Source:
    """Return single figures from reports, and dry runs of the sources' own scripts."""
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
    """Read a number in the form that a source prints."""
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
    """Return why a figure is far off; ``open`` if no known cause explains it.

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
    """Return the known causes from ``causes.toml``."""
    found: list[dict[str, Any]] = tomllib.loads(CAUSES.read_text(encoding="utf-8"))["cause"]
    return found
