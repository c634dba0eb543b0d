"""Models CUDA's caching allocator: the bytes that ``memory_allocated`` and ``memory_reserved`` return for given requests.

Requests are rounded to 512 bytes. Up to 1 MiB they come from segments of 2 MiB, and up to 10 MiB from segments of 20 MiB.
Larger ones get their own segment in whole 2 MiB. Free blocks are reused best fit, on the stream they were made on. Blocks are
split, and free neighbours merged. With expandable segments there is one segment per stream and size class, which grows page by
page.

If the GPU is full, the allocator frees every segment without a block in use (with expandable segments, every such page) and tries
again; torch calls this a retry. If that does not help, the process runs out of memory.

Requests during the capture of a CUDA graph come from a private pool. Its blocks are reused within the pool only, and its
segments stay reserved until no graph uses the pool. During a capture nothing is freed to the driver.

Source: ``c10/cuda/CUDACachingAllocator.cpp`` (``malloc``, ``get_free_block``, ``should_split``, ``alloc_block``,
``find_expandable_block``, ``try_allocate_expandable_block``, ``map_block``, ``unmap_block``, ``free_block``,
``release_cached_blocks``, ``release_blocks``, ``PrivatePool``, ``releasePool``) and ``c10/core/AllocatorConfig.h``, torch 2.13.

A block that another stream uses (``Tensor.record_stream``) becomes free when that stream reaches the point where the tensor was
deleted (``insert_events``, ``process_events``). The GPU lags behind the program, so the caller passes the points that it has
reached. If the GPU is full, the allocator waits for all of them (``synchronize_and_free_events``).

Left out: the settings that change sizes (``max_split_size_mb``, ``roundup_power2_divisions``,
``garbage_collection_threshold``), which are off by default.
"""

import os
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import cast

from zeroplan.numeric import round_up
from zeroplan.units import MIB

_MIN_BLOCK = 512
_LARGEST_SMALL = 1 * MIB
_SMALL_SEGMENT = 2 * MIB
_LARGE_SEGMENT = 20 * MIB
_OWN_SEGMENT_FROM = 10 * MIB
_OWN_SEGMENT_UNIT = 2 * MIB
#: Address space into which an expandable segment can grow; torch reserves 9/8 of the GPU's memory.
_ENDLESS = 2**62


class CardFullError(Exception):
    """A request that the GPU cannot serve even after freeing the cache: torch's ``OutOfMemoryError``."""


def counted_bytes(n_bytes: int) -> int:
    """The counted size of a request, where blocks are split to the requested size. [bytes]

    >>> counted_bytes(1), counted_bytes(512), counted_bytes(513)
    (512, 512, 1024)
    """
    return (n_bytes + _MIN_BLOCK - 1) // _MIN_BLOCK * _MIN_BLOCK or _MIN_BLOCK


class Chunk:
    """A block of a segment (in use, free, or without pages), linked to its neighbours in the segment."""

    __slots__ = ("address", "after", "before", "free", "mapped", "pool", "size")

    def __init__(self, pool: "_Pool", address: int, size: int, *, mapped: bool = True) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.free = False
        self.mapped = mapped
        self.before: Chunk | None = None
        self.after: Chunk | None = None

    @property
    def grows_to(self) -> int:
        """The size to which a free chunk can grow in place, by mapping pages into the hole behind it. [bytes]"""
        after = self.after
        return self.size if after is None or after.mapped else self.size + after.size

    @property
    def available(self) -> bool:
        """Whether the chunk is unused, with or without pages."""
        return self.free or not self.mapped


