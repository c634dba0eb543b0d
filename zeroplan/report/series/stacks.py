"""What does memory consist of in several jobs, runs or snapshots, side by side?"""

from collections.abc import Mapping
from dataclasses import dataclass

from zeroplan.estimator import Estimate, Verdict
from zeroplan.report.palette import ORDER
from zeroplan.report.series.parts import Caption, Part, parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One case: its name, its memory by kind [bytes], and its verdict if a GPU is named."""

    name: str
    parts: tuple[Part, ...]
    verdict: Verdict = "unknown"

    @property
    def total_bytes(self) -> int:
        """Sum of the parts."""
        return sum(part.n_bytes for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class StacksSeries:
    """The cases, and the GPU's memory [bytes], or None."""

    caption: Caption
    stacks: tuple[Stack, ...]
    capacity_bytes: int | None = None


def stack_of(name: str, answer: Estimate) -> Stack:
    """The peak of an estimate, with memory outside the allocator.

    >>> from zeroplan import estimate, job
    >>> answer = estimate(job(model="gpt2", gpus=8, stage=3, seq_len=128))
    >>> stack_of("mine", answer).total_bytes == answer.least_bytes
    True
    """
    outside = int(answer.outside_band.expected_bytes)
    return Stack(name=name, parts=parts(answer.peak.lines, outside_bytes=outside), verdict=answer.verdict)


def stack_of_kinds(name: str, kinds: Mapping[str, int]) -> Stack:
    """A stack of bytes by kind, as in records and snapshots.

    >>> stack_of_kinds("a run", {"activations": 2, "parameters": 3}).parts[0]
    Part(what='parameters', n_bytes=3)
    """
    return Stack(name=name, parts=tuple(Part(what, kinds[what]) for what in ORDER if kinds.get(what)))
