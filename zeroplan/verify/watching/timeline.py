"""Summarises a recording: the peak of every phase, the kinds alive at that moment, the bytes held between steps."""

from collections import Counter, defaultdict
from dataclasses import replace

from zeroplan.ledger import OF_A_STEP, Beside, Kind, Phase
from zeroplan.measurement import CollectiveMeasured, CourseMeasured, PhaseMeasured, StepMeasured
from zeroplan.verify.watching.collected import summed
from zeroplan.verify.watching.courses import Pass, Request, course_of
from zeroplan.verify.watching.log import Call
from zeroplan.verify.watching.recording import STILL_HELD, Block, Recording, layer_of, live


class Timeline:
    """Bytes alive after every request and release; in ``counted`` as the allocator counts them. [bytes]"""

    def __init__(self, recording: Recording, *, counted: list[int] | None = None) -> None:
        self.recording = recording
        self.counted = counted
        self.live = live(recording.blocks, recording.now)
        self._events: list[tuple[Block, int] | None] = [None] * (recording.now + 1)
        for block in recording.blocks:
            self._events[block.born] = (block, 1)
            if block.died != STILL_HELD:
                self._events[block.died] = (block, -1)
        self._known: list[Counter[Kind]] = [Counter()]
        """Bytes alive by kind, stored every ``_OFTEN`` moments to keep queries of a long run fast."""

    def window(self, index: int) -> slice:
        """The moments of a span, its beginning included."""
        spans = self.recording.spans
        end = spans[index + 1].start if index + 1 < len(spans) else self.recording.now
        return slice(spans[index].start, end + 1)

    def peak(self, index: int) -> tuple[int, int]:
        """The most bytes alive in a span, and the earliest moment with that many."""
        window = self.window(index)
        live = self.live[window]
        most = max(live)
        return most, window.start + live.index(most)

    def kinds(self, moment: int) -> dict[str, int]:
        """Bytes alive at a moment, by kind. [bytes]"""
        while len(self._known) <= moment // _OFTEN:
            last = len(self._known) - 1
            self._known.append(self._moved(self._known[last], last * _OFTEN, (last + 1) * _OFTEN))
        found = self._moved(self._known[moment // _OFTEN], moment // _OFTEN * _OFTEN, moment)
        return {kind.value: n_bytes for kind, n_bytes in found.items() if n_bytes}

    def _moved(self, alive: Counter[Kind], after: int, until: int) -> Counter[Kind]:
        """Bytes alive by kind at a moment, computed from an earlier moment."""
        found = alive.copy()
        for event in self._events[after + 1 : until + 1]:
            if event is not None:
                block, sign = event
                found[self.kind(block)] += sign * block.n_bytes
        return found

    def by_kind(self) -> dict[str, list[int]]:
        """Return the bytes alive after every request and release, by kind; the notebooks draw them. [bytes]"""
        blocks: defaultdict[str, list[Block]] = defaultdict(list)
        for block in self.recording.blocks:
            blocks[self.kind(block).value].append(block)
        return {kind: live(of_its_kind, self.recording.now) for kind, of_its_kind in blocks.items()}

    def at(self, moment: int) -> Block | None:
        """The block requested at a moment; None at a release."""
        event = self._events[moment]
        return None if event is None or event[1] < 0 else event[0]

    def kind(self, block: Block) -> Kind:
        """The kind of a block; if nothing claimed it, the place of its request decides."""
        if block.kind is not None:
            return block.kind
        phase = self.recording.spans[block.span].phase
        if phase is Phase.STEP:
            return Kind.OPTIMIZER_TEMPORARY
        if phase is Beside.SAVING:
            return Kind.GATHER if "all_gather" in block.operation else Kind.TEMPORARY
        passes = Phase.FORWARD if phase in _FORWARDS else phase
        if passes in (Phase.FORWARD, Phase.BACKWARD) and is_of_the_loss(block, passes):
            return Kind.LOGITS
        return Kind.ACTIVATIONS if phase is Phase.BACKWARD and block.recomputed else Kind.TEMPORARY


def is_of_the_loss(block: Block, phase: Phase | Beside) -> bool:
    """Whether a block is logits or belongs to the loss: requested by the root module, or in forward by its last layer.

    In backward the last layer makes gradients of its weight and input, which are not logits. In forward, a cast of its input or a
    gather of it from other ranks is not logits either.
    """
    if block.module == _HEAD:
        return phase is Phase.FORWARD and block.operation not in _OF_ITS_INPUT
    return not block.module


_OFTEN = 4096
"""Moments between two stored sums of bytes by kind."""
_FORWARDS = (Beside.EVALUATION, Beside.NO_GRAD)
_HEAD = "lm_head"
_OF_ITS_INPUT = ("aten._to_copy.default", "_c10d_functional.all_gather_into_tensor.default", "aten.cat.default")


def initialisation(timeline: Timeline) -> PhaseMeasured:
    """The peak before the first step."""
    spans = timeline.recording.spans
    first = next(index for index, span in enumerate(spans) if span.phase in OF_A_STEP)
    return phase_measured(timeline, Phase.INIT, [index for index in range(first) if spans[index].phase is Phase.INIT])


def first_micro_batches(timeline: Timeline) -> PhaseMeasured | None:
    """The peak of the first step's forward and backward passes; None if those of the last step have the same peak."""
    spans, last = timeline.recording.spans, timeline.recording.last_step
    passes = [index for index, span in enumerate(spans) if span.phase in (Phase.FORWARD, Phase.BACKWARD)]
    early = [index for index in passes if spans[index].step == 0]
    if not early:
        return None
    found = phase_measured(timeline, Phase.FIRST, early)
    later = max(timeline.peak(index)[0] for index in passes if spans[index].step == last)
    return None if found.peak_bytes == later else found


def steps_measured(timeline: Timeline) -> tuple[StepMeasured, ...]:
    """The figures of every step of a recording."""
    steps = sorted({span.step for span in timeline.recording.spans if span.phase is Phase.STEP})
    measured = tuple(_step(timeline, step) for step in steps)
    return (*measured[:-1], _with_courses(timeline, steps[-1], measured[-1]))


def _step(timeline: Timeline, step: int) -> StepMeasured:
    spans = timeline.recording.spans
    indices = [index for index, span in enumerate(spans) if span.step == step and span.phase is not Phase.INIT]
    phases = [phase for phase in dict.fromkeys(spans[index].phase for index in indices) if isinstance(phase, Phase)]
    if not any(span.step > step and span.phase is Phase.STEP for span in spans):  # later parts are no part of the step
        indices = indices[: 1 + max(at for at, index in enumerate(indices) if spans[index].phase in OF_A_STEP)]
    end, host = timeline.window(indices[-1]).stop - 1, timeline.recording.host
    return StepMeasured(
        phases=tuple(
            phase_measured(timeline, phase, [index for index in indices if spans[index].phase is phase]) for phase in phases
        ),
        held_bytes=timeline.live[end],
        held_kinds=timeline.kinds(end),
        host_held_bytes=None if host is None else host.held[indices[-1]],
        host_pinned_bytes=None if host is None else host.pinned[indices[-1]],
        host_taken_bytes=None if host is None else max(host.taken[index] for index in indices),
    )


def phase_measured(timeline: Timeline, phase: Phase | Beside, indices: list[int]) -> PhaseMeasured:
    """The figures of several parts of a run as one phase: its peak, and the kinds alive then."""
    most, moment = max((timeline.peak(index) for index in indices), key=lambda peak: peak[0])
    block, host = timeline.at(moment), timeline.recording.host
    counted = None if timeline.counted is None else max(max(timeline.counted[timeline.window(index)]) for index in indices)
    return PhaseMeasured(
        phase=phase.value,
        peak_bytes=most,
        kinds=timeline.kinds(moment),
        module="" if block is None else block.module,
        operation="" if block is None else block.operation,
        counted_bytes=None if phase is Phase.INIT else counted,
        host_bytes=None if host is None else max(host.highest[index] for index in indices),
    )


def _with_courses(timeline: Timeline, step: int, measured: StepMeasured) -> StepMeasured:
    spans = timeline.recording.spans
    by_span: dict[int, list[Block]] = {index: [] for index, span in enumerate(spans) if span.step == step}
    for block in timeline.recording.blocks:
        if block.span in by_span:
            by_span[block.span].append(block)
    phases = tuple(
        replace(phase, course=_course(timeline, {at: by_span[at] for at in by_span if spans[at].phase.value == phase.phase}))
        for phase in measured.phases
    )
    return replace(measured, phases=phases)


def _course(timeline: Timeline, passes: dict[int, list[Block]]) -> CourseMeasured | None:
    found = []
    for index, blocks in passes.items():
        window, requests = timeline.window(index), [Request(layer_of(block), timeline.live[block.born]) for block in blocks]
        found.append(Pass(timeline.live[window.start], requests, timeline.live[window.stop - 1]))
    return course_of(found)


def collectives(recording: Recording) -> tuple[CollectiveMeasured, ...]:
    """Add up the collectives of the last step."""
    spans, last = recording.spans, recording.last_step
    calls = (call for call in recording.calls if spans[call.span].step == last and spans[call.span].phase in OF_A_STEP)
    return summed(Call(call.operation, call.dtype, call.group, call.n_bytes, spans[call.span].phase.value) for call in calls)
