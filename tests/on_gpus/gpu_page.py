"""Writes docs/measured-on-gpus.md from all kept figures of GPUs: ``python -m tests.on_gpus.gpu_page`` from the root.

Needs no torch. A test requires that the page is up to date.
"""

from __future__ import annotations

import tomllib
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.docs.generated.markdown import table
from tests.dryrun.survey import PUBLISHED as PUBLISHED_SCRIPTS
from tests.dryrun.survey import PUBLISHED_KEPT, Program, kept, programs
from tests.measured import reserved_on_gpus
from tests.on_gpus.figures import (
    DRY_RUN,
    ESTIMATE,
    FAR,
    OPEN,
    PUBLISHED,
    SIMULATED,
    Figure,
    Source,
    cause_of,
    causes,
    ninety,
    sources,
)
from tests.on_gpus.gpu_records import EVERY, MEDIAN, RECORDS, Seen, Where, seen
from zeroplan.report.words import plural
from zeroplan.units import GIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PAGE = Path(__file__).parents[2] / "docs" / "measured-on-gpus.md"
Row = tuple[str, ...]
_NOTHING = "not stated"


def write() -> None:
    """Write the page."""
    PAGE.write_text(page(seen(), sources()), encoding="utf-8")


def page(found: list[Seen], published: Sequence[Source]) -> str:
    """Return the page in Markdown."""
    own, others = (
        (*_top(found), *_cases(found)),
        (*_others(published), *_reserved_elsewhere(), *_expressed(published), *_far_off(published)),
    )
    return "\n".join((*own, *others, *_single(), *_own_scripts(), *_yours()))


# --- what zeroplan measured itself ------------------------------------------------------------------------------------------


def _top(found: list[Seen]) -> Iterator[str]:
    yield "# Measured on GPUs\n"
    if not found:
        yield (
            "**No record of a GPU is kept here yet: zeroplan itself measured nothing on this page.** The figures below are from\n"
            "others, who measured and published them. The numbers of [validation](validation.md) come from the engines' own code\n"
            "on tensors without bytes, which is another kind of evidence: [why to believe it](verify.md).\n"
        )
        return
    kinds = plural(len({one.where.gpu for one in found}), "kind")
    yield (
        f"`zeroplan verify --backend cuda` recorded {len(found)} cases on {kinds} of GPU.\n"
        "The records are in `tests/on_gpus/records`. Errors have a sign: a negative one means that the estimate is too low.\n"
    )
    yield table(("goal", "goal value:", "reached:"), [*_reached(found)])
    yield "### By engine and stage\n"
    head = (
        "engine",
        "stage",
        "cases:",
        "ran:",
        "peak, median error:",
        "of its absolute value:",
        "lowest:",
        "highest:",
        "reserved in band:",
    )
    yield table(head, [*_by_engine(found)])


def _reached(found: list[Seen]) -> Iterator[Row]:
    errors = [abs(error) for error in _errors(found)]
    if errors:
        yield f"peak allocated of every case within {EVERY:.0%}", "100 %", f"{_share([one <= EVERY for one in errors])}"
        yield "median error of the peak", f"{MEDIAN:.1%}", f"{median(errors):.2%}"
    sure = [one for one in found if one.judged.fits is not None and not one.judged.at_the_edge]
    yield f"verdict right, outside {EVERY:.0%} of the capacity", "100 %", _share([_right(one) for one in sure])
    yield "reserved within its band", "100 %", _share([bool(one.reserved_within) for one in found if one.record is not None])


def _by_engine(found: list[Seen]) -> Iterator[Row]:
    groups: dict[tuple[str, int], list[Seen]] = defaultdict(list)
    for one in found:
        recipe = one.judged.result.task.job.recipe
        groups[recipe.engine, recipe.zero_stage].append(one)
    for (engine, stage), ones in sorted(groups.items()):
        ran, errors = [one for one in ones if one.record is not None], _errors(ones)
        within = _share([bool(one.reserved_within) for one in ran]) if ran else ""
        yield (engine, str(stage), str(len(ones)), str(len(ran)), *_spread(errors), within)


def _spread(errors: Sequence[float]) -> Row:
    if not errors:
        return "", "", "", ""
    return (
        _signed(median(errors)), f"{100 * median(map(abs, errors)):.2f} %", _signed(min(errors)), _signed(max(errors)),
    )  # fmt: skip


def _signed(share: float) -> str:
    return f"{100 * share:+.2f} %"


def _errors(found: list[Seen]) -> list[float]:
    return [one.judged.comparison.peak.error for one in found if one.judged.comparison is not None]


def _right(one: Seen) -> bool:
    """Whether the verdict was right: the case ran and the estimate fits, or it ran out of memory and the estimate does not."""
    return one.judged.fits is (one.record is not None)


