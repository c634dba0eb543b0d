"""Proposed savings of a recorded run: each is the drop of the peak without some blocks, and the record must prove it."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from zeroplan.ledger import Kind, Phase
from zeroplan.saved_runs.savings import savings
from zeroplan.script_trace import Blocks, SpanRecorded, Trace

FIRST, FORWARD, BACKWARD, STEP = 1, 4, 5, 6
"""Numbers of spans. Span 0 is the initialisation, 1 to 3 are forward, backward and step of the first step, 4 to 6 of the second."""


class Asked(NamedTuple):
    """A block that is allocated in one span and freed in another, or never."""

    n_bytes: int
    kind: Kind
    span: int
    until: int | None = None
    module: str = ""
    line: str = "train.py:1"


def _trace(*asked: Asked) -> Trace:
    """Return the trace of these blocks. In each span, blocks of earlier spans are freed first, and blocks of the span last."""
    born, died, starts, now = [0] * len(asked), [0] * len(asked), [], 0
    for span in range(7):
        starts.append(now)
        gone = [at for at, one in enumerate(asked) if one.until == span > one.span]
        new = [at for at, one in enumerate(asked) if one.span == span]
        dropped = [at for at, one in enumerate(asked) if one.until == span == one.span]
        for at, moments in [*((at, died) for at in gone), *((at, born) for at in new), *((at, died) for at in dropped)]:
            now += 1
            moments[at] = now
    died = [moment or now + 1 for moment in died]
    order = sorted(range(len(asked)), key=born.__getitem__)
    kinds, modules, lines = (
        tuple(dict.fromkeys(names)) for names in zip(*((one.kind.value, one.module, one.line) for one in asked), strict=True)
    )
    phases = [Phase.INIT, *2 * [Phase.FORWARD, Phase.BACKWARD, Phase.STEP]]
    steps = [-1, 0, 0, 0, 1, 1, 1]
    return Trace(
        moments=now,
        operations=("op",),
        modules=modules,
        kinds=kinds,
        lines=lines,
        sources=("",) * len(lines),
        spans=tuple(
            SpanRecorded(step=step, phase=phase.value, start=start)
            for step, phase, start in zip(steps, phases, starts, strict=True)
        ),
        collectives=(),
        blocks=Blocks(
            n_bytes=tuple(asked[at].n_bytes for at in order),
            born=tuple(born[at] for at in order),
            died=tuple(died[at] for at in order),
            operation=(0,) * len(asked),
            module=tuple(modules.index(asked[at].module) for at in order),
            kind=tuple(kinds.index(asked[at].kind.value) for at in order),
            line=tuple(lines.index(asked[at].line) for at in order),
            span=tuple(asked[at].span for at in order),
            stream=(0,) * len(asked),
        ),
    )


WEIGHTS = Asked(1000, Kind.PARAMETERS, 0)
LAYER = Asked(600, Kind.ACTIVATIONS, FORWARD, STEP, module="model.layers.3.mlp")


def _found(*asked: Asked) -> dict[str, tuple[int, tuple[str, ...]]]:
    return {one.change.partition(" (")[0]: (one.at_most_bytes, one.of) for one in savings(_trace(*asked))}


AGAIN = "recomputing the layers' activations in the backward"
CLEAR = "clearing gradients before the forward"
LET_GO = "releasing tensors of the previous step"
FUSED = "an optimizer step without temporaries of whole parameters"
CHUNKS = "a loss that never holds all logits at once"


def test_a_saving_is_limited_by_the_next_highest_peak():
    assert _found(WEIGHTS, LAYER) == {AGAIN: (600, ("model.layers.*",))}
    other_peak = Asked(500, Kind.OPTIMIZER_STATE, STEP)
    assert _found(WEIGHTS, LAYER, other_peak)[AGAIN] == (100, ("model.layers.*",))


def test_recomputation_is_not_proposed_if_layers_are_already_recomputed():
    again = Asked(50, Kind.ACTIVATIONS, BACKWARD, STEP, module="model.layers.3.mlp")
    assert AGAIN not in _found(WEIGHTS, LAYER, again)
    assert AGAIN not in _found(WEIGHTS, LAYER._replace(module="embedding"))


def test_logits_that_are_whole_are_named_with_their_line():
    assert _found(WEIGHTS, Asked(300, Kind.LOGITS, FORWARD, STEP, line="train.py:9")) == {CHUNKS: (300, ("train.py:9",))}


def test_old_gradients_count_only_before_the_backward():
    old, layer = Asked(400, Kind.GRADIENTS, FIRST + 1), LAYER._replace(until=BACKWARD)
    assert _found(WEIGHTS, old, layer)[CLEAR] == (400, ("train.py:1",))
    new = Asked(400, Kind.GRADIENTS, BACKWARD)
    assert CLEAR not in _found(WEIGHTS, old._replace(until=FORWARD), layer, new), "cleared in time"
    assert CLEAR not in _found(WEIGHTS, old, new, layer._replace(until=None)), "the peak is in the backward"


def test_tensors_of_an_earlier_forward_are_held_too_long_and_the_next_batch_is_not():
    held = Asked(200, Kind.LOGITS, FIRST, line="train.py:7")
    assert _found(WEIGHTS, held)[LET_GO] == (200, ("train.py:7",))
    batch = Asked(200, Kind.OPTIMIZER_TEMPORARY, FIRST + 2, STEP)
    assert not _found(WEIGHTS, batch)


def test_temporaries_of_the_optimizer_step_can_be_saved():
    assert _found(WEIGHTS, Asked(300, Kind.OPTIMIZER_TEMPORARY, STEP, STEP))[FUSED] == (300, ("train.py:1",))
    made = Asked(300, Kind.OPTIMIZER_TEMPORARY, FIRST + 2, FORWARD)
    assert not _found(WEIGHTS, made), "only the last step's peak is judged"
    trace = _trace(WEIGHTS, Asked(300, Kind.OPTIMIZER_TEMPORARY, STEP), Asked(1, Kind.PARAMETERS, STEP))
    assert not savings(trace), "it is never dropped"


@pytest.mark.parametrize("n_bytes", [9, 11])
def test_savings_below_one_percent_are_left_out(n_bytes: int):
    assert bool(_found(WEIGHTS, Asked(n_bytes, Kind.LOGITS, FORWARD, STEP))) == (n_bytes == 11)
