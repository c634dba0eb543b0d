"""What the card holds at the peak, as rows that add up: tensors, context and communicators, what the allocator caches."""

from collections.abc import Iterator

from zeroplan.estimator import Estimate
from zeroplan.ledger import Band
from zeroplan.report.tables import Table


def card_rows(answer: Estimate, table: Table) -> Iterator[str]:
    """From the allocated peak to what nvidia-smi would show, then host memory and NVMe where something is offloaded.

    The allocator returns cached blocks to the driver before it runs out of memory, so the job fits without them.
    """
    yield table.total("peak allocated", answer.peak_bytes, "torch's max_memory_allocated")
    for part in answer.outside:
        yield table.band_row(part.what, part.band)
    yield table.total("must fit", answer.least_bytes)
    yield table.band_row("cached by the allocator", cached(answer))
    on_card = shown_by_nvidia_smi(answer)
    yield table.total("nvidia-smi would show", int(on_card.expected_bytes), table.span(on_card))
    yield from _elsewhere(answer, table)


def cached(answer: Estimate) -> Band:
    """What the allocator keeps of freed blocks beside the peak, as far as the card has room for it. [bytes]"""
    beside = (int(end) - answer.peak_bytes for end in answer.reserved)
    room = answer.room_bytes
    return Band(*(size if room is None else min(size, max(room, 0)) for size in beside))


def shown_by_nvidia_smi(answer: Estimate) -> Band:
    """What is reserved and what lies outside the allocator, as far as the card reaches. [bytes]"""
    both = (int(a) + int(b) for a, b in zip(answer.reserved, answer.outside_band, strict=True))
    capacity = answer.capacity_bytes
    return Band(*(size if capacity is None else max(answer.least_bytes, min(size, capacity)) for size in both))


def _elsewhere(answer: Estimate, table: Table) -> Iterator[str]:
    for what, per_rank, per_node in (
        ("host memory per rank", answer.host_bytes, answer.host_bytes_per_node),
        ("NVMe per rank", answer.nvme_bytes, answer.nvme_bytes_per_node),
    ):
        if per_rank:
            of_node = "" if per_node is None else f"{table.unit.size(per_node)} on a node of {answer.ranks_per_node}"
            yield table.row(what, per_rank, of_node)