def _share(truths: Sequence[bool]) -> str:
    return f"{sum(truths) / len(truths):.1%} of {len(truths)}" if truths else "none to judge"


def _cases(found: list[Seen]) -> Iterator[str]:
    """Yield a table for each GPU, driver, torch and day."""
    for where in dict.fromkeys(one.where for one in found):
        of_it = [one for one in found if one.where == where]
        yield f"## {where.gpu}\n"
        yield f"{_versions(where)}; {_summed(of_it)}\n"
        yield table(_HEAD, [_row(one) for one in of_it])


_HEAD = (
    "case", "predicted, GiB:", "measured, GiB:", "off:", "reserved, predicted:", "reserved:", "verdict", "step, s:",
)  # fmt: skip


def _versions(where: Where) -> str:
    return f"Driver {where.driver}, torch {where.torch}, CUDA {where.cuda}, {where.date}"


def _summed(of_it: list[Seen]) -> str:
    errors = [abs(error) for error in _errors(of_it)]
    cases = f"{len(of_it)} cases"
    return cases if not errors else f"{cases}, off by {median(errors):.2%} in the median and {max(errors):.2%} at most"


def _row(one: Seen) -> Row:
    peak = None if one.judged.comparison is None else one.judged.comparison.peak
    predicted = one.judged.predicted if peak is None else peak.predicted
    return (
        one.name,
        _gib(predicted),
        "" if peak is None else _gib(peak.measured),
        "" if peak is None else f"{peak.error:+.2%}",
        *_reserved(one),
        _verdict(one),
        _seconds(one),
    )


def _reserved(one: Seen) -> tuple[str, str]:
    if one.reserved is None:
        return "", ""
    band, took = one.reserved
    return f"{_gib(int(band.low_bytes))} to {_gib(int(band.high_bytes))}", _gib(took)


def _verdict(one: Seen) -> str:
    verdict = {True: "fits", False: "does not fit", None: "unknown"}[one.judged.fits]
    outcome = "ran" if one.record is not None else "out of memory"
    return f"{verdict}, {outcome}{' (at the edge)' if one.judged.at_the_edge else ''}"


def _seconds(one: Seen) -> str:
    seconds = None if one.record is None else one.record.steady.seconds
    return "" if seconds is None else f"{seconds:.3f}"


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / GIB:.2f}"


# --- what others measured ---------------------------------------------------------------------------------------------------


class Group(NamedTuple):
    """The figures of one row of the summary."""

    how: str
    source: str
    engine: str
    method: str
    gpu: str


_PUBLIC = (
    "These figures are public. *Estimate* means `zeroplan estimate` with the settings that the source states. Nothing is\n"
    "fitted to a row. *Simulated* and *dry run* run the source's own program again without a GPU: they show that the\n"
    "simulator is right, not that a formula is. *90 in 100* is the error that 90 of 100 rows stay within. The lowest error\n"
    "is the most optimistic one.\n"
)
_HELD = (
    "The next table compares the memory held between steps, if a source counts it. Without expandable segments torch's\n"
    "allocator does not split a block if less than a MiB would remain, and counts the whole block. *With blocks that are not\n"
    "split* adds this for runs without the distributed optimizer: the model of the allocator places their states one after\n"
    "another (`tests/measured/megatron_blocks.py`).\n"
)
_ROOM = (
    "The verdict is *fits* if a GPU has room for the expected reserved memory. If a run's measured peak is above that, the\n"
    "verdict can be *fits* although the run runs out of memory. The table counts such runs. For BERT, T5 and experts under\n"
    "Megatron-Core the verdict adds the largest excess of these runs over their estimates, so it has no such runs there:\n"
)
_SNAPSHOTS = (
    "The model of CUDA's caching allocator replays three public snapshots of real GPUs. At each of\n"
    "13,389 requests it reserves what the GPU reserved (`tests/test_allocator.py`).\n"
    "`zeroplan diagnose` replays any snapshot. It also agreed with the GPU at each of 54,084 requests in 22 more:\n"
    "12 of Hyperion-shuo/assignment2-systems, 10 of LINYUNLinYun/CS336-assignment2-systems. These are not kept here.\n"
)
#: The heads of a row of errors.
_ERRORS = ("rows:", "median:", "of its absolute value:", "90 in 100:", "lowest:", "highest:")


