"""Do the jobs of several files fit? Renders the answers for people, CI systems and programs."""

import json
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple
from xml.etree import ElementTree  # noqa: ICN001  a full name; written, never read

from zeroplan.allocator import expandable_segments_are_set
from zeroplan.errors import SpecError
from zeroplan.estimator import Estimate
from zeroplan.report.words import headline, plural, verdict_sentence
from zeroplan.spec.job import JobSpec
from zeroplan.units import GIBIBYTES

SCHEMA_VERSION = 1

Outcome = Literal["fits", "tight", "not all counted", "needs expandable segments", "does not fit", "invalid"]
Format = Literal["text", "json", "junit", "github"]
FORMATS: tuple[Format, ...] = ("text", "json", "junit", "github")


class Checked(NamedTuple):
    """One file: its job's outcome, one line of text, and its figures [bytes] if the file has a job."""

    file: str
    outcome: Outcome
    says: str
    job: str = ""
    needed_bytes: int | None = None
    capacity_bytes: int | None = None


def checked(
    file: str, answer: Estimate, not_counted: Sequence[str] = (), *, may_be_too_low: bool = False, loop: "Beside | None" = None
) -> Checked:  # fmt: skip
    """Return the verdict on a file's job, which must name a GPU.

    ``not_counted``: keys that matter and that zeroplan does not model; ``may_be_too_low``: some of them may need memory.
    ``loop``: the result of the loop to which the file's training step belongs.
    """
    batch = answer.job.batch
    says = verdict_sentence(answer, GIBIBYTES)
    says += f" Counted: {plural(batch.micro_batch_size, 'sequence')} of {batch.seq_len:,} tokens at a time."
    says += f" {loop.says}" if loop is not None else ""
    says += f" What these keys do to memory is not counted: {', '.join(not_counted)}." if not_counted else ""
    outcome = outcome_of(answer)
    if outcome in ("fits", "tight", "needs expandable segments") and loop is not None and loop.fits is False:
        outcome = "does not fit"
    elif outcome in ("fits", "tight") and (may_be_too_low or (loop is not None and loop.fits is None)):
        outcome = "not all counted"
    needed = max(answer.least_bytes, 0 if loop is None else loop.least_bytes)
    return Checked(file, outcome, says, headline(answer), needed, answer.capacity_bytes)


class Beside(NamedTuple):
    """The result of a loop of phases: whether all fit (None if unknown), one line of text, and the memory it needs. [bytes]"""

    fits: bool | None
    says: str
    least_bytes: int = 0


def loop_beside(job: JobSpec, loop: Mapping[str, object]) -> Beside | None:
    """Return the result of the loop that a file configures around the job's training step; None without a loop."""
    if not loop or loop.get("alone"):
        return None
    from zeroplan.report.workflow import verdict_of  # noqa: PLC0415  few files have a loop
    from zeroplan.workflow import loop_of_file  # noqa: PLC0415

    try:
        found = loop_of_file(job, loop)
    except SpecError as error:
        return Beside(None, f"Its training step alone is counted, not its loop ({loop['workflow']}): {error}.")
    fits = None if found.answer.capacity_bytes is None else found.verdict != "does not fit"
    return Beside(fits, f"With all phases of its loop ({found.workflow}): {verdict_of(found)}", found.least_bytes)


def outcome_of(answer: Estimate) -> Outcome:
    """Whether the job fits its GPU, given this environment's setting of expandable segments."""
    if not answer.fits:
        return "does not fit"
    if answer.needs_expandable_segments and not expandable_segments_are_set():
        return "needs expandable segments"
    return "tight" if answer.verdict == "tight" else "fits"


def passes(answer: Estimate) -> bool:
    """Whether a check of the job passes here: it fits its GPU, comfortably or tightly."""
    return outcome_of(answer) in ("fits", "tight")


def refused(file: str, why: str) -> Checked:
    """Return the row of a file without a valid job."""
    return Checked(file, "invalid", why)


def shown(rows: Sequence[Checked], how: Format, *, fails: frozenset[Outcome]) -> str:
    """Return all rows in a format; ``fails`` are the outcomes that fail a check."""
    return {"text": _text, "json": _json, "junit": _junit, "github": _github}[how](rows, fails)


def _text(rows: Sequence[Checked], fails: frozenset[Outcome]) -> str:
    def word(row: Checked) -> str:
        if row.outcome in fails:
            return "ERROR" if row.outcome == "invalid" else "FAIL"
        return "ok?" if row.outcome == "not all counted" else "ok"

    return "\n".join(f"{word(row):<5} {row.file}: {row.says}" for row in rows)


def _json(rows: Sequence[Checked], fails: frozenset[Outcome]) -> str:
    rows_shown = [{**row._asdict(), "failed": row.outcome in fails} for row in rows]
    return json.dumps({"schema_version": SCHEMA_VERSION, "checks": rows_shown}, indent=2, ensure_ascii=False)


def _junit(rows: Sequence[Checked], fails: frozenset[Outcome]) -> str:
    """Return JUnit XML: a job that does not fit is a failure, a file without a job an error."""
    failed = [row for row in rows if row.outcome in fails]
    errors = sum(row.outcome == "invalid" for row in failed)
    counts = {"tests": str(len(rows)), "failures": str(len(failed) - errors), "errors": str(errors)}
    suite = ElementTree.Element("testsuite", {"name": "zeroplan check", **counts})
    for row in rows:
        case = ElementTree.SubElement(suite, "testcase", {"name": _plain(row.file), "classname": "zeroplan"})
        if row.outcome in fails:
            kind = "error" if row.outcome == "invalid" else "failure"
            ElementTree.SubElement(case, kind, {"message": _plain(row.says), "type": row.outcome})
        else:
            ElementTree.SubElement(case, "system-out").text = _plain(row.says)
    ElementTree.indent(suite)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suite, encoding="unicode")


def _plain(text: str) -> str:
    """Return a text with spaces for control characters, which XML forbids."""
    return "".join(sign if sign.isprintable() else " " for sign in text)


def _github(rows: Sequence[Checked], fails: frozenset[Outcome]) -> str:
    """Return workflow commands of GitHub Actions, which annotate each file."""
    levels: dict[Outcome, str] = {"fits": "notice", "tight": "warning", "not all counted": "warning"}
    lines = (
        f"::{'error' if row.outcome in fails else levels.get(row.outcome, 'error')} "
        f"file={_escaped(row.file, of_property=True)},title=zeroplan::{_escaped(row.says)}"
        for row in rows
    )
    return "\n".join(lines)


def _escaped(text: str, *, of_property: bool = False) -> str:
    r"""Return a text escaped for workflow commands; properties also escape commas and colons.

    >>> _escaped("50 %\nof it"), _escaped("a,b:c", of_property=True)
    ('50 %25%0Aof it', 'a%2Cb%3Ac')
    """
    for sign, code in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A"), *(((",", "%2C"), (":", "%3A")) if of_property else ())):
        text = text.replace(sign, code)
    return text


def summary(rows: Sequence[Checked], fails: frozenset[Outcome]) -> str:
    """Return how many files pass, and the memory of the largest job."""
    failed = sum(row.outcome in fails for row in rows)
    needed = max((row.needed_bytes for row in rows if row.needed_bytes is not None), default=None)
    largest = "" if needed is None else f"; the largest needs {GIBIBYTES.size(needed)}"
    return f"{len(rows) - failed} of {len(rows)} pass{largest}"
