"""Checks the model of CUDA's caching allocator by its rules, against a slow reference model, and against real GPUs."""

from __future__ import annotations

import json
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroplan.allocator import CachingAllocator, CardFullError, Chunk, counted_bytes
from zeroplan.units import MIB

BOTH = pytest.mark.parametrize("expandable", [False, True])


def counts(*requests: int, expandable: bool = False) -> tuple[int, int]:
    card = CachingAllocator(expandable_segments=expandable)
    for n_bytes in requests:
        card.request(n_bytes)
    return card.allocated_bytes, card.reserved_bytes


@BOTH
def test_a_small_request_counts_in_512_bytes_and_takes_2_mib(expandable: bool):
    assert counts(1, expandable=expandable) == (512, 2 * MIB)
    assert counts(MIB, MIB, expandable=expandable) == (2 * MIB, 2 * MIB)
    assert counts(MIB, MIB, 1, expandable=expandable) == (2 * MIB + 512, 4 * MIB)


def test_a_request_up_to_10_mib_shares_20_mib_with_others():
    assert counts(MIB + 1) == (MIB + 512, 20 * MIB)
    assert counts(9 * MIB, 9 * MIB) == (18 * MIB, 20 * MIB)
    # After 18.5 of 20 MiB only 1.5 are free. A request of 1 MiB + 512 leaves less than 1 MiB, so it is not split and counts 1.5.
    assert counts(9 * MIB, 9 * MIB + MIB // 2, MIB + 512) == (20 * MIB, 20 * MIB)


def test_a_larger_request_has_a_segment_of_its_own_in_whole_2_mib():
    assert counts(10 * MIB) == (10 * MIB, 10 * MIB)
    assert counts(11 * MIB) == (12 * MIB, 12 * MIB)  # the allocator does not split off a rest of 1 MiB
    assert counts(10 * MIB + 512) == (10 * MIB + 512, 12 * MIB)  # it does split off a larger one


def test_expandable_segments_count_what_is_asked_for_in_pages_of_20_mib():
    assert counts(11 * MIB, expandable=True) == (11 * MIB, 20 * MIB)
    assert counts(11 * MIB, 11 * MIB, expandable=True) == (22 * MIB, 40 * MIB)
    assert counts(11 * MIB, 30 * MIB, 1, expandable=True) == (41 * MIB + 512, 62 * MIB)


@BOTH
def test_streams_do_not_share_free_memory(expandable: bool):
    card = CachingAllocator(expandable_segments=expandable)
    card.release(card.request(40 * MIB, stream=1))
    card.request(40 * MIB, stream=2)
    assert card.reserved_bytes == 80 * MIB
    card.request(40 * MIB, stream=1)
    assert card.reserved_bytes == 80 * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_what_another_stream_uses_is_free_when_the_gpu_has_come_that_far(*, expandable: bool):
    """A released block under ``record_stream`` no longer counts as allocated, but cannot be reused before that time."""
    card = CachingAllocator(expandable_segments=expandable)
    first, second = card.request(40 * MIB), card.request(40 * MIB)
    card.release(first, once_at=1)
    card.release(second, once_at=3)
    assert card.allocated_bytes == 0
    card.reached(2)
    card.request(40 * MIB)
    assert card.reserved_bytes == 80 * MIB
    card.request(40 * MIB)
    assert card.reserved_bytes == 120 * MIB


def test_a_full_card_waits_for_all_streams():
    card = CachingAllocator(room_bytes=50 * MIB)
    card.release(card.request(40 * MIB), once_at=7)
    card.request(44 * MIB)
    assert (card.reserved_bytes, card.retries) == (44 * MIB, 1)


def test_only_expandable_segments_grow_a_free_end():
    for expandable, reserved in ((False, 100 * MIB), (True, 60 * MIB)):
        card = CachingAllocator(expandable_segments=expandable)
        card.release(card.request(40 * MIB))
        card.request(60 * MIB)
        assert card.reserved_bytes == reserved


def test_an_end_that_can_grow_is_taken_last():
    card = CachingAllocator(expandable_segments=True)
    first, _ = card.request(15 * MIB), card.request(15 * MIB)  # leaves 10 MiB free at the end
    card.release(first)
    assert card.request(4 * MIB).address == first.address


# --- a card that is full ----------------------------------------------------------------------------------------------------


@BOTH
def test_a_full_card_gives_back_what_no_block_in_use_shares_a_segment_with(expandable: bool):
    card = CachingAllocator(expandable_segments=expandable, room_bytes=100 * MIB)
    card.release(card.request(60 * MIB))
    card.request(80 * MIB, stream=1)  # another stream cannot reuse the first stream's block
    assert (card.reserved_bytes, card.highest_bytes, card.retries) == (80 * MIB, 80 * MIB, 1)


def test_a_block_in_use_holds_its_whole_segment_but_only_its_own_pages():
    """With 40 MiB free beside 20 in use, the allocator can release the 40 only with expandable segments."""
    for expandable in (False, True):
        card = CachingAllocator(expandable_segments=expandable, room_bytes=100 * MIB)
        card.release(card.request(60 * MIB))
        card.request(20 * MIB)
        if expandable:
            card.request(80 * MIB, stream=1)
            assert (card.reserved_bytes, card.retries) == (100 * MIB, 1)
        else:
            with pytest.raises(CardFullError):
                card.request(80 * MIB, stream=1)
            assert (card.allocated_bytes, card.reserved_bytes, card.retries) == (20 * MIB, 60 * MIB, 1)


def test_pages_that_were_given_back_are_mapped_again_where_there_are_addresses_enough():
    card = CachingAllocator(expandable_segments=True)
    first, last = card.request(60 * MIB), card.request(20 * MIB)
    card.release(first)
    card.release_cached()
    assert card.reserved_bytes == 20 * MIB
    again = card.request(40 * MIB)
    assert (again.address, card.reserved_bytes) == (first.address, 60 * MIB)  # in the hole, of which 20 MiB stay unmapped
    beyond = card.request(40 * MIB)
    assert (beyond.address, card.reserved_bytes) == (last.address + last.size, 100 * MIB)


def test_a_page_that_is_used_in_part_stays():
    card = CachingAllocator(expandable_segments=True)
    card.release(card.request(70 * MIB))
    card.request(5 * MIB)
    card.release_cached()
    assert card.reserved_bytes == 20 * MIB
    card.request(15 * MIB)
    assert card.reserved_bytes == 20 * MIB


@BOTH
def test_an_emptied_cache_holds_nothing_where_nothing_is_in_use(expandable: bool):
    card = CachingAllocator(expandable_segments=expandable)
    for chunk in [card.request(size) for size in (1, 5 * MIB, 33 * MIB, 12 * MIB, 700_000)]:
        card.release(chunk)
    card.release_cached()
    assert (card.reserved_bytes, card.highest_bytes > 0) == (0, True)


class Twin:
    """A slow reference model: segments are lists of (size, owner), and every request searches all of them."""

    def __init__(self, room: int | None = None) -> None:
        self.room = room
        self.segments: list[tuple[tuple[bool, int], list[list[int]]]] = []
        self.keys = count(1)

    def request(self, n_bytes: int, stream: int) -> int:
        size, owner = counted_bytes(n_bytes), next(self.keys)
        pool = size <= MIB, stream
        free = [
            (part[0], s, p)
            for s, (of, parts) in enumerate(self.segments)
            for p, part in enumerate(parts)
            if of == pool and not part[1] and part[0] >= size
        ]
        if not free:
            whole = 2 * MIB if pool[0] else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            if self.room is not None and self.figures()[1] + whole > self.room:
                self.segments = [one for one in self.segments if any(part[1] for part in one[1])]
                if self.figures()[1] + whole > self.room:
                    raise CardFullError
            self.segments.append((pool, [[whole, 0]]))
            free = [(whole, len(self.segments) - 1, 0)]
        _, s, p = min(free)
        parts = self.segments[s][1]
        rest = parts[p][0] - size
        if rest >= 512 if pool[0] else rest > MIB:
            parts[p : p + 1] = [[size, owner], [rest, 0]]
        else:
            parts[p][1] = owner
        return owner

    def release(self, owner: int) -> None:
        for _, parts in self.segments:
            for part in parts:
                if part[1] == owner:
                    part[1] = 0
            at = 0
            while at + 1 < len(parts):
                if parts[at][1] or parts[at + 1][1]:
                    at += 1
                else:
                    parts[at : at + 2] = [[parts[at][0] + parts[at + 1][0], 0]]

    def figures(self) -> tuple[int, int]:
        allocated = sum(part[0] for _, parts in self.segments for part in parts if part[1])
        return allocated, sum(part[0] for _, parts in self.segments for part in parts)


SIZES = st.one_of(st.integers(1, 2 * MIB), st.integers(1, 40 * MIB), st.sampled_from([512, MIB, MIB + 1, 10 * MIB, 20 * MIB]))
ACTS = st.lists(st.one_of(st.tuples(SIZES, st.integers(0, 1)), st.integers(0, 10**6)), max_size=60)


@given(ACTS)
def test_it_does_what_a_slow_twin_does(acts: list[tuple[int, int] | int]):
    card, twin = CachingAllocator(), Twin()
    held = []
    for act in acts:
        if isinstance(act, tuple):
            held.append((card.request(*act), twin.request(*act)))
        elif held:
            chunk, owner = held.pop(act % len(held))
            card.release(chunk)
            twin.release(owner)
        assert (card.allocated_bytes, card.reserved_bytes) == twin.figures()


def requested(card: CachingAllocator | Twin, n_bytes: int, stream: int) -> Chunk | int | None:
    try:
        return card.request(n_bytes, stream)
    except CardFullError:
        return None


@given(ACTS)
def test_on_a_small_card_too(acts: list[tuple[int, int] | int]):
    card, twin = CachingAllocator(room_bytes=120 * MIB), Twin(120 * MIB)
    held: list[tuple[Any, Any]] = []
    for act in acts:
        if isinstance(act, tuple):
            one, other = requested(card, *act), requested(twin, *act)
            assert (one is None) == (other is None)
            held += [(one, other)] if one is not None else []
        elif held:
            chunk, owner = held.pop(act % len(held))
            card.release(chunk)
            twin.release(owner)
        assert (card.allocated_bytes, card.reserved_bytes) == twin.figures()


@given(ACTS)
def test_expandable_segments_on_a_small_card_lose_nothing(acts: list[tuple[int, int] | int]):
    """A refused request would not fit beside the pages in use, and served requests do not overlap."""
    room = 120 * MIB
    card = CachingAllocator(expandable_segments=True, room_bytes=room)
    held: list[Chunk] = []
    for act in acts:
        if isinstance(act, tuple):
            chunk = requested(card, *act)
            if isinstance(chunk, Chunk):
                held.append(chunk)
            else:
                page = 20 * MIB if counted_bytes(act[0]) > MIB else 2 * MIB
                assert pages_in_use(held) + counted_bytes(act[0]) + 2 * page > room
        elif held:
            card.release(held.pop(act % len(held)))
        assert card.allocated_bytes == sum(chunk.size for chunk in held)
        assert pages_in_use(held) <= card.reserved_bytes <= card.highest_bytes <= room
        for pool in {chunk.pool for chunk in held}:
            taken = sorted((chunk.address, chunk.address + chunk.size) for chunk in held if chunk.pool is pool)
            assert all(one[1] <= other[0] for one, other in pairwise(taken))
            free = sum(chunk.size for chunk in pool.free)
            assert free + sum(chunk.size for chunk in held if chunk.pool is pool) == mapped_bytes(pool.holes)
    for chunk in held:
        card.release(chunk)
    card.release_cached()
    assert (card.allocated_bytes, card.reserved_bytes) == (0, 0)


def pages_in_use(held: list[Chunk]) -> int:
    """Bytes of the pages that contain a block. [bytes]"""
    pages = set()
    for chunk in held:
        page = 2 * MIB if chunk.pool.small else 20 * MIB
        pages |= {(id(chunk.pool), page, at) for at in range(chunk.address // page, -(-(chunk.address + chunk.size) // page))}
    return sum(page for _, page, _ in pages)


def mapped_bytes(holes: list[Chunk]) -> int:
    """Bytes between the holes, the last of which is endless. [bytes]"""
    assert all(one.address + one.size < other.address for one, other in pairwise(holes))  # touching holes are joined
    return holes[-1].address - sum(hole.size for hole in holes[:-1])


@given(ACTS)
def test_expandable_segments_count_the_rounded_requests_and_lose_nothing(acts: list[tuple[int, int] | int]):
    card = CachingAllocator(expandable_segments=True)
    held = []
    for act in acts:
        if isinstance(act, tuple):
            held.append((card.request(*act), counted_bytes(act[0])))
        elif held:
            card.release(held.pop(act % len(held))[0])
        assert card.allocated_bytes == sum(size for _, size in held)
        for pool in {chunk.pool for chunk, _ in held}:
            taken = sorted((chunk.address, chunk.address + chunk.size) for chunk, _ in held if chunk.pool is pool)
            assert all(one[1] <= other[0] for one, other in pairwise(taken))
    for chunk, _ in held:
        card.release(chunk)
    assert card.allocated_bytes == 0
    assert [len(pool.free) for pool in card._pools.values()] == [1] * len(card._pools)
    assert sum(pool.free[0].size for pool in card._pools.values()) == card.reserved_bytes


ON_GPUS = [json.loads(line) for line in (Path(__file__).parent / "golden/requests_on_gpus.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("seen", ON_GPUS, ids=lambda seen: seen["what"])
def test_at_every_request_the_model_takes_from_the_card_what_a_real_gpu_took(seen: dict[str, Any]):
    """Public snapshots of real runs, reduced to sizes in order: requests, releases (-1 - number), and growth of segments."""
    card = CachingAllocator()
    chunks = [chunk for n_bytes, blocks in seen["segments"] for chunk in card.standing(n_bytes, blocks)]
    grown, found = dict(seen["grown"]), {}
    requests = 0
    for event in seen["events"]:
        if event < 0:
            card.release(chunks[-1 - event])
            continue
        before = card.reserved_bytes
        chunks.append(card.request(event))
        if card.reserved_bytes > before:
            found[requests] = card.reserved_bytes - before
        requests += 1
    assert found == grown
    assert card.reserved_bytes == seen["reserved_bytes"]


@pytest.mark.parametrize("blocks", [[(0, 600), (512, 512)], [(MIB, 3 * MIB)], [(-512, 512)]])
def test_blocks_that_do_not_fit_in_their_segment_are_refused(blocks: list[tuple[int, int]]):
    with pytest.raises(ValueError, match="does not fit"):
        CachingAllocator().standing(2 * MIB, blocks)


def test_a_segment_that_stands_gives_its_free_pieces_first():
    card = CachingAllocator()
    card.standing(20 * MIB, [(4 * MIB, 4 * MIB), (8 * MIB, 2 * MIB)])
    card.request(10 * MIB)
    assert (card.allocated_bytes, card.reserved_bytes) == (16 * MIB, 20 * MIB)
    card.request(4 * MIB)
    assert card.reserved_bytes == 20 * MIB
    card.request(2 * MIB)
    assert card.reserved_bytes == 40 * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_a_private_pool_is_used_within_itself_and_kept_until_it_is_released(*, expandable: bool):
    page = 20 * MIB
    card = CachingAllocator(expandable_segments=expandable)
    card.release(card.request(page))
    one = card.request(page, private=1)  # does not reuse the general pool's page
    card.release(one)
    assert (card.reserved_bytes, card.kept_bytes) == (2 * page, page)
    card.release(card.request(page, private=1))
    card.release(card.request(page))
    assert card.reserved_bytes == 2 * page
    card.request(page, private=2)
    card.release_cached()
    assert (card.allocated_bytes, card.reserved_bytes) == (page, 2 * page)
    card.let_go(1)
    assert (card.reserved_bytes, card.kept_bytes) == (2 * page, 0)
    card.release_cached()
    assert card.reserved_bytes == page


def test_within_a_capture_a_full_card_gives_nothing_back():
    card = CachingAllocator(room_bytes=40 * MIB)
    card.release(card.request(30 * MIB))
    with pytest.raises(CardFullError):
        card.request(20 * MIB, private=1)
    assert card.reserved_bytes == 30 * MIB
    card.request(36 * MIB)
    assert (card.reserved_bytes, card.retries) == (36 * MIB, 1)