def _others(published: Sequence[Source]) -> Iterator[str]:
    yield "## What others measured\n"
    yield _PUBLIC
    yield table(("zeroplan's figure", "source", "engine", "method", "GPU", *_ERRORS), [*_summary(published)])
    yield "\n".join(f"- {one.name}: {one.where}; {one.counter}." for one in published) + "\n"
    yield _HELD
    kept = [(one.name, runs, errors) for one in published for runs, errors in one.held.items()]
    rows = [(name, runs, str(len(errors)), *_of_errors(errors)) for name, runs, errors in kept]
    yield table(("source", "runs", *_ERRORS), rows)
    yield _ROOM
    of_sources = [(one.name, one.room) for one in published if one.room]
    rows = [(name, str(len(room)), str(sum(one < 0 for one in room)), _signed(min(room))) for name, room in of_sources]
    yield table(("source", "rows:", "peak above it:", "least room:"), rows)
    yield _SNAPSHOTS


def _summary(published: Sequence[Source]) -> Iterator[Row]:
    groups: dict[Group, list[float]] = defaultdict(list)
    for source in published:
        for one in source.figures:
            groups[Group(one.how, one.source, one.engine, one.method, "all")].append(one.error)
            groups[Group(one.how, one.source, one.engine, one.method, one.gpu)].append(one.error)
    order = (ESTIMATE, SIMULATED, DRY_RUN)
    for group, errors in sorted(groups.items(), key=lambda one: (order.index(one[0].how), *one[0][1:])):
        gpus = {other.gpu for other in groups if other[:4] == group[:4]}
        if group.gpu == "all" and len(gpus) == 2:  # with a single GPU, its own row is enough
            continue
        yield (*group, str(len(errors)), *_of_errors(errors))


def _of_errors(errors: Sequence[float]) -> Row:
    middle, absolute, low, high = _spread(errors)
    return middle, absolute, f"{100 * ninety(errors):.2f} %", low, high


def _reserved_elsewhere() -> Iterator[str]:
    """Yield the section on reserved memory in others' runs, beside the estimate with and without a replay."""
    yield "### Reserved memory\n"
    yield (
        "These sources count what CUDA's allocator reserves. *Estimate* is the expected figure that `zeroplan estimate` prints,\n"
        "*replay* that of `--replay`, which computes every request of the first steps; if a job has no replay, the estimate's.\n"
        "torchtitan's programs of 2024 kept the logits in fp32 (`--keep-logits fp32`), and the estimate uses\n"
        "transformers' modules for all but f8f545c45 and 9dec370 (`--modules torchtitan`). On a full GPU, the replay frees\n"
        "its cache as the allocator does: prime-rl's SFT of 65,536 tokens on B200.\n"
    )
    scored, head = reserved_on_gpus.scored(), ("source", "zeroplan's figure", "rows:", "median:", "of its absolute value:",
                                               "90 in 100:", "lowest:", "highest:", "in the band:",
                                               "its median width:")  # fmt: skip
    names = [str(source["name"]) for source in reserved_on_gpus.kept()]
    groups = [(name, [one for one in scored if one.source == name]) for name in names] + [("all", [*scored])]
    rows = [_reserved_row(name, ones, replayed=replayed) for name, ones in groups for replayed in (False, True)]
    yield table(head, rows)
    yield "\n".join(f"- {one['name']}: {one['where']}; {one['counter']}." for one in reserved_on_gpus.kept()) + "\n"
    head = ("run", "measured, GiB:", "estimate:", "its band:", "replay:", "its band:")
    yield table(head, [(one.name, _gib(round(one.measured)), *_both_bands(one)) for one in scored])
    yield (
        "The replay of Llama 2 7B with full recomputation is 11 % too low. torchtitan's own script of that commit under\n"
        "`zeroplan dryrun` reserves 30.8 GiB, so the requests of its modules differ from transformers'. No row was used to derive\n"
        "the [replay's band](model/device.md#one-figure-instead-of-the-range). zeroplan\n"
        "cannot describe these runs of the sources as jobs:\n"
    )
    refused = [
        (source["name"], one["reason"], str(one["rows"])) for source in reserved_on_gpus.kept() for one in source["refused"]
    ]
    yield table(("source", "reason", "rows:"), refused)


def _reserved_row(name: str, ones: list[reserved_on_gpus.Reserved], *, replayed: bool) -> Row:
    errors, inside = [one.error(replayed) for one in ones], [one.inside(replayed) for one in ones]
    return (
        name,
        "replay" if replayed else ESTIMATE,
        str(len(ones)),
        *_of_errors(errors),
        _share(inside),
        _width(ones, replayed=replayed),
    )


def _width(ones: list[reserved_on_gpus.Reserved], *, replayed: bool) -> str:
    return f"{median(one.width(replayed) for one in ones):.1%}"


def _both_bands(one: reserved_on_gpus.Reserved) -> Iterator[str]:
    for number, (low, expected, high) in enumerate(one.bands):
        shown = not number or one.bands[0] != one.bands[1]
        yield _gib(int(expected)) if shown else "none"
        yield f"{_gib(int(low))} to {_gib(int(high))}" if shown else ""


