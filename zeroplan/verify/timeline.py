"""What a recording says: the highest moment of every phase, what is alive then and for what, what is held between steps."""

import re
from collections import Counter
from itertools import accumulate

from zeroplan.ledger import Kind, Phase
from zeroplan.measurement import CollectiveMeasured, PhaseMeasured, StepMeasured
from zeroplan.verify.tracker import STILL_HELD, Block, Tracker

_NUMBER = re.compile(r"\d+")


class Timeline:
    """Bytes alive after every request and release of a recording. [bytes]"""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        changes = [0] * (tracker.now + 1)
        self._born: dict[int, Block] = {}
        self._died: dict[int, Block] = {}
        for block in tracker.blocks:
            changes[block.born] += block.n_bytes
            self._born[block.born] = block
            if block.died != STILL_HELD:
                changes[block.died] -= block.n_bytes
                self._died[block.died] = block
        self.live = list(accumulate(changes))

    def end(self, index: int) -> int:
        """Return the last moment of a span."""
        spans = self.tracker.spans
        return spans[index + 1].start if index + 1 < len(spans) else self.tracker.now

    def peak(self, index: int) -> tuple[int, int]:
        """Return the most bytes alive in a span, and the moment; the earliest of equals."""
        start, end = self.tracker.spans[index].start, self.end(index)
        window = self.live[start : end + 1]
        most = max(window)
        return most, start + window.index(most)

    def kinds(self, moment: int) -> dict[str, int]:
        """Return what is alive at a moment, by kind."""
        found: Counter[str] = Counter()
        for block in self.tracker.blocks:
            if block.born <= moment < block.died:
                found[self._kind(block).value] += block.n_bytes
        return dict(found)

    def at(self, moment: int) -> Block | None:
        """Return the block that was asked for at a moment."""
        return self._born.get(moment)

    def events(self, index: int) -> list[tuple[bool, str, str, int]]:
        """Return a span's requests (True) and releases: operation, module without its number, bytes."""
        return [self._event(moment) for moment in range(self.tracker.spans[index].start + 1, self.end(index) + 1)]

    def _event(self, moment: int) -> tuple[bool, str, str, int]:
        asked = moment in self._born
        block = self._born[moment] if asked else self._died[moment]
        return asked, block.operation, _NUMBER.sub("", block.module), block.n_bytes

    def _kind(self, block: Block) -> Kind:
        if block.kind is not None:
            return block.kind
        phase = self.tracker.spans[block.span].phase
        if phase is Phase.STEP:
            return Kind.OPTIMIZER_TEMPORARY
        if phase in (Phase.FORWARD, Phase.BACKWARD) and self.tracker.is_head(block):
            return Kind.LOGITS
        return Kind.ACTIVATIONS if phase is Phase.BACKWARD and block.recomputed else Kind.TEMPORARY


def initialisation(tracker: Tracker) -> PhaseMeasured:
    """Summarise what happened before the first step."""
    return _phase(Timeline(tracker), Phase.INIT, [0])


def steps_measured(tracker: Tracker) -> tuple[StepMeasured, ...]:
    """Summarise every step of a recording."""
    timeline = Timeline(tracker)
    steps = sorted({span.step for span in tracker.spans if span.phase is Phase.STEP})
    return tuple(_step(tracker, timeline, step) for step in steps)


def _step(tracker: Tracker, timeline: Timeline, step: int) -> StepMeasured:
    indices = [index for index, span in enumerate(tracker.spans) if span.step == step and span.phase is not Phase.INIT]
    phases = dict.fromkeys(tracker.spans[index].phase for index in indices)
    end = timeline.end(indices[-1])
    return StepMeasured(
        phases=tuple(
            _phase(timeline, phase, [index for index in indices if tracker.spans[index].phase is phase]) for phase in phases
        ),
        held_bytes=timeline.live[end],
        held_kinds=timeline.kinds(end),
    )


def _phase(timeline: Timeline, phase: Phase, indices: list[int]) -> PhaseMeasured:
    most, moment = max((timeline.peak(index) for index in indices), key=lambda peak: peak[0])
    block = timeline.at(moment)
    return PhaseMeasured(
        phase=phase.value,
        peak_bytes=most,
        kinds=timeline.kinds(moment),
        module="" if block is None else block.module,
        operation="" if block is None else block.operation,
    )


def collectives(tracker: Tracker) -> tuple[CollectiveMeasured, ...]:
    """Add up the collectives of the last step, by operation, dtype, phase and group."""
    last = max(span.step for span in tracker.spans if span.phase is Phase.STEP)
    calls: Counter[tuple[str, str, str, int]] = Counter()
    n_bytes: Counter[tuple[str, str, str, int]] = Counter()
    for call in tracker.calls:
        span = tracker.spans[call.span]
        if span.step == last:
            key = (call.operation, call.dtype, span.phase.value, call.group)
            calls[key] += 1
            n_bytes[key] += call.n_bytes
    return tuple(
        CollectiveMeasured(operation=key[0], dtype=key[1], phase=key[2], group=key[3], calls=count, n_bytes=n_bytes[key])
        for key, count in calls.items()
    )