class _Pool:
    """The free chunks of one size class on one stream, with their own addresses; ``private`` is the pool of CUDA graphs, if any.

    ``holes`` are the chunks of an expandable segment without pages, in the order of addresses.
    """

    def __init__(self, *, small: bool, expandable: bool, private: int = 0) -> None:
        self.small = small
        self.private = private
        self.least_rest = _MIN_BLOCK if small or expandable else _LARGEST_SMALL + _MIN_BLOCK
        """The smallest rest that is split off a block. [bytes]"""
        self._ordered: list[tuple[int, int, Chunk]] = []
        """Size, address and chunk, as the allocator orders free chunks. Tuples of ints compare without a call of Python."""
        self.holes = [Chunk(self, 0, _ENDLESS, mapped=False)] if expandable else []
        self.end_address = 0

    @property
    def free(self) -> list[Chunk]:
        """The free chunks by size, then by address."""
        return [chunk for _, _, chunk in self._ordered]

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """The sizes and addresses of free chunks and of holes."""
        return *((size, address) for size, address, _ in self._ordered), *((hole.size, hole.address) for hole in self.holes)

    def add(self, chunk: Chunk) -> None:
        chunk.free = True
        insort(self._ordered, (chunk.size, chunk.address, chunk))

    def remove(self, chunk: Chunk) -> None:
        del self._ordered[bisect_left(self._ordered, (chunk.size, chunk.address, chunk))]
        chunk.free = False

    def best_fit(self, size: int) -> Chunk | None:
        """Remove and return the smallest free chunk that is large enough; a growing one counts with the size it can grow to."""
        ordered = self._ordered
        at = bisect_left(ordered, (size,))
        if at == len(ordered):
            return None
        after = ordered[at][2].after
        if after is not None and not after.mapped:  # it can grow
            while at + 1 < len(ordered) and ordered[at + 1][2].grows_to < ordered[at][2].grows_to:
                at += 1
        chunk = ordered.pop(at)[2]
        chunk.free = False
        return chunk

    def room_for(self, size: int) -> Chunk:
        """The first chunk of a run of available addresses that is large enough, the lowest that contains a hole."""
        for hole in self.holes:
            first = hole.before if hole.before is not None and hole.before.free else hole
            room, chunk = 0, cast("Chunk | None", first)
            while room < size and chunk is not None and chunk.available:
                room, chunk = room + chunk.size, chunk.after
            if room >= size:
                return first
        raise AssertionError("the last hole is endless")


def _address(chunk: Chunk) -> int:
    return chunk.address


