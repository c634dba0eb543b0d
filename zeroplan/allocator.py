"""What CUDA's caching allocator makes of requests: the bytes that ``memory_allocated`` and ``memory_reserved`` would show.

A model of torch's own allocator: requests are rounded to 512 bytes; up to 1 MiB they come from segments of 2 MiB, up to 10 MiB
from segments of 20 MiB, above from a segment of their own in whole 2 MiB; free blocks are reused best fit, on the stream they
were made on; blocks are split, and neighbours merged again. With expandable segments there is one segment per stream and size
class, which grows page by page.

Where the card is full, the allocator gives back to the driver every segment without a block in use (with expandable segments,
every page without one) and tries again: a retry, in torch's words. Where that does not help either, the process runs out of
memory.

What is asked for while a CUDA graph is captured comes from a private pool. Its blocks are used again within the pool alone, and
its segments stay reserved until no graph keeps the pool any more. While a capture runs, nothing is given back to the driver.

Source: ``c10/cuda/CUDACachingAllocator.cpp`` (``malloc``, ``get_free_block``, ``should_split``, ``alloc_block``,
``find_expandable_block``, ``try_allocate_expandable_block``, ``map_block``, ``unmap_block``, ``free_block``,
``release_cached_blocks``, ``release_blocks``, ``PrivatePool``, ``releasePool``) and ``c10/core/AllocatorConfig.h``, torch 2.13.
Left out: ``record_stream``, and the settings that change sizes (``max_split_size_mb``, ``roundup_power2_divisions``,
``garbage_collection_threshold``), which are off by default.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from typing import Self, cast

from zeroplan.numeric import round_up
from zeroplan.units import MIB

_MIN_BLOCK = 512
_LARGEST_SMALL = 1 * MIB
_SMALL_SEGMENT = 2 * MIB
_LARGE_SEGMENT = 20 * MIB
_OWN_SEGMENT_FROM = 10 * MIB
_OWN_SEGMENT_UNIT = 2 * MIB
#: Addresses that an expandable segment may still grow into; torch reserves an eighth more than the card has.
_ENDLESS = 2**62


class CardFullError(Exception):
    """A request that the card cannot give, cached blocks given back: what torch calls ``OutOfMemoryError``."""


def counted_bytes(n_bytes: int) -> int:
    """What a request counts as where blocks are split to the size of the request. [bytes]

    >>> counted_bytes(1), counted_bytes(512), counted_bytes(513)
    (512, 512, 1024)
    """
    return max(_MIN_BLOCK, round_up(n_bytes, _MIN_BLOCK))


class Chunk:
    """A stretch of a segment, in use, free or without pages of the card behind it, and its neighbours there."""

    __slots__ = ("address", "after", "before", "free", "mapped", "pool", "size")

    def __init__(self, pool: "_Pool", address: int, size: int, *, mapped: bool = True) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.free = False
        self.mapped = mapped
        self.before: Chunk | None = None
        self.after: Chunk | None = None

    def __lt__(self, other: Self) -> bool:
        """Order free chunks as the allocator does: by size, then by address."""
        return (self.size, self.address) < (other.size, other.address)

    @property
    def grows_to(self) -> int:
        """How large a free chunk can become where it lies: with the addresses behind it that have no pages yet."""
        after = self.after
        return self.size if after is None or after.mapped else self.size + after.size

    @property
    def available(self) -> bool:
        """Whether nothing is in it, with or without pages of the card behind it."""
        return self.free or not self.mapped


class _Pool:
    """The free chunks of one size class on one stream, with addresses of their own; ``private`` is the pool of CUDA graphs, if any.

    ``holes`` are, in the order of their addresses, the chunks of an expandable segment without pages behind them.
    """

    def __init__(self, *, small: bool, expandable: bool, private: int = 0) -> None:
        self.small = small
        self.private = private
        self.free: list[Chunk] = []
        self.holes = [Chunk(self, 0, _ENDLESS, mapped=False)] if expandable else []
        self.end_address = 0

    def add(self, chunk: Chunk) -> None:
        chunk.free = True
        insort(self.free, chunk)

    def remove(self, chunk: Chunk) -> None:
        del self.free[bisect_left(self.free, chunk)]
        chunk.free = False

    def best_fit(self, size: int) -> Chunk | None:
        """Take the smallest free chunk that is large enough; one that can grow counts as large as it can grow."""
        at = bisect_left(self.free, size, key=_size)
        if at == len(self.free):
            return None
        if self.holes:
            while at + 1 < len(self.free) and self.free[at + 1].grows_to < self.free[at].grows_to:
                at += 1
        chunk = self.free.pop(at)
        chunk.free = False
        return chunk

    def room_for(self, size: int) -> Chunk:
        """Return the chunk from which on there are enough addresses in a row, the lowest that a hole is part of."""
        for hole in self.holes:
            first = hole.before if hole.before is not None and hole.before.free else hole
            room, chunk = 0, cast("Chunk | None", first)
            while room < size and chunk is not None and chunk.available:
                room, chunk = room + chunk.size, chunk.after
            if room >= size:
                return first
        raise AssertionError("the last hole is endless")


def _size(chunk: Chunk) -> int:
    return chunk.size


def _address(chunk: Chunk) -> int:
    return chunk.address


class CachingAllocator:
    """A card's allocator, empty at first; without ``room_bytes`` the card never runs out.

    ``allocated_bytes`` and ``reserved_bytes`` are what ``torch.cuda.memory_allocated`` and ``memory_reserved`` would return now,
    ``highest_bytes`` is ``max_memory_reserved``, and ``retries`` is ``num_alloc_retries`` of ``memory_stats``.

    >>> card = CachingAllocator(room_bytes=50 * MIB)
    >>> one, other = card.request(6 * MIB), card.request(15 * MIB + 512)
    >>> card.allocated_bytes // MIB, card.reserved_bytes // MIB
    (22, 36)
    >>> card.release(other)
    >>> card.allocated_bytes // MIB, card.reserved_bytes // MIB
    (6, 36)
    >>> _ = card.request(30 * MIB)  # too large for what is free, and for the card beside it
    >>> card.allocated_bytes // MIB, card.reserved_bytes // MIB, card.retries
    (36, 50, 1)
    """

    def __init__(self, *, expandable_segments: bool = False, room_bytes: int | None = None) -> None:
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.highest_bytes = 0
        self.retries = 0
        self._room = room_bytes
        self._expandable = expandable_segments
        self._pools: dict[tuple[bool, int, int], _Pool] = {}
        self._kept: set[int] = set()
        """Private pools that a graph keeps."""

    def request(self, n_bytes: int, stream: int = 0, private: int = 0) -> Chunk:
        """Hand out memory for a request on a stream, within a capture of a private pool.

        Raises :class:`CardFullError` where the card has none to give.
        """
        size = counted_bytes(n_bytes)
        if private:
            self._kept.add(private)
        pool = self._pool(size, stream, private)
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
        self._freed(chunk)

    def let_go(self, private: int) -> None:
        """Note that no graph keeps a private pool any more: what is free in it may go back to the driver."""
        self._kept.discard(private)

    @property
    def kept_bytes(self) -> int:
        """What is free in private pools that a graph keeps: nothing else can have it. [bytes]"""
        return sum(chunk.size for pool in self._pools.values() if pool.private in self._kept for chunk in pool.free)

    def chunks(self, in_use: Iterable[Chunk]) -> Iterator[Chunk]:
        """All chunks of the card: those in use, which nobody but their owners knows, and those that are free."""
        yield from in_use
        for pool in self._pools.values():
            yield from pool.free

    def release_cached(self) -> list[Chunk]:
        """Give back to the driver what no block in use shares a segment with, or a page; what ``empty_cache`` does.

        Returns the segments that are gone, none with expandable segments, which shrink.
        """
        gone = []
        for pool in self._pools.values():
            for chunk in () if pool.private in self._kept else tuple(pool.free):
                if self._expandable:
                    self._unmapped(chunk)
                elif chunk.before is None and chunk.after is None:
                    pool.remove(chunk)
                    self.reserved_bytes -= chunk.size
                    gone.append(chunk)
        return gone

    def _pool(self, size: int, stream: int, private: int = 0) -> _Pool:
        key = size <= _LARGEST_SMALL, stream, private
        if key not in self._pools:
            self._pools[key] = _Pool(small=key[0], expandable=self._expandable, private=private)
        return self._pools[key]

    def _splits(self, pool: _Pool, rest: int) -> bool:
        return rest >= _MIN_BLOCK if pool.small or self._expandable else rest > _LARGEST_SMALL

    def _more(self, pool: _Pool, size: int) -> Chunk:
        """Take from the card; where it is full, give back what is cached and try once more."""
        take = self._grown if self._expandable else self._own_segment
        try:
            return take(pool, size)
        except CardFullError:
            if pool.private:  # within a capture
                raise
            self.retries += 1
            self.release_cached()
            return take(pool, size)

    def _own_segment(self, pool: _Pool, size: int) -> Chunk:
        return self._segment(pool, _segment_bytes(size))

    def _segment(self, pool: _Pool, size: int) -> Chunk:
        self._take(size)
        chunk = Chunk(pool, pool.end_address, size)
        pool.end_address += size
        return chunk

    def _take(self, n_bytes: int) -> None:
        if self._room is not None and self.reserved_bytes + n_bytes > self._room:
            raise CardFullError
        self.reserved_bytes += n_bytes
        self.highest_bytes = max(self.highest_bytes, self.reserved_bytes)

    def _freed(self, chunk: Chunk) -> Chunk:
        """Add a chunk to those that are free, joined with its free neighbours."""
        pool = chunk.pool
        if chunk.before is not None and chunk.before.free:
            pool.remove(chunk.before)
            chunk = self._joined(chunk.before, chunk)
        if chunk.after is not None and chunk.after.free:
            pool.remove(chunk.after)
            chunk = self._joined(chunk, chunk.after)
        pool.add(chunk)
        return chunk

    # --- expandable segments --------------------------------------------------------------------------------------------

    def _grown(self, pool: _Pool, size: int) -> Chunk:
        """Map as many pages into the first stretch of addresses with room as it lacks, beside what of it is free."""
        chunk = pool.room_for(size)
        if not chunk.mapped:
            chunk = self._mapped(chunk, min(size, chunk.size))
        while chunk.size < size:
            hole = chunk.after
            assert hole is not None  # noqa: S101  room_for has counted it
            chunk = self._mapped(hole, min(size - chunk.size, hole.size))
        pool.remove(chunk)
        return chunk

    def _mapped(self, hole: Chunk, size: int) -> Chunk:
        """Put whole pages behind the beginning of a hole, which is then free, with its free neighbours."""
        pool = hole.pool
        size = round_up(size, _page(pool))
        self._take(size)
        at = bisect_left(pool.holes, hole.address, key=_address)
        pool.holes[at : at + 1] = [self._cut(hole, size)] if size < hole.size else []
        hole.mapped = True
        return self._freed(hole)

    def _unmapped(self, chunk: Chunk) -> None:
        """Take from a free chunk the whole pages that lie in it; what is left at its ends stays free."""
        pool, page = chunk.pool, _page(chunk.pool)
        start, end = round_up(chunk.address, page), (chunk.address + chunk.size) // page * page
        if start >= end:
            return
        pool.remove(chunk)
        if start > chunk.address:
            chunk, before = self._cut(chunk, start - chunk.address), chunk
            pool.add(before)
        if end < chunk.address + chunk.size:
            pool.add(self._cut(chunk, end - chunk.address))
        self.reserved_bytes -= chunk.size
        chunk.mapped = False
        self._hole(chunk)

    def _hole(self, chunk: Chunk) -> None:
        """Add a chunk without pages to the others, joined with those beside it."""
        holes = chunk.pool.holes
        at = bisect_left(holes, chunk.address, key=_address)
        first = last = at
        if chunk.before is not None and not chunk.before.mapped:
            first, chunk = at - 1, self._joined(chunk.before, chunk)
        if chunk.after is not None and not chunk.after.mapped:
            last, chunk = at + 1, self._joined(chunk, chunk.after)
        holes[first:last] = [chunk]

    # --- chunks ---------------------------------------------------------------------------------------------------------

    def _cut(self, chunk: Chunk, size: int) -> Chunk:
        rest = Chunk(chunk.pool, chunk.address + size, chunk.size - size, mapped=chunk.mapped)
        chunk.size = size
        rest.before, rest.after = chunk, chunk.after
        if rest.after is not None:
            rest.after.before = rest
        chunk.after = rest
        return rest

    def _joined(self, first: Chunk, second: Chunk) -> Chunk:
        first.size += second.size
        first.after = second.after
        if first.after is not None:
            first.after.before = first
        return first


def _page(pool: _Pool) -> int:
    """What an expandable segment grows by."""
    return _SMALL_SEGMENT if pool.small else _LARGE_SEGMENT


def _segment_bytes(size: int) -> int:
    if size <= _LARGEST_SMALL:
        return _SMALL_SEGMENT
    if size < _OWN_SEGMENT_FROM:
        return _LARGE_SEGMENT
    return round_up(size, _OWN_SEGMENT_UNIT)
