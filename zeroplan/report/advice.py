"""Renders advice: the job, each change with the memory it saves and its cost, and the key to change."""

import textwrap
from collections.abc import Callable, Iterator

from zeroplan.advice import Advice, Advised
from zeroplan.estimator import Estimate
from zeroplan.report.payload import SCHEMA_VERSION
from zeroplan.report.words import WIDTH, headline, notes_part, paragraphs, verdict_sentence
from zeroplan.units import GB, GIB

_MARGIN = " " * 49
_WORDS = {"fits": "fits", "tight": "tight", "does not fit": "no fit", "unknown": ""}

_ORDER = "changes that cost no time; then the others, by the memory freed per second lost; last, changes of training or price"
_UNTIMED = "changes by the memory that they free, last changes of the training or of the price. Name a GPU to see the time"

#: Returns a change as keys of the user's file, or as flags without a file.
InWords = Callable[[Advice], tuple[str, ...]]


def advice_text(advised: Advised, words: InWords, notes: tuple[str, ...]) -> str:
    """Return the answer for a terminal."""
    before = advised.before
    parts = [[headline(before), *textwrap.wrap(verdict_sentence(before), WIDTH), _rate(advised)], list(_table(advised, words))]
    return paragraphs([*([line for line in part if line] for part in parts), notes_part(notes)])


def _rate(advised: Advised) -> str:
    needs = f"It needs {_size(advised.before.least_bytes)} at its peak, with context and communicators"
    return f"{needs}." if advised.tokens_per_s is None else f"{needs}; {advised.tokens_per_s:,.0f} tokens/s per GPU."


def _size(n_bytes: int) -> str:
    return f"{n_bytes / GIB:,.2f} GiB = {n_bytes / GB:,.2f} GB"


def _table(advised: Advised, words: InWords) -> Iterator[str]:
    if not advised.changes:
        yield "No single change frees memory; `zeroplan plan` searches whole layouts."
        return
    enough = "first the changes that make the job fit alone, then all others. In each of these two groups: "
    order = f"{enough * (advised.before.fits is False)}{_UNTIMED if advised.tokens_per_s is None else _ORDER}"
    yield from textwrap.wrap(f"Single changes: {order}.", WIDTH)
    yield f"{'frees GiB':>10}{'then GiB':>10}{'':>3}{'verdict':<10}{'speed':>9}{'':>7}change"
    for one in advised.changes:
        verdict = _WORDS[one.after.verdict]
        rate = "" if one.slower is None else f"{-one.slower:+.1%}"
        figures = f"{one.freed_bytes / GIB:>10,.2f}{one.after.least_bytes / GIB:>10,.2f}{'':>3}{verdict:<10}{rate:>9}"
        cost = f" ({one.other_cost})" if one.other_cost else ""
        yield f"{figures:<{len(_MARGIN)}}{one.change.change}{cost}"
        yield from (f"{_MARGIN}  {word}" for word in words(one))


def advice_payload(advised: Advised, words: InWords, notes: tuple[str, ...]) -> dict[str, object]:
    """Return the answer as plain data; sizes in bytes."""
    return {
        "schema_version": SCHEMA_VERSION,
        "before": {**_needs(advised.before), "tokens_per_s_per_gpu": advised.tokens_per_s},
        "changes": [
            {
                "change": one.change.change,
                "flags": one.change.flags,
                "keys": list(words(one)),
                "other_cost": one.other_cost,
                "freed_bytes": one.freed_bytes,
                "tokens_per_s_per_gpu": one.tokens_per_s,
                **_needs(one.after),
            }
            for one in advised.changes
        ],
        "notes": list(notes),
    }


def _needs(answer: Estimate) -> dict[str, object]:
    return {"least_bytes": answer.least_bytes, "verdict": answer.verdict, "fits": answer.fits}
