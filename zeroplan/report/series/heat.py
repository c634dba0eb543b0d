"""How large may micro-batch and sequence be? One GPU's memory for every pair, and whether it fits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from zeroplan.errors import SpecError
from zeroplan.estimator import Needed, Verdict, estimate, judged, needed, verdict
from zeroplan.numeric import Int
from zeroplan.progress import counted
from zeroplan.report.series.parts import Caption, caption
from zeroplan.report.words import stage_words
from zeroplan.spec.batch import Columns
from zeroplan.spec.job import JobSpec
from zeroplan.transformer.profiled import profile_of

_SHORTEST = 512
_MOST_SEQUENCES = 64
_PER_DOUBLING = 4
_WORTH_A_LOOK = 4
"""Sizes that need more than this many times the GPU's memory, or the job's, are not drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatSeries:
    """The least and the comfortable memory, indexed by ``[micro-batch][sequence length]``. [bytes]

    ``own`` is the job's micro-batch and sequence length; the axes contain both. ``runs_out`` has the indices of the pairs that run
    out of memory in a replay, although their peak fits.
    """

    caption: Caption
    micro_batches: tuple[int, ...]
    seq_lens: tuple[int, ...]
    needed_bytes: tuple[tuple[int, ...], ...]
    comfortable_bytes: tuple[tuple[int, ...], ...]
    own: tuple[int, int]
    own_bytes: int
    capacity_bytes: int | None
    runs_out: frozenset[tuple[int, int]] = frozenset()

    def verdict(self, at_batch: int, at_seq: int) -> Verdict:
        """Whether this pair fits, as :func:`zeroplan.estimator.judged` has it; a replay may call a tight pair ``fits``."""
        if (at_batch, at_seq) in self.runs_out:
            return "does not fit"
        return verdict(self.needed_bytes[at_batch][at_seq], self.comfortable_bytes[at_batch][at_seq], self.capacity_bytes)


def heat(job: JobSpec) -> HeatSeries:
    """Estimate the job for micro-batches from 1 and sequence lengths from 512 up to the model's configured maximum.

    >>> from zeroplan import job
    >>> found = heat(job(model="gpt2", gpus=8, stage=3))
    >>> found.seq_lens[-1], found.needed_bytes[0][-1] == found.own_bytes
    (1024, True)
    """
    answer = estimate(job)
    beyond = _WORTH_A_LOOK * max(answer.least_bytes, answer.capacity_bytes or 0)
    seq_lens, micro_batches = _seq_lens(job), _micro_batches(job)
    lengths = _ints(_row(job, micro_batches[0], seq_lens).least_bytes, len(seq_lens))
    seq_lens = _within(seq_lens, lengths, beyond, own=job.batch.seq_len)
    grid = [_row(job, micro_batch, seq_lens) for micro_batch in micro_batches]
    batches = [_ints(row.least_bytes, len(seq_lens))[0] for row in grid]
    micro_batches = _within(micro_batches, batches, beyond, own=job.batch.micro_batch_size)
    grid = grid[: len(micro_batches)]
    series = HeatSeries(
        caption=caption(
            answer, f"Memory of one GPU by batch and sequence, {stage_words(job)}", *_accumulated(job), batch=False
        ),
        micro_batches=micro_batches,
        seq_lens=seq_lens,
        needed_bytes=tuple(_ints(row.least_bytes, len(seq_lens)) for row in grid),
        comfortable_bytes=tuple(_ints(row.comfortable_bytes, len(seq_lens)) for row in grid),
        own=(job.batch.micro_batch_size, job.batch.seq_len),
        own_bytes=answer.least_bytes,
        capacity_bytes=answer.capacity_bytes,
    )
    return replace(series, runs_out=frozenset(_running_out(job, series)))


def _running_out(job: JobSpec, series: HeatSeries) -> Iterator[tuple[int, int]]:
    """The pairs that fit tightly and run out of memory in a replay. [indices]

    Each row is replayed from its longest tight sequence down to the first that runs: shorter ones request less.
    """
    for row in counted(range(len(series.micro_batches))):
        for at in reversed([at for at in range(len(series.seq_lens)) if series.verdict(row, at) == "tight"]):
            batch = replace(job.batch, micro_batch_size=series.micro_batches[row], seq_len=series.seq_lens[at])
            if judged(replace(job, batch=batch)).fits:
                break
            yield row, at


def _row(job: JobSpec, micro_batch: int, seq_lens: tuple[int, ...]) -> Needed:
    """The needs of one micro-batch at all lengths; a loop calls this, since one sequence may run other code than several."""
    import numpy as np  # noqa: PLC0415  only columns pay for it

    column = np.array(seq_lens, dtype=np.int64)
    return needed(job, Columns(micro_batch, column, job.batch.grad_accum_steps))


def _ints(column: Int, length: int) -> tuple[int, ...]:
    """A column as integers; a number that does not depend on the column is repeated."""
    return (column,) * length if isinstance(column, int) else tuple(int(value) for value in column)


def _within(values: tuple[int, ...], needed_bytes: Sequence[int], most: int, *, own: int) -> tuple[int, ...]:
    """The values up to the first that needs more than ``most``; at least two doublings, and the job's own."""
    inside = sum(n_bytes <= most for n_bytes in needed_bytes)
    return values[: max(inside + 1, 2 * _PER_DOUBLING + 1, values.index(own) + 1)]


def _micro_batches(job: JobSpec) -> tuple[int, ...]:
    own = job.batch.micro_batch_size
    return _steps(1, max(_MOST_SEQUENCES, 2 * own), own)


def _accumulated(job: JobSpec) -> tuple[str, ...]:
    steps = job.batch.grad_accum_steps
    return () if steps == 1 else (f"{steps:,} micro-batches per step",)


def _seq_lens(job: JobSpec) -> tuple[int, ...]:
    model, own = job.model, job.batch.seq_len
    profile = None if model.profile is None else profile_of(model)
    if profile is not None and profile.seq_len is not None:
        raise SpecError(
            f"the profile of {profile.name} is of sequences of {profile.seq_len:,} only, so there is nothing to vary"
        )
    most = model.max_position_embeddings if model.positions else max(model.max_position_embeddings, own)
    least = min(_SHORTEST, own, most) if profile is None else profile.shortest
    return _steps(least, most, own)


def _steps(least: int, most: int, own: int) -> tuple[int, ...]:
    """Integers in four steps per doubling, with both ends and the job's own."""
    return tuple(sorted({least, most, own, *_doubling(least, most)}))


def _doubling(least: int, most: int) -> Iterator[int]:
    at = least
    while at <= most:
        yield from (value for quarter in range(_PER_DOUBLING) if (value := at + at * quarter // _PER_DOUBLING) <= most)
        at *= 2
