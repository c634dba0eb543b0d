"""What does torch's out-of-memory message mean? Which request failed, why, and what would help."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from zeroplan.catalog.gpu import gpu, gpu_names
from zeroplan.estimator import Estimate, estimate, judged
from zeroplan.remedies import Remedy, remedies
from zeroplan.report.words import EXPANDABLE, headline, paragraphs
from zeroplan.snapshots.jobs_of_message import Other, agrees, other_jobs
from zeroplan.snapshots.message import Message
from zeroplan.snapshots.request_of_message import Found, request_of
from zeroplan.spec.job import JobSpec
from zeroplan.units import GIB, GIBIBYTES

SCHEMA_VERSION = 1
_WIDTH = 26
_MUCH = GIB // 2
"""Memory of other processes is mentioned if it exceeds this; a desktop or the driver needs less. [bytes]"""


class Explained(NamedTuple):
    """A message, and what a job explains of it: its failed request, other jobs that agree better, and changes that would fit."""

    message: Message
    answer: Estimate | None = None
    found: Found | None = None
    others: Sequence[Other] = ()
    """Jobs that agree with the message, if the described job does not."""
    changes: Sequence[Remedy] = ()


def explained(message: Message, job: JobSpec | None) -> Explained:
    """Return what a message means; with a job also its failed request, which takes up to some seconds."""
    if job is None:
        return Explained(message)
    answer = estimate(job)
    found = request_of(message, answer)
    others = () if found is not None and agrees(found, message) else other_jobs(message, job)
    return Explained(message, answer, found, others, remedies(judged(_on_a_card(job, message.capacity_bytes))))


def _on_a_card(job: JobSpec, capacity_bytes: int) -> JobSpec:
    """Return the job with a GPU: its own, or the catalogue's GPU whose memory is within 1 % of the message's."""
    if job.cluster.gpu is not None:
        return job
    nearest = min(map(gpu, gpu_names()), key=lambda one: abs(int(one.memory_bytes.value) - capacity_bytes))
    if abs(int(nearest.memory_bytes.value) - capacity_bytes) > 0.01 * capacity_bytes:
        return job
    return replace(job, cluster=replace(job.cluster, gpu=nearest))


def message_text(one: Explained, *, with_changes: bool = True) -> str:
    """Return the message's meaning and advice; ``with_changes`` adds other jobs and changes, as flags."""
    parts = [_head(one.message), _card(one.message), _advice(one.message)]
    if one.answer is not None:
        parts.append(_of_job(one.message, one.answer, one.found))
        parts += [_other_jobs(one.others), _changes(one.message, one.answer, one.changes)] if with_changes else []
    return paragraphs([lines for part in parts if (lines := list(part))])


def message_payload(one: Explained) -> dict[str, object]:
    """Return the message, the advice and the job's request as data for JSON. [bytes]"""
    return {
        "schema_version": SCHEMA_VERSION,
        **one.message._asdict(),
        "reserved_bytes": one.message.reserved_bytes,
        "outside_bytes": one.message.outside_bytes,
        "others_bytes": one.message.others_bytes,
        "fragmented": one.message.fragmented,
        "advice": list(_advice(one.message)),
        "request": None if one.found is None else one.found._asdict(),
        "predicted_peak_bytes": None if one.answer is None else one.answer.peak_bytes,
        "jobs_that_agree": [{"flags": other.flags, "request": other.found._asdict()} for other in one.others],
        "changes": [change._asdict() for change in one.changes],
    }


def _head(message: Message) -> Iterator[str]:
    yield f"Out of memory: the program requested {message.tried_text} more on a GPU with {_size(message.capacity_bytes)}."


def _card(message: Message) -> Iterator[str]:
    rows: list[tuple[str, int | None]] = [
        ("in tensors", message.allocated_bytes),
        ("cached by the allocator", message.unallocated_bytes),
        ("outside the allocator", message.outside_bytes),
        ("of other processes", message.others_bytes),
        ("free", message.free_bytes),
    ]
    yield f"{'On the card':<{_WIDTH}}{'GiB':>8}"
    yield from (f"  {what:<{_WIDTH - 2}}{n_bytes / GIB:>8,.2f}" for what, n_bytes in rows if n_bytes is not None)


