"""Write docs/measured-on-gpus.md from the records in tests/on_gpus: ``python -m tests.on_gpus.gpu_page`` from the root.

Needs no torch. A test demands that the page is what the records say.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from tests.dryrun.survey import PUBLISHED as PUBLISHED_SCRIPTS
from tests.dryrun.survey import PUBLISHED_KEPT, Program, kept, programs
from tests.on_gpus.gpu_records import EVERY, FOLDER, MEDIAN, RECORDS, Seen, Where, seen
from zeroplan.units import GIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PAGE = Path(__file__).parents[2] / "docs" / "measured-on-gpus.md"
PUBLISHED = FOLDER / "published.toml"
Row = tuple[str, ...]
_NOTHING = "not said"


def write() -> None:
    """Write the page."""
    PAGE.write_text(page(seen()), encoding="utf-8")


def page(found: list[Seen]) -> str:
    """The page, in Markdown."""
    return "\n".join([*_top(found), *_cases(found), *_published(), *_own_scripts(), *_yours()])


def _top(found: list[Seen]) -> Iterator[str]:
    yield "# Measured on GPUs\n"
    if not found:
        yield (
            "**No record of a GPU is kept here yet: nothing on this page was measured by zeroplan itself.** What follows are\n"
            "figures that others measured and published. The numbers of [validation](validation.md) come from the engines' own\n"
            "code on tensors without bytes, which is another kind of evidence: [why to believe it](verify.md).\n"
        )
        return
    yield (
        f"{len(found)} cases on {len({one.where.gpu for one in found})} kinds of GPU, as `zeroplan verify --backend cuda` recorded "
        f"them; the records are in `tests/on_gpus/records`, and this page is written from them.\n"
    )
    yield _table(("what was asked", "asked", "reached"), [*_reached(found)])


def _reached(found: list[Seen]) -> Iterator[Row]:
    errors = _errors(found)
    if errors:
        yield f"peak allocated of every case within {EVERY:.0%}", "100 %", f"{_share([one <= EVERY for one in errors])}"
        yield "median error of the peak", f"{MEDIAN:.1%}", f"{median(errors):.2%}"
    sure = [one for one in found if one.judged.fits is not None and not one.judged.at_the_edge]
    yield f"verdict right, outside {EVERY:.0%} of the capacity", "100 %", _share([_right(one) for one in sure])
    yield "reserved within its band", "100 %", _share([bool(one.reserved_within) for one in found if one.record is not None])


def _errors(found: list[Seen]) -> list[float]:
    return [abs(one.judged.comparison.peak.error) for one in found if one.judged.comparison is not None]


def _right(one: Seen) -> bool:
    """Whether it ran where it was said to fit, and ran out of memory where it was not."""
    return one.judged.fits is (one.record is not None)


def _share(truths: Sequence[bool]) -> str:
    return f"{sum(truths) / len(truths):.1%} of {len(truths)}" if truths else "none to judge"


def _cases(found: list[Seen]) -> Iterator[str]:
    """A table for each GPU, driver, torch and day."""
    for where in dict.fromkeys(one.where for one in found):
        of_it = [one for one in found if one.where == where]
        yield f"## {where.gpu}\n"
        yield f"{_told(where)}; {_summed(of_it)}\n"
        yield _table(_HEAD, [_row(one) for one in of_it], text=(0, 6))


_HEAD = ("case", "predicted, GiB", "measured, GiB", "off", "reserved, predicted", "reserved", "verdict", "step, s")


def _told(where: Where) -> str:
    return f"Driver {where.driver}, torch {where.torch}, CUDA {where.cuda}, {where.date}"


def _summed(of_it: list[Seen]) -> str:
    errors = _errors(of_it)
    said = f"{len(of_it)} cases"
    return said if not errors else f"{said}, off by {median(errors):.2%} in the median and {max(errors):.2%} at most"


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
    said = {True: "fits", False: "does not fit", None: "unknown"}[one.judged.fits]
    came = "ran" if one.record is not None else "out of memory"
    return f"{said}, {came}{' (at the edge)' if one.judged.at_the_edge else ''}"


def _seconds(one: Seen) -> str:
    seconds = None if one.record is None else one.record.steady.seconds
    return "" if seconds is None else f"{seconds:.3f}"


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / GIB:.2f}"


def _published() -> Iterator[str]:
    rows = tomllib.loads(PUBLISHED.read_text(encoding="utf-8"))["row"]
    yield "## Measured and published by others\n"
    yield (
        "*Simulated* is the source's own program, run again on tensors without bytes (`tests/verify/published`, nothing\n"
        "fitted); *estimate* is `zeroplan estimate` of the job. Sources do not say which driver ran, and not always which GPU.\n"
    )
    head = ("what", "GPU", "torch", "when", "counter", "measured", "zeroplan", "how", "source")
    yield _table(head, [_published_row(row) for row in rows], text=(0, 1, 2, 3, 4, 7, 8))
    yield (
        "The model of CUDA's caching allocator replays three public snapshots of real GPUs and takes from the card what they\n"
        "took, at each of 13,389 requests (`tests/test_allocator.py`).\n"
    )


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
        "What the authors ran is run again without a GPU ([how](dryrun.md)): the script of the repository at the named commit, or\n"
        "the code of the page with its strategy put in. torchtitan's imports a name that torch has changed since;\n"
        "`tests/dryrun/scripts/with_earlier_torch.py` gives it back. `python -m tests.dryrun.survey published` runs all of them\n"
        "again, and `tests/dryrun/published.toml` has the commands.\n"
    )
    head = ("script", "counter", "measured", "dry run", "difference", "ran with", "why it differs", "source")
    rows = [_own_script(program, found[program.name]) for program in programs(PUBLISHED_SCRIPTS) if program.name in found]
    yield _table(head, rows, text=(0, 1, 5, 6, 7))


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

A record of any GPU is welcome, above all of a case that disagrees ([how](verify-on-gpus.md#contribute-records)):
`zeroplan verify --matrix one-140gb --backend cuda --record-dir DIR`, then `python -m tests.on_gpus.gpu_check DIR/*.jsonl`, which
says what is missing or private in it, and a pull request that puts the file into `{folder}`.
`python -m tests.on_gpus.gpu_page` writes this page; `python -m tests.on_gpus.calibrate` derives from the records what only hardware
can tell.
"""


def _table(head: Row, rows: Sequence[Row], text: tuple[int, ...] = (0,)) -> str:
    marks = ["---" if column in text else "---:" for column in range(len(head))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, tuple(marks), *rows)) + "\n"


if __name__ == "__main__":
    write()
