"""Records the allocator's counts in each phase that the loop reports."""

from collections.abc import Callable

import torch

from zeroplan.ledger import Beside, Phase
from zeroplan.measurement import BlocksMeasured, PhaseMeasured, StepMeasured
from zeroplan.verify.replaced import always, put
from zeroplan.verify.watching.recording import Block, Call, Span

_COUNTS = ("allocated", "requested", "active", "reserved")
_NOTHING = BlocksMeasured.highest(())


class Peaks:
    """Counts the process's current GPU, without creating a CUDA context."""

    def __init__(self) -> None:
        self._stats: Callable[..., dict[str, int]] = torch.cuda.memory_stats
        self._forget: Callable[..., None] = torch.cuda.reset_peak_memory_stats
        self._of_phase = self._of_script = _NOTHING

    def seen(self) -> tuple[BlocksMeasured, int]:
        """The phase's peaks so far, and the bytes allocated now; resets torch's own peaks. [bytes]"""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return self._of_phase, 0
        stats = self._stats()
        blocks = BlocksMeasured(**{f"{name}_bytes": int(stats[_peak(name)]) for name in _COUNTS})
        self._forget()
        self._of_phase, self._of_script = (BlocksMeasured.highest((one, blocks)) for one in (self._of_phase, self._of_script))
        return self._of_phase, int(stats["allocated_bytes.all.current"])

    def next_phase(self) -> None:
        """Begin a phase."""
        self._of_phase = _NOTHING

    def answer_the_script(self) -> None:
        """Make ``torch.cuda`` return the peaks since the script's own resets, although zeroplan resets torch's."""

        def memory_stats(*args: object, **kwargs: object) -> dict[str, int]:
            found = dict(self._stats(*args, **kwargs))
            for name in _COUNTS:
                if _peak(name) in found:
                    found[_peak(name)] = max(found[_peak(name)], getattr(self._of_script, f"{name}_bytes"))
            return found

        def most(name: str) -> Callable[..., int]:
            return lambda *args, **kwargs: memory_stats(*args, **kwargs).get(_peak(name), 0)

        def forget(*_: object, **__: object) -> None:
            self.seen()
            self._of_script = _NOTHING

        for owner in (torch.cuda, torch.cuda.memory, torch.accelerator):
            put(
                owner, memory_stats=memory_stats, max_memory_allocated=most("allocated"), max_memory_reserved=most("reserved"),
                reset_peak_memory_stats=forget,
            )  # fmt: skip


def _peak(name: str) -> str:
    return f"{name}_bytes.all.peak"


class PhasesOnCard:
    """Counts every part of the run. A real GPU shows no kinds, single blocks or collectives."""

    blocks: tuple[Block, ...] = ()
    calls: tuple[Call, ...] = ()

    def __init__(self, peaks: Peaks) -> None:
        self._peaks = peaks
        self.spans = [Span(-1, Phase.INIT, 0)]
        self._counted: list[tuple[BlocksMeasured, int]] = []
        """For every ended span, its peaks and the bytes allocated at its end."""

    def enter(self, phase: Phase | Beside, step: int, *, collect: bool = True) -> None:  # noqa: ARG002  Python collects by itself
        """End a part of the run and begin another."""
        self._counted.append(self._peaks.seen())
        self._peaks.next_phase()
        self.spans.append(Span(step, phase, len(self.spans)))

    learn_modules = own = claim = updated = gradients_are = always(None)

    @property
    def initialisation(self) -> PhaseMeasured:
        """The counts before the first step."""
        return _phase(Phase.INIT, [blocks for span, (blocks, _) in self._over if span.phase is Phase.INIT])

    @property
    def steps(self) -> tuple[StepMeasured, ...]:
        """Every step; the last may be cut short by running out of memory."""
        numbers = sorted({span.step for span, _ in self._of_steps})
        return tuple(self._step(number) for number in numbers)

    @property
    def _over(self) -> list[tuple[Span, tuple[BlocksMeasured, int]]]:
        return list(zip(self.spans, self._counted, strict=False))

    @property
    def _of_steps(self) -> list[tuple[Span, tuple[BlocksMeasured, int]]]:
        return [one for one in self._over if isinstance(one[0].phase, Phase) and one[0].phase is not Phase.INIT]

    def _step(self, number: int) -> StepMeasured:
        mine = [(span.phase, counted) for span, counted in self._of_steps if span.step == number]
        phases = dict.fromkeys(phase for phase, _ in mine)
        return StepMeasured(
            phases=tuple(_phase(one, [blocks for phase, (blocks, _) in mine if phase is one]) for one in phases),
            held_bytes=mine[-1][1][1],
            held_kinds={},
        )


def _phase(phase: Phase | Beside, seen: list[BlocksMeasured]) -> PhaseMeasured:
    blocks = BlocksMeasured.highest(seen)
    return PhaseMeasured(
        phase=phase.value, peak_bytes=blocks.allocated_bytes, kinds={}, counted_bytes=blocks.allocated_bytes, blocks=blocks
    )
