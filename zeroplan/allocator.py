"""What CUDA's caching allocator makes of requests: the bytes that ``memory_allocated`` and ``memory_reserved`` would show.

A model of torch's own allocator, for a card that never runs out: requests are rounded to 512 bytes; up to 1 MiB they come from
segments of 2 MiB, up to 10 MiB from segments of 20 MiB, above from a segment of their own in whole 2 MiB; free blocks are
reused best fit, on the stream they were made on; blocks are split, and neighbours merged again. With expandable segments there
is one segment per stream and size class, which grows page by page.

Source: ``c10/cuda/CUDACachingAllocator.cpp`` (``malloc``, ``get_free_block``, ``should_split``, ``alloc_block``,
``find_expandable_block``, ``free_block``) and ``c10/core/AllocatorConfig.h``, torch 2.13. Left out: ``cudaMalloc`` that fails
and what is released then, ``record_stream``, and the settings that change sizes (``max_split_size_mb``,
``roundup_power2_divisions``, ``garbage_collection_threshold``), which are off by default.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Self

from zeroplan.numeric import round_up
from zeroplan.units import MIB

_MIN_BLOCK = 512
_LARGEST_SMALL = 1 * MIB
_SMALL_SEGMENT = 2 * MIB
_LARGE_SEGMENT = 20 * MIB
_OWN_SEGMENT_FROM = 10 * MIB
_OWN_SEGMENT_UNIT = 2 * MIB


def counted_bytes(n_bytes: int) -> int:
    """What a request counts as where blocks are split to the size of the request. [bytes]

    >>> counted_bytes(1), counted_bytes(512), counted_bytes(513)
    (512, 512, 1024)
    """
    return max(_MIN_BLOCK, round_up(n_bytes, _MIN_BLOCK))


class Chunk:
    """A stretch of a segment, in use or free, and its neighbours there."""

    __slots__ = ("address", "after", "before", "free", "pool", "size")

    def __init__(self, pool: "_Pool", address: int, size: int) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.free = False
        self.before: Chunk | None = None
        self.after: Chunk | None = None

    def __lt__(self, other: Self) -> bool:
        """Order free chunks as the allocator does: by size, then by address."""
        return (self.size, self.address) < (other.size, other.address)


class _Pool:
    """The free chunks of one size class on one stream, with addresses of their own.

    ``tail`` ends the growing segment, where there is one.
    """

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.free: list[Chunk] = []
        self.tail: Chunk | None = None
        self.end_address = 0

    def add(self, chunk: Chunk) -> None:
        chunk.free = True
        insort(self.free, chunk)

    def remove(self, chunk: Chunk) -> None:
        del self.free[bisect_left(self.free, chunk)]
        chunk.free = False

    def best_fit(self, size: int) -> Chunk | None:
        """Take the smallest free chunk that is large enough; one that can grow is taken last, as if it were endless."""
        at = bisect_left(self.free, size, key=_size)
        if at < len(self.free) - 1 and self.free[at] is self.tail:
            at += 1
        if at == len(self.free):
            return None
        chunk = self.free.pop(at)
        chunk.free = False
        return chunk


def _size(chunk: Chunk) -> int:
    return chunk.size


class CachingAllocator:
    """A card's allocator, empty at first.

    ``allocated_bytes`` and ``reserved_bytes`` are what ``torch.cuda.memory_allocated`` and ``memory_reserved`` would return now.

    >>> card = CachingAllocator()
    >>> one, other = card.request(6 * MIB), card.request(15 * MIB + 512)
    >>> card.allocated_bytes // MIB, card.reserved_bytes // MIB
    (22, 36)
    >>> card.release(other)
    >>> card.allocated_bytes // MIB, card.reserved_bytes // MIB
    (6, 36)
    """

    def __init__(self, *, expandable_segments: bool = False) -> None:
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self._expandable = expandable_segments
        self._pools: dict[tuple[bool, int], _Pool] = {}

    def request(self, n_bytes: int, stream: int = 0) -> Chunk:
        """Hand out memory for a request on a stream."""
        size = counted_bytes(n_bytes)
        pool = self._pool(size, stream)
        chunk = pool.best_fit(size) or self._more(pool, size)
        if self._splits(pool, chunk.size - size):
            pool.add(self._cut(chunk, size))
        self.allocated_bytes += chunk.size
        return chunk

    def standing(self, segment_bytes: int, blocks: Sequence[tuple[int, int]], stream: int = 0) -> list[Chunk]:
        """Begin with a segment that is there already, and blocks of it in use: offset, and size as it was asked for, in order.

        What follows a block and would not have been split off from it belongs to it. Raises ValueError where blocks overlap or
        do not fit in.
        """
        pool = self._pool(_LARGEST_SMALL if segment_bytes <= _SMALL_SEGMENT else segment_bytes, stream)
        rest: Chunk | None = self._segment(pool, segment_bytes)
        used, start = [], pool.end_address - segment_bytes
        ends = [*(offset for offset, _ in blocks[1:]), segment_bytes][: len(blocks)]
        for (offset, n_bytes), end in zip(blocks, ends, strict=True):
            size = counted_bytes(n_bytes)
            if rest is None or not rest.address - start <= offset <= end - size <= segment_bytes - size:
                raise ValueError(f"a block at {offset} of {segment_bytes} bytes does not fit")
            if gap := start + offset - rest.address:
                free, rest = rest, self._cut(rest, gap)
                pool.add(free)
            length = size if self._splits(pool, end - offset - size) else end - offset
            more = self._cut(rest, length) if length < rest.size else None
            self.allocated_bytes += rest.size
            used.append(rest)
            rest = more
        if rest is not None:
            pool.add(rest)
        return used

    def release(self, chunk: Chunk) -> None:
        """Take memory back, and join it with free neighbours."""
        self.allocated_bytes -= chunk.size
        pool = chunk.pool
        if chunk.before is not None and chunk.before.free:
            pool.remove(chunk.before)
            chunk = self._joined(chunk.before, chunk)
        if chunk.after is not None and chunk.after.free:
            pool.remove(chunk.after)
            chunk = self._joined(chunk, chunk.after)
        pool.add(chunk)

    def _pool(self, size: int, stream: int) -> _Pool:
        key = size <= _LARGEST_SMALL, stream
        if key not in self._pools:
            self._pools[key] = _Pool(small=key[0])
        return self._pools[key]

    def _splits(self, pool: _Pool, rest: int) -> bool:
        return rest >= _MIN_BLOCK if pool.small or self._expandable else rest > _LARGEST_SMALL

    def _more(self, pool: _Pool, size: int) -> Chunk:
        return self._grown(pool, size) if self._expandable else self._segment(pool, _segment_bytes(size))

    def _segment(self, pool: _Pool, size: int) -> Chunk:
        chunk = Chunk(pool, pool.end_address, size)
        pool.end_address += size
        self.reserved_bytes += size
        return chunk

    def _grown(self, pool: _Pool, size: int) -> Chunk:
        """Map as many pages behind the growing segment as a free end of it lacks."""
        page = _SMALL_SEGMENT if pool.small else _LARGE_SEGMENT
        tail = pool.tail
        end = tail if tail is not None and tail.free else None
        pages = self._segment(pool, round_up(size - (end.size if end is not None else 0), page))
        pages.before = tail
        if tail is not None:
            tail.after = pages
        pool.tail = pages
        if end is None:
            return pages
        pool.remove(end)
        return self._joined(end, pages)

    def _cut(self, chunk: Chunk, size: int) -> Chunk:
        rest = Chunk(chunk.pool, chunk.address + size, chunk.size - size)
        chunk.size = size
        rest.before, rest.after = chunk, chunk.after
        if rest.after is not None:
            rest.after.before = rest
        chunk.after = rest
        if chunk.pool.tail is chunk:
            chunk.pool.tail = rest
        return rest

    def _joined(self, first: Chunk, second: Chunk) -> Chunk:
        first.size += second.size
        first.after = second.after
        if first.after is not None:
            first.after.before = first
        if first.pool.tail is second:
            first.pool.tail = first
        return first


def _segment_bytes(size: int) -> int:
    if size <= _LARGEST_SMALL:
        return _SMALL_SEGMENT
    if size < _OWN_SEGMENT_FROM:
        return _LARGE_SEGMENT
    return round_up(size, _OWN_SEGMENT_UNIT)