def expandable_segments_are_set() -> bool:
    """Whether an environment variable of this process turns on expandable segments in torch's allocator."""
    settings = ",".join(os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    return "expandable_segments:true" in settings.lower().replace(" ", "")


class CachingAllocator:
    """A GPU's allocator, empty at first; without ``room_bytes`` it never runs out of memory.

    ``allocated_bytes`` and ``reserved_bytes`` equal ``torch.cuda.memory_allocated`` and ``memory_reserved`` now,
    ``highest_bytes`` is ``max_memory_reserved``, and ``retries`` is ``num_alloc_retries`` of ``memory_stats``.

    >>> card = CachingAllocator(room_bytes=50 * MIB)
    >>> one, other = card.request(6 * MIB), card.request(15 * MIB + 512)
    >>> card.allocated_bytes // MIB, card.reserved_bytes // MIB
    (22, 36)
    >>> card.release(other)
    >>> card.allocated_bytes // MIB, card.reserved_bytes // MIB
    (6, 36)
    >>> _ = card.request(30 * MIB)  # too large for the free memory and for the rest of the card
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
        self._waiting: list[tuple[int, Chunk]] = []
        """Released chunks that another stream may still use, each with the point that the stream must reach first."""
        self._kept: set[int] = set()
        """Private pools that CUDA graphs still use."""

    def request(self, n_bytes: int, stream: int = 0, private: int = 0) -> Chunk:
        """Allocate a chunk on a stream, from a private pool within a capture.

        Raises :class:`CardFullError` if the GPU is out of memory.
        """
        size = counted_bytes(n_bytes)
        if private:
            self._kept.add(private)
        pool = self._pools.get((size <= _LARGEST_SMALL, stream, private)) or self._pool(size, stream, private)
        chunk = pool.best_fit(size) or self._more(pool, size)
        if chunk.size - size >= pool.least_rest:
            pool.add(self._cut(chunk, size))
        self.allocated_bytes += chunk.size
        return chunk

    def standing(self, segment_bytes: int, blocks: Sequence[tuple[int, int]], stream: int = 0) -> list[Chunk]:
        """Add an existing segment with blocks in use, given as offset and requested size in order; return their chunks.

        A remainder behind a block that the allocator would not split off belongs to the block. Raises ValueError for blocks
        that overlap or do not fit.
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
            length = size if end - offset - size >= pool.least_rest else end - offset
            more = self._cut(rest, length) if length < rest.size else None
            self.allocated_bytes += rest.size
            used.append(rest)
            rest = more
        if rest is not None:
            pool.add(rest)
        return used

    def release(self, chunk: Chunk, *, once_at: int | None = None) -> None:
        """Free a chunk and merge it with free neighbours, now or when the GPU reaches the point ``once_at`` (:meth:`reached`).

        >>> card = CachingAllocator()
        >>> card.release(card.request(30 * MIB), once_at=1)
        >>> _ = card.request(30 * MIB)
        >>> card.reached(1)
        >>> _ = card.request(30 * MIB)
        >>> card.allocated_bytes // MIB, card.reserved_bytes // MIB
        (60, 60)
        """
        self.allocated_bytes -= chunk.size
        if once_at is None:
            self._freed(chunk)
        else:
            self._waiting.append((once_at, chunk))

    @property
    def free(self) -> Hashable:
        """The free memory, whose state decides how the next requests are served; None while a block waits for another stream."""
        if self._waiting:
            return None
        pools = [(key, pool.end_address, pool.places) for key, pool in self._pools.items()]
        return self.reserved_bytes, self.allocated_bytes, tuple(pools)

    def reached(self, point: int) -> None:
        """Free the chunks that wait for the GPU to reach this point or an earlier one. Points are numbered in program order."""
        now = [chunk for at, chunk in self._waiting if at <= point]
        self._waiting = [one for one in self._waiting if one[0] > point]
        for chunk in now:
            self._freed(chunk)

    def let_go(self, private: int) -> None:
        """Note that no graph uses a private pool any more, so its free memory may be freed to the driver."""
        self._kept.discard(private)

    @property
    def kept_bytes(self) -> int:
        """Free memory in private pools that graphs use, which nothing else can allocate. [bytes]"""
        return sum(chunk.size for pool in self._pools.values() if pool.private in self._kept for chunk in pool.free)

    def chunks(self, in_use: Iterable[Chunk]) -> Iterator[Chunk]:
        """Yield the given chunks, which are in use, and all free chunks."""
        yield from in_use
        for pool in self._pools.values():
            yield from pool.free

    def release_cached(self) -> list[Chunk]:
        """Free every segment, or page, without a block in use, as ``empty_cache`` does.

        First it waits for all streams. Returns the freed segments; expandable segments shrink instead, so then the list is empty.
        """
        self.reached(max((at for at, _ in self._waiting), default=0))
        released = []
        for pool in self._pools.values():
            for chunk in () if pool.private in self._kept else pool.free:
                if self._expandable:
                    self._unmapped(chunk)
                elif chunk.before is None and chunk.after is None:
                    pool.remove(chunk)
                    self.reserved_bytes -= chunk.size
                    released.append(chunk)
        return released

    def _pool(self, size: int, stream: int, private: int = 0) -> _Pool:
        key = size <= _LARGEST_SMALL, stream, private
        if key not in self._pools:
            self._pools[key] = _Pool(small=key[0], expandable=self._expandable, private=private)
        return self._pools[key]

    def _more(self, pool: _Pool, size: int) -> Chunk:
        """Allocate from the GPU; if it is full, free the cache and try once more."""
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
        return self._segment(pool, segment_bytes(size))

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
        """Make a chunk free, and merge it with free neighbours."""
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
        """Map the missing pages into the first run of addresses with enough room, and return the whole chunk."""
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
        """Map whole pages at the beginning of a hole; they are then free and merged with free neighbours."""
        pool = hole.pool
        size = round_up(size, _page(pool))
        self._take(size)
        at = bisect_left(pool.holes, hole.address, key=_address)
        pool.holes[at : at + 1] = [self._cut(hole, size)] if size < hole.size else []
        hole.mapped = True
        return self._freed(hole)

    def _unmapped(self, chunk: Chunk) -> None:
        """Unmap the whole pages inside a free chunk; the rest at its ends stays free."""
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
        """Add a chunk without pages to the holes, merged with neighbouring holes."""
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
    """The page size of an expandable segment. [bytes]"""
    return _SMALL_SEGMENT if pool.small else _LARGE_SEGMENT


def segment_bytes(size: int) -> int:
    """Return the size of the new segment for a request that no cached block can serve (``get_allocation_size``). [bytes]

    >>> segment_bytes(512) // MIB, segment_bytes(2 * MIB) // MIB, segment_bytes(10 * MIB + 1) // MIB
    (2, 20, 12)
    """
    if size <= _LARGEST_SMALL:
        return _SMALL_SEGMENT
    if size < _OWN_SEGMENT_FROM:
        return _LARGE_SEGMENT
    return round_up(size, _OWN_SEGMENT_UNIT)
