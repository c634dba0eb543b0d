"""Print answers as text, one per line: ``python -m tests.answers.marked [--mark] [--every N] [--random N]``.

With ``--mark``, every text for people starts with a mark that names the line of the package that wrote it. These texts are the
reasons of lines and parts, the names of moments and points, and the ``what`` and ``when`` of collectives. The marks are removed
before an answer is printed. The answers are the same with and without marks, unless some code reads these texts.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zeroplan import JobSpec

#: The fields of each type that are texts for people.
_TEXTS: dict[str, dict[str, tuple[str, ...]]] = {
    "zeroplan.ledger": {"Line": ("reason",), "Moment": ("name",), "Collective": ("what", "when")},
    "zeroplan.transformer.blocks": {"BackwardPoint": ("name",)},
    "zeroplan.transformer.families.operators": {"Site": ("name",)},
    "zeroplan.transformer.families.tape": {"Alive": ("name",), "Operator": ("name",)},
    "zeroplan.steptime.parts": {"Part": ("name", "reason")},
    "zeroplan.engines.account": {"Symbol": ("meaning",)},
}
_MARK = re.compile("‹[^›]*›")


def mark_everything() -> None:
    """Make the constructors of these types put a mark before each text."""
    from importlib import import_module

    for module, types in _TEXTS.items():
        for name, fields in types.items():
            _mark_type(getattr(import_module(module), name), fields)
    store = import_module("zeroplan.transformer.families.tape").Store
    store.__init__ = _marking(store.__init__, {2: "reason"})
    line = import_module("zeroplan.ledger").Line
    traced: Any = import_module("zeroplan.transformer.families.traced")
    traced._line = lambda fields: line(*fields)  # the original skips the constructor, for speed


def _mark_type(kind: Any, fields: tuple[str, ...]) -> None:
    """Mark the texts of a named tuple: in its constructor, and in ``_replace``, which does not call the constructor."""
    kind.__new__ = _marking(kind.__new__, {1 + kind._fields.index(field): field for field in fields})
    kind._replace = _marking(kind._replace, dict(enumerate(fields, start=1000)))


def _marking(made: Callable[..., Any], texts: dict[int, str]) -> Callable[..., Any]:
    def marked(*given: Any, **named: Any) -> Any:
        where = sys._getframe(1)
        line = f"{Path(where.f_code.co_filename).stem}:{where.f_lineno}"
        words = [_marked(one, line) if at in texts else one for at, one in enumerate(given)]
        return made(*words, **{name: _marked(one, line) if name in texts.values() else one for name, one in named.items()})

    return marked


_FIRST: dict[str, str] = {}
"""By text, the line that wrote it first. Equal texts get equal marks, because the code numbers names that are equal."""


def _marked(text: object, line: str) -> object:
    return f"‹{_FIRST.setdefault(text, line)}›{text}" if isinstance(text, str) and text and not text.startswith("‹") else text


class Asked(NamedTuple):
    """A question's name, and a function that returns its answer as data for JSON."""

    name: str
    answer: Callable[[], object]


def questions(every: int, n_random: int) -> Iterator[Asked]:
    """Yield the memory and time of snapshot jobs, comparisons with records, random jobs (alone and in columns), and plans.

    It takes every ``every``-th job of the snapshot, and every ``3 * every``-th record.
    """
    from tests.answers import compare
    from tests.answers.figures import answered
    from tests.answers.jobs import kept
    from tests.measured import stored

    for one in islice(kept(), 0, None, every):
        yield Asked(one.words, lambda job=one.job: [_memory(job), _time(job)])
    for path in (*stored.SAMPLES, stored.VERSIONS):
        for number, measured in list(enumerate(stored.records(path), 1))[:: 3 * every]:
            yield Asked(f"verdict on record {number} of {path.name}", lambda measured=measured: _verdict(measured))
    for case in range(n_random):
        for question in compare._drawn(case):
            yield Asked(question.name, lambda jobs=question.jobs: answered(jobs))
    for words, fixed in _PLANS if every > 1 else (*_PLANS, *_WIDE_PLANS):
        yield Asked(f"plan {words} {fixed}", lambda words=words, fixed=fixed: _plan(words, fixed))


_PLANS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"model": "llama-3.2-1b", "gpus": 4, "gpu": "rtx-4090"}, {"engine": "fsdp2", "recompute": "full", "loss": "full"}),
    ({"model": "llama-3.2-1b", "gpus": 4, "gpu": "rtx-4090"}, {"engine": "deepspeed", "zero_stage": 3, "loss": "full"}),
)
_WIDE_PLANS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"model": "llama-2-7b", "gpus": 16, "gpu": "h100"}, {}),
    ({"model": "mixtral-8x7b", "gpus": 32, "gpu": "h100"}, {}),
)


def _memory(job: JobSpec) -> object:
    from zeroplan import estimate
    from zeroplan.report.payload import estimate_payload

    return estimate_payload(estimate(job))


def _time(job: JobSpec) -> object:
    from zeroplan.catalog.gpu import gpu
    from zeroplan.estimator import account_of
    from zeroplan.steptime import step_time

    on_h100 = replace(job, cluster=replace(job.cluster, gpu=gpu("h100")))
    time = step_time(account_of(job, job.batch), job.model, job.recipe, job.mesh, job.batch, on_h100.cluster)
    return [part[:4] for part in time.parts]


def _verdict(measured: Any) -> object:
    from zeroplan.comparison import compare_with_estimate
    from zeroplan.report.comparison import comparison_payload

    return comparison_payload(compare_with_estimate(measured), measured, tolerance=0.001)


def _plan(words: dict[str, Any], fixed: dict[str, Any]) -> object:
    from zeroplan import job
    from zeroplan.planner import Fixed, plan
    from zeroplan.report.plan import Beside, plan_payload

    return plan_payload(plan(job(**words), Fixed(global_batch_size=128, **fixed)), Beside(""))


def _text(asked: Asked) -> str:
    from zeroplan.errors import SpecError

    try:
        return _MARK.sub("", json.dumps(asked.answer(), ensure_ascii=False, default=str))
    except SpecError as error:
        return str(error)


def main() -> None:
    """Print one answer per line."""
    parser = argparse.ArgumentParser(prog="python -m tests.answers.marked", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mark", action="store_true")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="of kept jobs and records")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="random jobs")
    given = parser.parse_args()
    if given.mark:
        mark_everything()
    for asked in questions(given.every, given.random):
        sys.stdout.write(f"{json.dumps([asked.name, _text(asked)])}\n")


if __name__ == "__main__":
    main()
