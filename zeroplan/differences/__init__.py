"""Compares two estimates, answers, records, dry runs, snapshots or traces. Needs no torch. Start at :func:`diff`."""

from os import PathLike, fspath
from pathlib import Path

from zeroplan.differences.difference import Changed, Difference, SameMoment, Setting, between
from zeroplan.differences.estimated import of_estimate
from zeroplan.differences.side import At, Grain, Held, Sent, Side
from zeroplan.estimator import Estimate, judged
from zeroplan.spec.job import JobSpec

__all__ = [
    "At",
    "Changed",
    "Difference",
    "Grain",
    "Held",
    "SameMoment",
    "Sent",
    "Setting",
    "Side",
    "between",
    "diff",
    "of_estimate",
]

Comparable = Estimate | JobSpec | str | PathLike[str]


def diff(before: Comparable, after: Comparable) -> Difference:
    """Return the tensors that came, went, grew or shrank between two peaks; their bytes add up to the peaks' difference.

    Each argument is a job, an estimate, or the path of a file: a job, a configuration, an answer's JSON, a record, a dry run, a
    snapshot of torch's allocator, a trace. Raises :class:`~zeroplan.errors.SpecError`, in one line, for any other file.

    >>> from zeroplan import job
    >>> found = diff(job(model="gpt2", gpus=8, stage=2), job(model="gpt2", gpus=8, stage=3))
    >>> sum(one.change_bytes for one in found.changes) == found.peak.change_bytes
    True
    >>> [(one.name, one.before, one.after) for one in found.settings]
    [('stage', '2', '3')]
    """
    return between(_side(before), _side(after))


def _side(one: Comparable) -> Side:
    if isinstance(one, JobSpec):
        return of_estimate(judged(one))
    if isinstance(one, Estimate):
        return of_estimate(one)
    if not isinstance(one, str | PathLike):
        raise TypeError(f"diff() takes jobs, estimates and paths, not {one!r:.60}")
    from zeroplan.differences.reading import opened  # noqa: PLC0415  only a file pays for it
    from zeroplan.resolve import resolve, with_fetched  # noqa: PLC0415

    path = Path(fspath(one))
    found = opened(path)
    if found.side is not None:
        return found.side
    assert found.request is not None  # noqa: S101  a file without figures is a job
    return of_estimate(judged(resolve(with_fetched(found.request)).job), path.name)
