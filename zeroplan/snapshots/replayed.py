"""How much memory would expandable segments reserve? Replays a snapshot's requests through the model of CUDA's allocator.

A first replay has the GPU's own settings and starts with the segments at the history's start. If it reserves memory at the same
requests as the GPU did, the second replay, with expandable segments, is reliable.
"""

from bisect import bisect_left, bisect_right
from typing import NamedTuple

from zeroplan.allocator import CachingAllocator, Chunk, counted_bytes
from zeroplan.snapshots.lives import BEFORE, Lives
from zeroplan.snapshots.reading import Snapshot
from zeroplan.units import MIB


class Replayed(NamedTuple):
    """The result of both replays. [bytes]

    ``requests``: their number; ``alike``: those after which the reserved memory grew as on the GPU; ``reserved_bytes``: reserved at
    the end; ``expandable_bytes``: the same with expandable segments, from an empty GPU.
    """

    requests: int
    alike: int
    reserved_bytes: int
    expandable_bytes: int


def replayed(snapshot: Snapshot, lives: Lives) -> Replayed | None:
    """Return the result of both replays; None if blocks are outside the segments, as in a history with gaps."""
    try:
        card, chunks = _initial_state(snapshot, lives)
    except ValueError:
        return None
    expandable = CachingAllocator(expandable_segments=True)
    standing = {life.address: expandable.request(life.n_bytes) for life in lives.blocks if life.born == BEFORE}
    _play(snapshot, expandable, standing)
    requests, alike = _play(snapshot, card, chunks)
    return Replayed(requests, alike, card.reserved_bytes, expandable.reserved_bytes)


def _play(snapshot: Snapshot, card: CachingAllocator, chunks: dict[int, Chunk]) -> tuple[int, int]:
    """Replay a snapshot's requests; return their number, and the number after which reserved memory grew as on the GPU."""
    requests = alike = grown = 0
    for event in snapshot.events:
        if event.action == "grown":
            grown += event.n_bytes
        elif event.action == "requested":
            before = card.reserved_bytes
            chunks[event.address] = card.request(event.n_bytes, event.stream)
            requests, alike, grown = requests + 1, alike + (card.reserved_bytes - before == grown), 0
        elif event.action == "released" and event.address in chunks:
            card.release(chunks.pop(event.address))
        elif event.action == "shrunk":
            card.release_cached()
    return requests, alike


def _initial_state(snapshot: Snapshot, lives: Lives) -> tuple[CachingAllocator, dict[int, Chunk]]:
    """The allocator at the start of the history: its segments, and the blocks in use in them."""
    segments = {segment.address: segment for segment in snapshot.segments}
    for event in reversed(snapshot.events):
        if event.action == "grown":
            segments.pop(event.address, None)
        elif event.action == "shrunk":
            segments[event.address] = snapshot.segments[0]._replace(
                address=event.address, n_bytes=event.n_bytes, stream=event.stream
            )
    standing = _older_blocks(snapshot, lives, sorted(segments))
    card = CachingAllocator()
    chunks: dict[int, Chunk] = {}
    for address, n_bytes, stream in sorted(segments.values()):
        inside = standing[bisect_left(standing, (address, 0)) : bisect_left(standing, (address + n_bytes, 0))]
        used = card.standing(n_bytes, [(one - address, size) for one, size in inside], stream)
        chunks.update((one, chunk) for (one, _), chunk in zip(inside, used, strict=True))
    return card, chunks


def _older_blocks(snapshot: Snapshot, lives: Lives, segments: list[int]) -> list[tuple[int, int]]:
    """Address and size of the blocks in use at the start of the history, ordered by address.

    A snapshot contains a block's requested size. The block may be up to 1 MiB larger, if the allocator did not split off the
    remainder. Requests are placed at the start of a free chunk. So if there is a gap of up to 1 MiB between a block and the first
    request after it, the gap belongs to the block.
    """
    older = sorted((life for life in lives.blocks if life.born == BEFORE), key=lambda life: life.address)
    starts, sizes, met = [life.address for life in older], [life.n_bytes for life in older], set[int]()
    for at, event in enumerate(snapshot.events):
        before = bisect_right(starts, event.address) - 1
        if event.action != "requested" or before < 0 or before in met:
            continue
        met.add(before)
        block = older[before]
        rest = event.address - block.address - counted_bytes(block.n_bytes)
        together = bisect_right(segments, event.address) == bisect_right(segments, block.address)
        if together and block.died > at and 0 < rest <= MIB:
            sizes[before] = event.address - block.address
    return list(zip(starts, sizes, strict=True))
