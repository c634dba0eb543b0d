"""Replays a recording through the model of CUDA's allocator: ``memory_allocated`` and ``memory_reserved`` over time.

In ``verify`` the replay begins with the blocks that outlive initialisation: building a model may use temporary memory, but the
user chooses where (GPU, host, meta device). A script has made that choice, so its recording counts from the start.

The replay adds cuBLAS's workspaces, which torch allocates once and keeps: one for the forward's thread and one for autograd's, at
their first matrix product, and as many for each further stream. Tensors made of Python numbers stay in host memory.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from zeroplan.allocator import CachingAllocator, CardFullError, Chunk
from zeroplan.ledger import Beside, Phase
from zeroplan.measurement import AllocatorMeasured, OnCardMeasured
from zeroplan.spec.hardware import SETTINGS
from zeroplan.verify.watching.recording import LIFTED, STILL_HELD, Block, Recording

#: Operators that run in cuBLAS.
MULTIPLICATIONS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.")
#: Forward and autograd run in different threads; each has a cuBLAS handle with a workspace.
_THREADS = 2
#: Tolerance of the search for the smallest room. [fraction of the allocated bytes]
_NEAR = 1 / 250


class Replay(NamedTuple):
    """The allocator's figures after every request and release. [bytes]

    ``taken`` is the allocated memory plus what CUDA graphs keep in their pools.
    """

    allocated: list[int]
    reserved: list[int]
    taken: list[int]


class Replays(NamedTuple):
    """A recording replayed with the allocator's default settings and with expandable segments."""

    default: Replay
    expandable_segments: Replay

    @classmethod
    def of(cls, recording: Recording, *, workspace_bytes: int) -> "Replays":
        """Replay a recording with both settings."""
        return cls(*(replay(recording, workspace_bytes=workspace_bytes, expandable_segments=how) for how in (False, True)))

    def measured(
        self, recording: Recording, *, workspace_bytes: int, room_bytes: int | None = None, least_room: bool = False
    ) -> tuple[AllocatorMeasured, ...]:  # fmt: skip
        """The allocator's figures for each setting.

        ``room_bytes`` adds a replay on a GPU with that much memory for it. ``least_room`` also searches for the smallest room
        in which the run succeeds, which needs some more replays.
        """
        start = _last_step(recording)
        found = []
        for settings, shown in zip(SETTINGS, self, strict=True):
            requests = _Requests(recording, workspace_bytes, expandable=settings == "expandable_segments")
            found.append(
                AllocatorMeasured(
                    settings=settings,
                    allocated_bytes=max(shown.allocated[start:]),
                    reserved_bytes=max(shown.reserved),
                    workspace_bytes=_THREADS * workspace_bytes,
                    card=None if room_bytes is None else requests.on_card(room_bytes),
                    least_room_bytes=requests.least_room(max(shown.allocated), max(shown.reserved)) if least_room else None,
                )
            )
        return tuple(found)


def replay(recording: Recording, *, workspace_bytes: int, expandable_segments: bool = False) -> Replay:
    """Replay a recording; the forward's thread and autograd's each allocate ``workspace_bytes``."""
    card = CachingAllocator(expandable_segments=expandable_segments)
    shown = Replay([0], [0], [0])
    for _ in _Requests(recording, workspace_bytes, expandable=expandable_segments).played(card):
        shown.allocated.append(card.allocated_bytes)
        shown.reserved.append(card.reserved_bytes)
        shown.taken.append(card.allocated_bytes + card.kept_bytes)
    return shown


class _Requests:
    """The requests of a recording, for one setting of the allocator."""

    def __init__(self, recording: Recording, workspace_bytes: int, *, expandable: bool) -> None:
        self._recording = recording
        self._workspace_bytes = workspace_bytes
        self._expandable = expandable
        self._events = _events(recording)
        self._multiply = _first_multiplications(recording)
        self._elsewhere = recording.workspaces or frozenset()
        self._counted_from = 0 if recording.from_the_start else next(span.start for span in recording.spans if span.step >= 0)
        self._emptied = frozenset(recording.emptied)
        self._let_go = pools_by_moment(recording.let_go)

    def played(self, card: CachingAllocator) -> Iterator[Block]:
        """Replay every request and release on a modelled GPU; yield the block after each."""
        chunks: dict[Block, Chunk] = {}
        for moment, (block, is_request) in enumerate(self._events):
            for pool in self._let_go.get(moment, ()):
                card.let_go(pool)
            if moment in self._emptied:
                card.release_cached()
            if block.born in self._multiply and is_request:
                card.request(self._workspace_bytes)
            if block.born in self._elsewhere and is_request:
                card.request(self._workspace_bytes, block.stream, block.pool)
            if is_request and block.operation != LIFTED and block.died > self._counted_from:
                chunks[block] = card.request(block.n_bytes, block.stream, block.pool)
            elif block in chunks:
                card.release(chunks.pop(block))
            yield block

    def on_card(self, room_bytes: int) -> OnCardMeasured:
        """The result on a GPU with ``room_bytes`` of memory for the allocator."""
        card = CachingAllocator(expandable_segments=self._expandable, room_bytes=room_bytes)
        last, done, before = _last_step(self._recording), 0, 0
        try:
            for done, _ in enumerate(self.played(card), 1):
                before = card.retries if done <= last else before
        except CardFullError:
            return OnCardMeasured(
                room_bytes=room_bytes, fits=False, reserved_bytes=card.highest_bytes, retries=card.retries,
                phase=next(span.phase.value for span in reversed(self._recording.spans) if span.start <= done),
            )  # fmt: skip
        return OnCardMeasured(
            room_bytes=room_bytes, fits=True, reserved_bytes=card.highest_bytes, retries=card.retries,
            retries_in_last_step=card.retries - before,
        )  # fmt: skip

    def least_room(self, allocated_bytes: int, reserved_bytes: int) -> int:
        """The smallest room in which the run succeeds, to 1/250 of the allocated bytes. [bytes]"""
        too_small, enough = allocated_bytes, reserved_bytes
        if self.on_card(too_small).fits:
            return too_small
        while enough - too_small > allocated_bytes * _NEAR:
            between = (too_small + enough) // 2
            too_small, enough = (too_small, between) if self.on_card(between).fits else (between, enough)
        return enough


def pools_by_moment(let_go: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    """The released private pools, by the moment after which no graph uses them.

    >>> pools_by_moment([(5, 1), (5, 2)])
    {5: [1, 2]}
    """
    found: dict[int, list[int]] = {}
    for moment, pool in let_go:
        found.setdefault(moment, []).append(pool)
    return found


def _last_step(recording: Recording) -> int:
    return next(span.start for span in recording.spans if span.step == recording.last_step)


def _events(recording: Recording) -> list[tuple[Block, bool]]:
    """Every request (True) and release, in order; one per moment."""
    events: list[tuple[int, Block, bool]] = [(block.born, block, True) for block in recording.blocks]
    events += [(block.died, block, False) for block in recording.blocks if block.died != STILL_HELD]
    events.sort(key=lambda event: event[0])
    return [(block, is_request) for _, block, is_request in events]


def _first_multiplications(recording: Recording) -> set[int]:
    """The moments of the first matrix product in forward and in backward; on the default stream if streams were recorded."""
    anywhere = recording.workspaces is None
    first: dict[Phase | Beside, int] = {}
    for block in recording.blocks:
        if block.operation.startswith(MULTIPLICATIONS) and (anywhere or not block.stream):
            first.setdefault(recording.spans[block.span].phase, block.born)
    return {moment for phase, moment in first.items() if phase in (Phase.FORWARD, Phase.BACKWARD)}
