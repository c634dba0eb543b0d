"""What is in one GPU's memory at the peak of each phase of a fine-tuning loop, and in its node's memory?"""

from dataclasses import dataclass

from zeroplan.estimator import Verdict
from zeroplan.report.series.parts import Caption, Part, caption, parts
from zeroplan.workflow import Loop, LoopPhase


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseColumn:
    """A phase: memory at its peak, inside and outside the allocator. ``needed_bytes`` is the sum of ``parts``. [bytes]"""

    name: str
    moment: str
    parts: tuple[Part, ...]
    needed_bytes: int
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class HostColumn:
    """A node's host memory at one time, of all its processes. [bytes]"""

    when: str
    n_bytes: int
    processes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasesSeries:
    """All phases side by side, the GPU's capacity [bytes] or None, and the node's host memory."""

    caption: Caption
    columns: tuple[PhaseColumn, ...]
    host: tuple[HostColumn, ...]
    capacity_bytes: int | None


def phases(loop: Loop) -> PhasesSeries:
    """Return a column for each phase of the loop, and one for each time at which its node's memory is known."""
    return PhasesSeries(
        caption=caption(loop.answer, f"Memory in the phases of {loop.workflow}: one GPU at its peaks, and its node"),
        columns=tuple(_column(loop, one) for one in loop.phases),
        host=tuple(HostColumn(when=one.when, n_bytes=one.total_bytes, processes=one.processes) for one in loop.host),
        capacity_bytes=loop.answer.capacity_bytes,
    )


_VERDICTS: dict[bool | None, Verdict] = {True: "fits", False: "does not fit", None: "unknown"}


def _column(loop: Loop, one: LoopPhase) -> PhaseColumn:
    outside = int(loop.outside.expected_bytes)
    return PhaseColumn(
        name=one.name,
        moment=one.moment,
        parts=parts(one.lines, outside_bytes=outside),
        needed_bytes=one.total_bytes + outside,
        verdict=_VERDICTS[loop.fits(one)],
    )
