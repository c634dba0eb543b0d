"""How is the GPU's memory used at the peak: tensors, context and communicators, the allocator's cache? Rows that add up."""

from collections.abc import Iterator

from zeroplan.estimator import Estimate
from zeroplan.ledger import Band
from zeroplan.report.tables import Table


def card_rows(answer: Estimate, table: Table) -> Iterator[str]:
    """Yield rows from the allocated peak to nvidia-smi's figure, then host memory and NVMe if the job offloads.

    The allocator returns cached blocks to the driver before it runs out of memory, so the job also fits without them.
    """
    yield table.total("peak allocated", answer.peak_bytes, "torch's max_memory_allocated")
    for part in answer.outside:
        yield table.band_row(part.what, part.band)
    yield table.total("must fit", answer.least_bytes, "peak and memory outside torch")
    yield table.band_row("cached by the allocator", cached(answer))
    on_card = shown_by_nvidia_smi(answer)
    yield table.total("nvidia-smi would show", int(on_card.expected_bytes), table.span(on_card))
    yield from _elsewhere(answer, table)


def cached(answer: Estimate) -> Band:
    """Return the freed blocks that the allocator caches in addition to the peak, up to the GPU's size. [bytes]"""
    beside = (int(end) - answer.peak_bytes for end in answer.reserved)
    room = answer.room_bytes
    return Band(*(size if room is None else min(size, max(room, 0)) for size in beside))


def shown_by_nvidia_smi(answer: Estimate) -> Band:
    """Return reserved memory plus memory outside the allocator, up to the GPU's size. [bytes]"""
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
