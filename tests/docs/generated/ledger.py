"""Tables of an estimate: its model states, moments with the tensors alive at them, symbols and collectives."""

from __future__ import annotations

import re
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from tests.docs.generated.jobs import of, title
from tests.docs.generated.markdown import Sources, code, gigabytes, once, table
from tests.engines_that_run import STAGES
from zeroplan.ledger import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from zeroplan import Estimate, Line, Moment

#: Kinds that depend on the model and not on the engine; other pages describe them.
OF_THE_MODEL = (Kind.ACTIVATIONS, Kind.LOGITS, Kind.ACTIVATION_GRADIENTS, Kind.TEMPORARY, Kind.WORKSPACE)


def lines(some: Iterable[Line]) -> str:
    """Return a table of lines with their formulas, sizes and sources."""
    sources = Sources()
    rows = [
        (str(one.kind), one.reason, code(one.formula), gigabytes(int(one.n_bytes)), sources.number(one.source)) for one in some
    ]
    return table(("kind", "what", "bytes", "GB:", "source:"), rows) + "\n" + sources.listed()


def states(engine: str) -> str:
    """Return the model states that an engine keeps between steps, by stage."""
    sources = Sources()
    rows = [
        (
            title(engine, stage),
            str(one.kind),
            one.reason,
            code(one.formula),
            gigabytes(int(one.n_bytes)),
            sources.number(one.source),
        )
        for stage in ([0, 1, 2, 3] if engine == "paper" else [stage for name, stage in STAGES if name == engine])
        for one in of(engine, stage).states
    ]
    return table(("engine", "kind", "what", "bytes", "GB:", "source:"), once(rows)) + "\n" + sources.listed()


def moments(engine: str, stage: str) -> str:
    """Return the named moments of a step, the engine's own tensors alive at them, and the symbols of their formulas."""
    answer = of(engine, stage)
    numbered = _numbered(answer)
    sources = Sources()
    alive = [
        (str(one.kind), one.reason, code(formula), _from_to(one.sizes), _ranges(sorted(one.at)), sources.number(one.source))
        for formula, one in _alive(numbered)
        if one.kind not in OF_THE_MODEL
    ]
    parts = [
        table(
            ("", "phase", "moment", "GB:"),
            [(str(at), phase, name, gigabytes(most)) for at, name, phase, most in _moments(numbered)],
        ),
        _ALIVE,
        table(("kind", "what", "bytes", "GB:", "alive at", "source:"), alive),
        "Symbols beyond [those of the model](../nomenclature.md#symbols-of-the-model):\n",
        symbols(answer),
        sources.listed(),
    ]
    return "\n".join(parts)


_ALIVE = """\
The engine's own memory, in addition to activations and loss, and the numbers of the moments at which it is alive. *n* is a number
of elements that depends on the moment.
"""


def _numbered(answer: Estimate) -> list[tuple[int, list[Moment]]]:
    """Return the moments with numbers; consecutive moments of one name, for different layers, share a number."""
    grouped = [list(found) for _, found in groupby(answer.moments, key=lambda moment: moment.name)]
    return list(enumerate(grouped, 1))


def _moments(numbered: list[tuple[int, list[Moment]]]) -> list[tuple[int, str, str, int]]:
    return [(at, some[0].name, some[0].phase, max(int(one.total_bytes) for one in some)) for at, some in numbered]


class _Alive(NamedTuple):
    """A line with all moments at which it is alive; formulas that differ only in a count are one line."""

    kind: Kind
    reason: str
    source: str
    formulas: set[str]
    sizes: set[int]
    at: set[int]


def _alive(numbered: list[tuple[int, list[Moment]]]) -> list[tuple[str, _Alive]]:
    found: dict[tuple[str, ...], _Alive] = {}
    for at, some in numbered:
        for line in (line for moment in some for line in moment.lines if line.n_bytes):
            key = (line.kind, line.reason, _without_counts(line.formula), line.source)
            one = found.setdefault(key, _Alive(line.kind, line.reason, line.source, set(), set(), set()))
            one.formulas.add(line.formula)
            one.sizes.add(int(line.n_bytes))
            one.at.add(at)
    return [(min(one.formulas) if len(one.formulas) == 1 else key[2], one) for key, one in found.items()]


def _without_counts(formula: str) -> str:
    """Return a formula with ``n`` for every number of four or more digits, which no symbol names."""
    return _COUNT.sub("n", formula)


_COUNT = re.compile(r"\b\d{4,}\b")


def _from_to(sizes: set[int]) -> str:
    least, most = gigabytes(min(sizes)), gigabytes(max(sizes))
    return least if least == most else f"{least} to {most}"


def _ranges(numbers: Sequence[int]) -> str:
    """Write 1, 2, 3, 7 as 1–3, 7."""
    runs = [[at for _, at in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def symbols(answer: Estimate) -> str:
    """Return the symbols of an engine's formulas, with their values in the example."""
    rows = [(code(symbol.name), symbol.meaning, f"{int(symbol.value):,}") for symbol in answer.symbols]
    return table(("symbol", "what", "here:"), rows)


def traffic() -> str:
    """Return the collectives of a step, and the bytes that one GPU sends, by engine."""
    sources = Sources()
    rows = [
        (title(engine, stage), code(one.operation), one.what, one.when, f"{one.calls}", gigabytes(int(one.n_bytes)),
         gigabytes(int(one.sent_bytes)), sources.number(one.source))
        for engine, stage in STAGES
        for one in of(engine, stage).traffic.collectives
        if one.sent_bytes
    ]  # fmt: skip
    head = ("engine", "operation", "of what", "when", "calls:", "GB a call:", "GB sent:", "source:")
    return table(head, once(rows)) + "\n" + sources.listed()


def volumes() -> str:
    """Return the bytes that a step sends, and the ratio to plain data parallelism, by engine."""
    rows = []
    for engine, stage in (*(("paper", stage) for stage in range(4)), *STAGES):
        sent = of(engine, stage).traffic
        rows.append(
            (
                title(engine, stage),
                gigabytes(int(sent.total_bytes)),
                f"{sent.relative_to_ddp:.2f}",
                f"{sent.relative_bytes_to_ddp:.2f}",
            )
        )
    return table(("engine", "GB sent:", "elements, against DDP:", "bytes, against DDP:"), rows)
