"""What does torch's out-of-memory message mean? Which request failed, why, and what would help."""

from collections.abc import Iterator, Sequence

from zeroplan.estimator import Estimate
from zeroplan.remedies import Remedy
from zeroplan.report.words import EXPANDABLE, headline, paragraphs
from zeroplan.snapshots.jobs_of_message import Other, agrees
from zeroplan.snapshots.message import Message
from zeroplan.snapshots.request_of_message import Found
from zeroplan.units import GIB, GIBIBYTES

SCHEMA_VERSION = 1
_WIDTH = 26
_MUCH = GIB // 2
"""Memory of other processes is mentioned if it exceeds this; a desktop or the driver needs less. [bytes]"""


def message_text(
    said: Message,
    *,
    answer: Estimate | None = None,
    found: Found | None = None,
    others: Sequence[Other] = (),
    changes: Sequence[Remedy] = (),
) -> str:
    """Return the message's meaning and advice; with a job also its failed request, and changes that would make it fit.

    ``others`` are jobs that agree with the message if this job does not.
    """
    parts = [_head(said), _card(said), _advice(said)]
    if answer is not None:
        parts += [_of_job(said, answer, found), _other_jobs(others), _changes(said, answer, changes)]
    return paragraphs([lines for part in parts if (lines := list(part))])


def message_payload(
    said: Message,
    *,
    answer: Estimate | None = None,
    found: Found | None = None,
    others: Sequence[Other] = (),
    changes: Sequence[Remedy] = (),
) -> dict[str, object]:
    """Return the message, the advice and the job's request as data for JSON. [bytes]"""
    return {
        "schema_version": SCHEMA_VERSION,
        **said._asdict(),
        "reserved_bytes": said.reserved_bytes,
        "outside_bytes": said.outside_bytes,
        "others_bytes": said.others_bytes,
        "fragmented": said.fragmented,
        "advice": list(_advice(said)),
        "request": None if found is None else found._asdict(),
        "predicted_peak_bytes": None if answer is None else answer.peak_bytes,
        "jobs_that_agree": [{"flags": one.flags, "request": one.found._asdict()} for one in others],
        "changes": [change._asdict() for change in changes],
    }


def _head(said: Message) -> Iterator[str]:
    yield f"Out of memory: the program requested {said.tried_text} more on a GPU with {_size(said.capacity_bytes)}."


def _card(said: Message) -> Iterator[str]:
    rows: list[tuple[str, int | None]] = [
        ("in tensors", said.allocated_bytes),
        ("cached by the allocator", said.unallocated_bytes),
        ("outside the allocator", said.outside_bytes),
        ("of other processes", said.others_bytes),
        ("free", said.free_bytes),
    ]
    yield f"{'On the card':<{_WIDTH}}{'GiB':>8}"
    yield from (f"  {what:<{_WIDTH - 2}}{n_bytes / GIB:>8,.2f}" for what, n_bytes in rows if n_bytes is not None)


def _advice(said: Message) -> Iterator[str]:
    """Yield why the request failed: fragmentation, too little memory, or other processes."""
    lacking = said.tried_bytes - said.free_bytes - said.unallocated_bytes
    if said.fragmented:
        yield (
            f"Fragmentation: {_size(said.unallocated_bytes + said.free_bytes)} were cached or free, but in pieces that are too "
            f"small. Set {EXPANDABLE}, if it is not set yet."
        )
    else:
        yield f"No setting of the allocator is enough: {_size(lacking)} more are needed, even with an empty cache."
    if said.others_bytes is not None and said.others_bytes > _MUCH:
        held = _size(said.others_bytes)
        yield f"Other processes hold {held} of this GPU (`nvidia-smi` lists them): end them, or use another GPU."


def _of_job(said: Message, answer: Estimate, found: Found | None) -> Iterator[str]:
    """Yield the failed request in the job's step, and whether prediction and message agree."""
    gpu = answer.job.cluster.gpu
    if gpu is not None and abs(int(gpu.memory_bytes.value) - said.capacity_bytes) > 0.03 * said.capacity_bytes:
        yield f"The message is of a GPU with {_size(said.capacity_bytes)}, which is not {gpu.full_name}: check --gpu."
    yield f"Predicted: {headline(answer)}"
    yield f"peak allocated {_size(answer.peak_bytes)}, at the moment: {answer.peak.name}"
    if found is None:
        yield (
            f"No request of this job needs {said.tried_text} from the driver. Either another job ran (another sequence, "
            "batch, model or stage), or the request is not part of the training step."
        )
        return
    yield f"The request: {found.reason} ({found.kind}), {_size(found.n_bytes)}"
    step = "the first step" if found.step <= 0 else f"step {found.step + 1} and later"
    yield f"made in the {found.phase}, {found.module} {'before' if found.step < 0 else 'of'} {step}"
    yield f"predicted in tensors before it: {_size(found.live_bytes)}; the message says {_size(said.allocated_bytes)}"
    if found.replayed:
        yield "A replay of this job's requests on a GPU with as much memory fails at the same request."
    yield from _judged(said, found)


def _judged(said: Message, found: Found) -> Iterator[str]:
    """Yield whether the job could have raised the message."""
    apart = said.allocated_bytes - found.live_bytes
    if agrees(found, said):
        yield "The message is what this job would say: it ran out as described."
    elif found.live_bytes > said.capacity_bytes:
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
        yield "With one of these settings the job would fail at such a request with as much in tensors. Was it the run's?"
        for one in others:
            yield f"  {one.flags}: {_size(one.found.live_bytes)} in tensors before {one.found.reason}"


def _changes(said: Message, answer: Estimate, changes: Sequence[Remedy]) -> Iterator[str]:
    if changes:
        gpu = answer.job.cluster.gpu
        yield f"What would make it fit {f'a GPU with {_size(said.capacity_bytes)}' if gpu is None else gpu.full_name}"
        yield from (f"  {one.flags}: {one.change}; needs {_size(one.needed_bytes)}{one.how}" for one in changes)


def _size(n_bytes: int) -> str:
    return GIBIBYTES.size(n_bytes)
