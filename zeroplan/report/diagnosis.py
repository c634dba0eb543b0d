"""Renders a snapshot's diagnosis: the moment, the memory in use with its requesters, and the advice."""

import textwrap
from collections.abc import Iterator

from zeroplan.comparison import Compared
from zeroplan.report.comparison import compared_table, row_payload
from zeroplan.report.words import EXPANDABLE, WIDTH, paragraphs
from zeroplan.snapshots.diagnosis import Diagnosis, Failure, Held
from zeroplan.snapshots.kinds import Part
from zeroplan.snapshots.replayed import Replayed
from zeroplan.units import GB, GIB, format_size

SCHEMA_VERSION = 1
_WORTH_IT = 0.03
"""A setting is advised if it saves at least this share of reserved memory."""
_WHAT, _SITE = 34, 46


def diagnosis_text(found: Diagnosis, *, where: str, rows: tuple[Compared, ...] = (), job: str = "") -> str:
    """Return the diagnosis for a terminal; ``rows`` compare it with an estimate of ``job``."""
    parts = [
        list(_head(found, where)),
        list(_held(found.held)),
        [f"Predicted: {job}", *compared_table("In use at the peak", rows)] if rows else [],
        list(_advice(found)),
    ]
    return paragraphs(parts)


def diagnosis_payload(found: Diagnosis, *, where: str, rows: tuple[Compared, ...] = ()) -> dict[str, object]:
    """Return the diagnosis as data for ``json.dumps``. [bytes]"""
    return {
        "schema_version": SCHEMA_VERSION,
        "snapshot": where,
        "device": found.device,
        "events": found.events,
        "before_bytes": found.before_bytes,
        "live_bytes": found.live_bytes,
        "reserved_bytes": found.reserved_bytes,
        "largest_free_bytes": found.largest_free_bytes,
        "part": found.part,
        "held": [
            {"kind": held.kind, "bytes": held.n_bytes, "sites": [site._asdict() for site in held.sites]} for held in found.held
        ],
        "failure": None if found.failure is None else found.failure._asdict(),
        "replayed": None if found.replayed is None else found.replayed._asdict(),
        "predicted": [row_payload(row) for row in rows],
        "advice": list(advised(found)),
    }


def _head(found: Diagnosis, where: str) -> Iterator[str]:
    yield f"{where}, GPU {found.device}: {found.events:,} requests and releases"
    if found.before_bytes:
        yield f"the history begins with {format_size(found.before_bytes)} in use"
    failure = found.failure
    if failure is None:
        yield f"Highest: {format_size(found.live_bytes)} in use, last allocated {_during(found.part)}"
    else:
        by = f" by {failure.where}" if failure.where else ""
        yield f"Out of memory: {format_size(failure.asked_bytes)} were requested{by}, {_during(found.part)}, with"
        yield f"{format_size(found.live_bytes)} in use and {format_size(failure.free_bytes)} left by the driver"
    piece = format_size(found.largest_free_bytes)
    yield f"reserved in the end: {format_size(found.reserved_bytes)}; its largest free piece: {piece}"


def _during(part: str) -> str:
    """Return the place in a training loop, as the end of a clause."""
    return part if part == Part.OTHER else f"in the {part}"


def _held(held: tuple[Held, ...]) -> Iterator[str]:
    yield f"{'  in use then':<{_WHAT + 2}}{'GiB':>10}{'GB':>10}  requested by"
    for one in held:
        first, *others = [_site(one, at) for at in range(len(one.sites))] or [""]
        yield f"  {one.kind:<{_WHAT}}{one.n_bytes / GIB:>10,.2f}{one.n_bytes / GB:>10,.2f}  {first}".rstrip()
        yield from (" " * (_WHAT + 24) + other for other in others)


def _site(held: Held, at: int) -> str:
    """Return a place in the code, and its share of the kind if several places requested it."""
    site = held.sites[at]
    share = "" if site.n_bytes == held.n_bytes else f" ({100 * site.n_bytes / held.n_bytes:.0f} %)"
    room = _SITE - len(share)
    return (site.where if len(site.where) <= room else f"…{site.where[1 - room :]}") + share


def _advice(found: Diagnosis) -> Iterator[str]:
    for text in advised(found):
        yield textwrap.fill(text, WIDTH)


def advised(found: Diagnosis) -> Iterator[str]:
    """Yield the conclusions, for readers new to the allocator."""
    if found.failure is not None:
        yield _of_a_failure(found.failure, found)
    if found.replayed is not None and found.replayed.requests:
        yield from _of_the_allocator(found.replayed, found.reserved_bytes)
    if not found.with_stacks:
        yield (
            "The snapshot has no stacks. Call torch.cuda.memory._record_memory_history() before the first step: then the "
            "answer tells kinds and places apart."
        )


def _of_the_allocator(replayed: Replayed, reserved_bytes: int) -> Iterator[str]:
    """Yield how much expandable segments would have reserved, and the evidence."""
    saved = reserved_bytes - replayed.expandable_bytes
    if saved > _WORTH_IT * reserved_bytes:
        yield (
            f"With {EXPANDABLE} the same requests would have reserved {format_size(replayed.expandable_bytes)}, "
            f"{format_size(saved)} less, by a model of the allocator; without it the model reserves {_agreement(replayed)}."
        )


def _agreement(replayed: Replayed) -> str:
    if replayed.alike == replayed.requests:
        return f"at each of {replayed.requests:,} requests what the GPU did"
    return f"at {replayed.alike:,} of {replayed.requests:,} requests what the GPU did"


def _of_a_failure(failure: Failure, found: Diagnosis) -> str:
    lacking = failure.asked_bytes - failure.free_bytes
    if failure.fragmented(found.largest_free_bytes):
        idle = f"{format_size(failure.idle_bytes)} were reserved and free, but no single piece was large enough"
        way_out = "Segments were expandable already" if found.replayed is None else f"Set {EXPANDABLE}, which joins the pieces"
        return f"{idle}. {way_out}."
    return f"{format_size(max(0, lacking - failure.idle_bytes))} more were needed, beyond all reserved memory that was free."
