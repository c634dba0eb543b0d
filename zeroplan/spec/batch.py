"""The batch of a step. A job has ints; formulas also accept columns, with one row per layout."""

from typing import NamedTuple, Protocol

from zeroplan.numeric import Int
from zeroplan.spec.base import Count, Spec


class Batch(Protocol):
    """The fields of a batch that formulas read."""

    @property
    def micro_batch_size(self) -> Int:
        """Sequences in one forward pass of a data-parallel rank: one GPU, or the ranks that split a model or a sequence."""
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
    """A batch of ints that were already checked."""

    micro_batch_size: int
    seq_len: int
    grad_accum_steps: int


class Columns(NamedTuple):
    """A batch whose numbers may be columns."""

    micro_batch_size: Int
    seq_len: Int
    grad_accum_steps: Int


def of_a_rank(batch: Batch, ranks: int) -> Batch:
    """Return one rank's part of the batch if ``ranks`` ranks split every sequence.

    >>> of_a_rank(BatchSpec(seq_len=8192), 4).seq_len
    2048
    """
    return batch if ranks == 1 else Columns(batch.micro_batch_size, batch.seq_len // ranks, batch.grad_accum_steps)


class BatchSpec(Spec):
    """The batch of one job."""

    micro_batch_size: Count = 1
    seq_len: Count = 4096
    grad_accum_steps: Count = 1
    longest_seq_len: Count | None = None
    """If lengths were drawn: the longest ``seq_len`` that real data may have. The verdict is ``fits`` only if that fits as well."""
