"""Layers are alike: what two runs with few layers say about one with many.

A run of one more layer is the same run with one more stretch of requests and releases in it. Every moment of the shorter run is
therefore found again in the longer one, counted from the start of its phase or from the end, and its bytes grow by the same
amount with every further layer. The highest moment of many layers is the highest of these, each grown, whichever it was before:
no maximum is extrapolated.
"""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from zeroplan.errors import MeasurementError
from zeroplan.ledger import Phase
from zeroplan.measurement import CollectiveMeasured, PhaseMeasured, StepMeasured
from zeroplan.verify.timeline import Timeline, collectives
from zeroplan.verify.tracker import Tracker


class NotAlikeError(MeasurementError):
    """Runs with few layers do not say what one with many takes."""


class Growth(NamedTuple):
    """Two runs, and how many times what lies between them is to be added to the shorter."""

    shorter: Timeline
    longer: Timeline
    times: int

    def of(self, few: int, more: int) -> int:
        """Return what a figure of the shorter run grows to."""
        return few + self.times * (more - few)


class _Moment(NamedTuple):
    """A moment in both runs, and its bytes in the long one that nobody ran."""

    n_bytes: int
    shorter: int
    longer: int


def extended_steps(shorter: Tracker, longer: Tracker, times: int) -> tuple[StepMeasured, ...]:
    """Summarise every step of a run that is longer than ``shorter`` by ``times`` what ``longer`` is longer by.

    Raises :class:`NotAlikeError` where the two runs are not alike enough to say.
    """
    growth = Growth(Timeline(shorter), Timeline(longer), times)
    steps = sorted({span.step for span in shorter.spans if span.phase is Phase.STEP})
    return tuple(_step(growth, step) for step in steps)


def extended_collectives(shorter: Tracker, longer: Tracker, times: int) -> tuple[CollectiveMeasured, ...]:
    """Add up the collectives of the last step of the long run."""
    few = {(one.operation, one.dtype, one.phase, one.group): one for one in collectives(shorter)}
    found = []
    for more in collectives(longer):
        less = few.get((more.operation, more.dtype, more.phase, more.group))
        calls, n_bytes = (less.calls, less.n_bytes) if less is not None else (0, 0)
        found.append(
            CollectiveMeasured(
                operation=more.operation,
                dtype=more.dtype,
                phase=more.phase,
                group=more.group,
                calls=calls + times * (more.calls - calls),
                n_bytes=n_bytes + times * (more.n_bytes - n_bytes),
            )
        )
    return tuple(found)


def _step(growth: Growth, step: int) -> StepMeasured:
    spans = growth.shorter.tracker.spans
    indices = [index for index, span in enumerate(spans) if span.step == step and span.phase is not Phase.INIT]
    phases = dict.fromkeys(spans[index].phase for index in indices)
    end = _Moment(0, growth.shorter.end(indices[-1]), growth.longer.end(indices[-1]))
    return StepMeasured(
        phases=tuple(_phase(growth, phase, [index for index in indices if spans[index].phase is phase]) for phase in phases),
        held_bytes=growth.of(growth.shorter.live[end.shorter], growth.longer.live[end.longer]),
        held_kinds=_kinds(growth, end),
    )


def _phase(growth: Growth, phase: Phase, indices: list[int]) -> PhaseMeasured:
    highest = max((moment for index in indices for moment in _moments(growth, index)), key=lambda moment: moment.n_bytes)
    block = growth.shorter.at(highest.shorter)
    return PhaseMeasured(
        phase=phase.value,
        peak_bytes=highest.n_bytes,
        kinds=_kinds(growth, highest),
        module="" if block is None else block.module,
        operation="" if block is None else block.operation,
    )


def _kinds(growth: Growth, moment: _Moment) -> dict[str, int]:
    few, more = Counter(growth.shorter.kinds(moment.shorter)), Counter(growth.longer.kinds(moment.longer))
    return {kind: growth.of(few[kind], more[kind]) for kind in {**few, **more}}


def _moments(growth: Growth, index: int) -> Iterator[_Moment]:
    first, second = growth.shorter.tracker.spans[index].start, growth.longer.tracker.spans[index].start
    few, more = growth.shorter.events(index), growth.longer.events(index)
    for here, there in ((0, 0), *_matched(few, more)):
        at, also = first + here, second + there
        yield _Moment(growth.of(growth.shorter.live[at], growth.longer.live[also]), at, also)


_Event = tuple[bool, str, str, int]
"""Request or release, operation, module without its number, bytes."""


def _matched(few: list[_Event], more: list[_Event]) -> list[tuple[int, int]]:
    """Pair the events of two runs of one phase, counted from 1.

    Where the longer run has a stretch that the shorter has not, the stretch repeats the one before it (one more layer, one
    more layer's tensors). Events before are paired counting from the left, events after counting from the right, both ways
    where both hold, but not within one stretch of where they stop to hold.
    """
    pairs: list[tuple[int, int]] = []
    at = ahead = 0
    while True:
        stop = at + _alike(few[at:], more[at + ahead :])
        if stop == len(few) == len(more) - ahead:
            return pairs + [(one + 1, one + ahead + 1) for one in range(at, stop)]
        added = _added(few, more, stop, ahead)
        back = stop - _alike(few[at:stop][::-1], more[at + ahead + added : stop + ahead + added][::-1]) + added
        if back > stop - added:
            raise NotAlikeError(_NOT_ALIKE)
        pairs += [(one + 1, one + ahead + 1) for one in range(at, stop - added)]
        pairs += [(one + 1, one + ahead + added + 1) for one in range(back, stop)]
        at, ahead = stop, ahead + added


def _alike(few: list[_Event], more: list[_Event]) -> int:
    """Count how many first events are the same."""
    return next((at for at, (one, other) in enumerate(zip(few, more, strict=False)) if one != other), min(len(few), len(more)))


def _added(few: list[_Event], more: list[_Event], stop: int, ahead: int) -> int:
    """Return the length of the stretch after which the two runs are alike again."""
    there = stop + ahead
    for added in range(1, min(there, len(more) - there) + 1):
        repeats = more[there : there + added] == more[there - added : there]
        if repeats and few[stop : stop + _ENOUGH] == more[there + added : there + added + _ENOUGH]:
            return added
    raise NotAlikeError(_NOT_ALIKE)


_ENOUGH = 2
"""Events that must be alike after a stretch; all later ones are compared too, or the pairing fails."""
_NOT_ALIKE = "runs with few layers are not alike enough to say what many layers take; run all layers"