def _advice(message: Message) -> Iterator[str]:
    """Yield why the request failed: fragmentation, too little memory, or other processes."""
    lacking = message.tried_bytes - message.free_bytes - message.unallocated_bytes
    if message.fragmented:
        yield (
            f"Fragmentation: {_size(message.unallocated_bytes + message.free_bytes)} were cached or free, but in pieces that are "
            f"too small. Set {EXPANDABLE}, if it is not set yet."
        )
    else:
        yield f"No setting of the allocator is enough: {_size(lacking)} more are needed, even with an empty cache."
    if message.others_bytes is not None and message.others_bytes > _MUCH:
        held = _size(message.others_bytes)
        yield f"Other processes hold {held} of this GPU (`nvidia-smi` lists them): end them, or use another GPU."


def _of_job(message: Message, answer: Estimate, found: Found | None) -> Iterator[str]:
    """Yield the failed request in the job's step, and whether prediction and message agree."""
    gpu = answer.job.cluster.gpu
    if gpu is not None and abs(int(gpu.memory_bytes.value) - message.capacity_bytes) > 0.03 * message.capacity_bytes:
        yield f"The message comes from a GPU with {_size(message.capacity_bytes)}, which is not {gpu.full_name}: check --gpu."
    yield f"Predicted: {headline(answer)}"
    yield f"peak allocated {_size(answer.peak_bytes)}, at the moment: {answer.peak.name}"
    if found is None:
        yield (
            f"No request of this job needs {message.tried_text} from the driver. Either another job ran (another sequence, "
            "batch, model or stage), or the request is not part of the training step."
        )
        return
    yield f"The request: {found.reason} ({found.kind}), {_size(found.n_bytes)}"
    step = "the first step" if found.step <= 0 else f"step {found.step + 1} and later"
    yield f"when: in the {found.phase} {'before' if found.step < 0 else 'of'} {step}, {found.module}"
    yield f"in tensors before it: {_size(found.live_bytes)} predicted, {_size(message.allocated_bytes)} in the message"
    if found.replayed:
        yield "A replay of this job's requests on a GPU with as much memory fails at the same request."
    yield from _judged(message, found)


def _judged(message: Message, found: Found) -> Iterator[str]:
    """Yield whether the job could have raised the message."""
    apart = message.allocated_bytes - found.live_bytes
    if agrees(found, message):
        yield "The job that you described would print this message."
    elif found.live_bytes > message.capacity_bytes:
        yield (
            f"This job would have run out earlier: before this request it needs {_size(found.live_bytes)} in tensors. The run had "
            f"{_size(-apart)} less, so another job ran."
        )
    elif apart < 0:
        yield f"The run had {_size(-apart)} less in tensors than this job at this request: the job differs from what ran."
    else:
        yield (
            f"The run had {_size(apart)} more in tensors than this job: your program keeps something else, or the job differs from "
            "what ran. `zeroplan dryrun -- your_script.py` runs your own script."
        )


def _other_jobs(others: Sequence[Other]) -> Iterator[str]:
    """Yield the jobs that agree with the message instead of the described one."""
    if others:
        yield "With one of these settings the job would fail about as the message says. Did the run have one of them?"
        for one in others:
            yield f"  {one.flags}: {_size(one.found.live_bytes)} in tensors before {one.found.reason}"


def _changes(message: Message, answer: Estimate, changes: Sequence[Remedy]) -> Iterator[str]:
    if changes:
        gpu = answer.job.cluster.gpu
        yield f"What would make it fit {f'a GPU with {_size(message.capacity_bytes)}' if gpu is None else gpu.full_name}"
        yield from (f"  {one.flags}: {one.change}; needs {_size(one.needed_bytes)}{one.how}" for one in changes)


def _size(n_bytes: int) -> str:
    return GIBIBYTES.size(n_bytes)
