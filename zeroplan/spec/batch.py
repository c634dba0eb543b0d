"""How much is fed per step: each an int in a job and an int or a column in a formula."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from zeroplan.numeric import Int
from zeroplan.spec.base import Count, Spec


class Batch(Protocol):
    """What a formula may ask of a batch."""

    @property
    def micro_batch_size(self) -> Int:
        """Sequences in one forward pass of a data-parallel rank: a GPU, or those that split a model or a sequence."""
        ...

    @property
    def seq_len(self) -> Int:
        """Tokens per sequence."""
        ...

    @property
    def grad_accum_steps(self) -> Int:
        """Forward and backward passes per optimizer step."""
        ...


class Numbers(NamedTuple):
    """A batch as formulas take it, of numbers that have been checked."""

    micro_batch_size: int
    seq_len: int
    grad_accum_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec(Spec):
    """The batch of one job."""

    micro_batch_size: Count = 1
    seq_len: Count = 4096
    grad_accum_steps: Count = 1
