"""Which changes of a script would lower its peak, and by how much at most? Computed from the run's own blocks.

A saving is the difference between the last step's peak with and without the blocks that a change avoids. It is an upper bound: the
memory that the change needs instead is unknown.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from zeroplan.ledger import Kind, Phase
from zeroplan.script_run import Saving
from zeroplan.script_trace import Trace, live_bytes

_LAYER = re.compile(r"(.*?(?:^|\.))\d+(?:\.|$)")
_WORTH = 100
"""Savings below 1/100 of the peak are left out."""
_NAMES = 2
"""The number of modules or lines named per saving."""


class _Life(NamedTuple):
    """A block that a change would avoid, from moment ``born`` to ``died``."""

    block: int
    born: int
    died: int


def savings(trace: Trace) -> tuple[Saving, ...]:
    """Return the changes that would save at least 1/100 of the last step's peak, the largest first."""
    step, live = trace.last_step, trace.live
    window = slice(step.start, step.stop)
    peak = max(live[window])
    found = []
    for lives_of, change, names_of in _CHANGES:
        lives = list(lives_of(trace))
        columns = ([trace.blocks.n_bytes[life.block] for life in lives], *([life[at] for life in lives] for at in (1, 2)))
        without = [now - left for now, left in zip(live, live_bytes(trace.moments, *columns), strict=True)]
        freed = peak - max(without[window])
        if freed * _WORTH >= peak and freed:
            found.append(Saving(change=change, of=_most(trace, lives, names_of), at_most_bytes=freed))
    return tuple(sorted(found, key=lambda one: -one.at_most_bytes))


def _most(trace: Trace, lives: list[_Life], names_of: Callable[[Trace, int], str]) -> tuple[str, ...]:
    """The modules or lines with most of the bytes."""
    sizes: Counter[str] = Counter()
    for life in lives:
        sizes[names_of(trace, life.block)] += trace.blocks.n_bytes[life.block]
    return tuple(name for name, _ in sizes.most_common(_NAMES) if name)


def _of_kinds(trace: Trace, *kinds: Kind) -> Iterator[int]:
    wanted = {number for number, kind in enumerate(trace.kinds) if kind in kinds}
    return (block for block, kind in enumerate(trace.blocks.kind) if kind in wanted)


def _whole(trace: Trace, block: int) -> _Life:
    return _Life(block, trace.blocks.born[block], trace.blocks.died[block])


def _phase(trace: Trace, block: int) -> str:
    return trace.spans[trace.blocks.span[block]].phase


def _layers(trace: Trace, block: int) -> str:
    """The name of the list of layers that contains a block's module; empty outside layers."""
    found = _LAYER.match(trace.modules[trace.blocks.module[block]])
    return f"{found[1]}*" if found else ""


def _line(trace: Trace, block: int) -> str:
    return trace.lines[trace.blocks.line[block]]


def _kept_by_layers(trace: Trace) -> Iterator[_Life]:
    """Activations that layers save for the backward; none if some layers are already recomputed."""
    kept = [block for block in _of_kinds(trace, Kind.ACTIVATIONS) if _layers(trace, block)]
    if not any(_phase(trace, block) == Phase.BACKWARD for block in kept):
        yield from (_whole(trace, block) for block in kept if _phase(trace, block) == Phase.FORWARD)


def _logits(trace: Trace) -> Iterator[_Life]:
    return (_whole(trace, block) for block in _of_kinds(trace, Kind.LOGITS))


def _made_by_the_step(trace: Trace) -> Iterator[_Life]:
    """Temporaries that the optimizer's step allocates and frees; longer-lived blocks belong to the next batch."""
    blocks = trace.blocks
    for block in _of_kinds(trace, Kind.OPTIMIZER_TEMPORARY):
        if blocks.died[block] < trace.window(blocks.span[block]).stop:
            yield _whole(trace, block)


def _earlier(trace: Trace, *kinds: Kind) -> Iterator[int]:
    """Blocks of earlier steps that are still alive when the last step begins."""
    start, blocks = trace.last_step.start, trace.blocks
    for block in _of_kinds(trace, *kinds):
        if trace.spans[blocks.span[block]].step >= 0 and blocks.born[block] <= start < blocks.died[block]:
            yield block


def _old_gradients(trace: Trace) -> Iterator[_Life]:
    """Gradients of the previous step, until the first backward of the last step begins."""
    start, died = trace.last_step.start, trace.blocks.died
    backward = next((span.start for span in trace.spans if span.start >= start and span.phase == Phase.BACKWARD), start)
    if backward > start:
        yield from (_Life(block, start, min(died[block], backward + 1)) for block in _earlier(trace, Kind.GRADIENTS))


def _old_tensors(trace: Trace) -> Iterator[_Life]:
    """Tensors of an earlier step's forward or backward that are still held; those after the backward may be the next batch."""
    for block in _earlier(trace, Kind.ACTIVATIONS, Kind.LOGITS, Kind.TEMPORARY):
        if _phase(trace, block) in (Phase.FORWARD, Phase.BACKWARD):
            yield _whole(trace, block)


_CHANGES: tuple[tuple[Callable[[Trace], Iterator[_Life]], str, Callable[[Trace, int], str]], ...] = (
    (_kept_by_layers, "recomputing the layers' activations in the backward (activation checkpointing)", _layers),
    (_logits, "a loss that never holds all logits at once (in chunks, or fused with the head)", _line),
    (_made_by_the_step, "an optimizer step without temporaries of whole parameters (fused, or foreach=False)", _line),
    (_old_gradients, "clearing gradients before the forward (zero_grad with set_to_none=True)", _line),
    (_old_tensors, "releasing tensors of the previous step (outputs, losses that keep their graph)", _line),
)