def _expressed(published: Sequence[Source]) -> Iterator[str]:
    yield "## What cannot be expressed\n"
    yield (
        "Some rows of these sources cannot be written as a job of zeroplan. The table gives the reasons. No error above contains\n"
        "these rows.\n"
    )
    rows = []
    for source in published:
        if source.refused:
            refused, answered = sum(source.refused.values()), sum(one.how == ESTIMATE for one in source.figures)
            share = f"{100 * answered / (answered + refused):.0f} % of {answered + refused}"
            rows.append((source.name, "rows that have an estimate", share))
            rows += [("", reason, str(count)) for reason, count in source.refused.most_common()]
    yield table(("source", "reason", "rows:"), rows)


def _far_off(published: Sequence[Source]) -> Iterator[str]:
    known = causes()
    far = sorted((one for source in published for one in source.figures if abs(one.error) > FAR), key=lambda one: one.error)
    opened = sum(cause_of(one, known) == OPEN for one in far)
    yield f"## Further off than {100 * FAR:.0f} %\n"
    yield (
        f"Every figure above that is more than {100 * FAR:.0f} % off: {len(far)}. Of these, {opened} are *open*: we have\n"
        "not found the cause. A cause comes from the source's or the engine's code, not from the size of the error.\n"
    )
    yield table(("figure", "GPU", "zeroplan's figure", "error:", "cause"), [_far_row(one, known) for one in far])


def _far_row(one: Figure, known: list[dict[str, Any]]) -> Row:
    return one.name, one.gpu, one.how, f"{100 * one.error:+.1f} %", cause_of(one, known)


def _single() -> Iterator[str]:
    rows = tomllib.loads(PUBLISHED.read_text(encoding="utf-8"))["row"]
    yield "## Single figures from reports\n"
    yield (
        "*Simulated* figures come from `tests/verify/published`. Sources do not state which driver ran, and not always which GPU.\n"
    )
    head = ("job", "GPU", "torch", "when", "counter", "measured:", "zeroplan:", "how", "source")
    yield table(head, [_published_row(row) for row in rows])


def _published_row(row: dict[str, str]) -> Row:
    unit = "" if row["unit"].startswith("%") else f" {row['unit']}"
    measured, predicted = (f"{_digits(row[key])}{unit or ' %'}" for key in ("measured", "predicted"))
    counter = row["counter"] + (f" (reserved {row['reserved']} %)" if row["reserved"] else "")
    facts = (row[key] or _NOTHING for key in ("gpu", "torch", "date"))
    return (row["what"], *facts, counter, measured, predicted, row["how"], row["source"])


def _own_scripts() -> Iterator[str]:
    found = {row["name"]: row for row in kept(PUBLISHED_KEPT)}
    yield "## The source's own script under `zeroplan dryrun`\n"
    yield (
        "`zeroplan dryrun` repeats the authors' runs without a GPU ([how](dryrun.md)). It runs the script of the repository at\n"
        "the named commit, or the code on the page with its strategy filled in. torchtitan's script imports a name that torch has\n"
        "changed since; `tests/dryrun/scripts/with_earlier_torch.py` restores it. `python -m tests.dryrun.survey published` runs\n"
        "all scripts again.\n"
        "`tests/dryrun/published.toml` has the commands.\n"
    )
    head = ("script", "counter", "measured:", "dry run:", "difference:", "ran with", "why it differs", "source")
    yield table(
        head, [_own_script(program, found[program.name]) for program in programs(PUBLISHED_SCRIPTS) if program.name in found]
    )


def _own_script(program: Program, row: dict[str, Any]) -> Row:
    assert program.figure is not None
    measured, shown = program.figure.measured, program.figure.printed(row["found"])
    off = 100 * (float(shown) / float(measured) - 1)
    same = shown == measured
    return (
        program.name, program.figure.counter, _digits(measured), _digits(shown), "none" if same else f"{off:+.1f} %",
        program.ran_with, program.why, program.source,
    )  # fmt: skip


def _digits(text: str) -> str:
    return f"{int(text):,}" if text.isdigit() else text


def _yours() -> Iterator[str]:
    folder = RECORDS.relative_to(Path(__file__).parents[2]).as_posix()
    yield f"""\
## Add yours

A record of any GPU is welcome, above all of a case that disagrees ([how](verify-on-gpus.md#contribute-records)). Run
`zeroplan verify --matrix one-140gb --backend cuda --record-dir DIR`, then `python -m tests.on_gpus.gpu_check DIR/*.jsonl`, which
lists what is missing or private in it. Then open a pull request that puts the file into `{folder}`.
`python -m tests.on_gpus.gpu_page` writes this page. `python -m tests.on_gpus.calibrate` derives from the records what only hardware
can show.
"""


if __name__ == "__main__":
    write()
