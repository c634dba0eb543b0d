"""A recording replayed through the model of CUDA's allocator: what ``memory_allocated`` and ``memory_reserved`` would show.

The card of ``verify`` is empty before the first step but for what initialisation leaves there: how a model is built (whole on the
card, on the host, on the meta device) is the user's choice, and what it takes for a while is counted apart from the steps. A script
has made that choice: its recording counts from the start.

To the tensors come cuBLAS's workspaces, which torch takes from the same allocator and keeps: one when the forward pass first
multiplies matrices, one when autograd's thread does, and as many for each further stream. Python
numbers that became tensors stay in host memory.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from zeroplan.allocator import CachingAllocator, CardFullError, Chunk
from zeroplan.ledger import Beside, Phase
from zeroplan.measurement import SETTINGS, AllocatorMeasured, OnCardMeasured
from zeroplan.verify.watching.recording import LIFTED, STILL_HELD, Block, Recording

#: Operators that run in cuBLAS.
MULTIPLICATIONS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.")
#: The forward pass runs in one thread, autograd in another, and each has a handle of cuBLAS with a workspace.
_THREADS = 2
#: How near the smallest room is looked for. [fraction of what is allocated]
_NEAR = 1 / 250


class Replay(NamedTuple):
    """What the allocator would show after every request and release.

    ``taken`` is what is allocated and what CUDA graphs keep beside it in their pools. [bytes]
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
        """Replay a recording twice."""
        return cls(*(replay(recording, workspace_bytes=workspace_bytes, expandable_segments=how) for how in (False, True)))

    def measured(
        self, recording: Recording, *, workspace_bytes: int, room_bytes: int | None = None, least_room: bool = False
    ) -> tuple[AllocatorMeasured, ...]:  # fmt: skip
        """What the allocator shows in the end.

        With ``room_bytes``, what came of it on a card that has so much for the allocator; with ``least_room``, in how little the
        run goes through, which takes some more replays.
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
    """Replay a recording; the thread of the forward pass and autograd's take a workspace of ``workspace_bytes`` each."""
    card = CachingAllocator(expandable_segments=expandable_segments)
    shown = Replay([0], [0], [0])
    for _ in _Requests(recording, workspace_bytes, expandable=expandable_segments).played(card):
        shown.allocated.append(card.allocated_bytes)
        shown.reserved.append(card.reserved_bytes)
        shown.taken.append(card.allocated_bytes + card.kept_bytes)
    return shown


class _Requests:
    """What a recording asks of the allocator, with some settings of it."""

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
        """Make every request of a card and give back what is released; yields after each, in order."""
        chunks: dict[Block, Chunk] = {}
        for moment, (block, asked) in enumerate(self._events):
            for pool in self._let_go.get(moment, ()):
                card.let_go(pool)
            if moment in self._emptied:
                card.release_cached()
            if block.born in self._multiply and asked:
                card.request(self._workspace_bytes)
            if block.born in self._elsewhere and asked:
                card.request(self._workspace_bytes, block.stream, block.pool)
            if asked and block.operation != LIFTED and block.died > self._counted_from:
                chunks[block] = card.request(block.n_bytes, block.stream, block.pool)
            elif block in chunks:
                card.release(chunks.pop(block))
            yield block

    def on_card(self, room_bytes: int) -> OnCardMeasured:
        """What comes of it on a card that has so much for the allocator."""
        card = CachingAllocator(expandable_segments=self._expandable, room_bytes=room_bytes)
        last, done, before = _last_step(self._recording), 0, 0
        try:
            for done, _ in enumerate(self.played(card), 1):
                before = card.retries if done <= last else before
        except CardFullError:
            return OnCardMeasured(
                room_bytes=room_bytes, fits=False, reserved_bytes=card.highest_bytes, retries=card.retries,
                phase=_phase_at(self._recording, done + 1),
            )  # fmt: skip
        return OnCardMeasured(
            room_bytes=room_bytes, fits=True, reserved_bytes=card.highest_bytes, retries=card.retries,
            retries_in_last_step=card.retries - before,
        )  # fmt: skip

    def least_room(self, allocated_bytes: int, reserved_bytes: int) -> int:
        """The smallest room in which it goes through, to a 250th of what is allocated at most. [bytes]"""
        too_small, enough = allocated_bytes, reserved_bytes
        if self.on_card(too_small).fits:
            return too_small
        while enough - too_small > allocated_bytes * _NEAR:
            between = (too_small + enough) // 2
            too_small, enough = (too_small, between) if self.on_card(between).fits else (between, enough)
        return enough


def pools_by_moment(let_go: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    """Private pools that were let go of, by the moment after which.

    >>> pools_by_moment([(5, 1), (5, 2)])
    {5: [1, 2]}
    """
    found: dict[int, list[int]] = {}
    for moment, pool in let_go:
        found.setdefault(moment, []).append(pool)
    return found


def _last_step(recording: Recording) -> int:
    """When the last step begins, in requests and releases."""
    last = max(span.step for span in recording.spans if span.phase is Phase.STEP)
    return next(span.start for span in recording.spans if span.step == last)


def _phase_at(recording: Recording, moment: int) -> str:
    """The phase of a moment."""
    return next(span.phase.value for span in reversed(recording.spans) if span.start < moment)


def _events(recording: Recording) -> list[tuple[Block, bool]]:
    """Every request (True) and release, in order; one per moment, beginning with the first."""
    events: list[tuple[int, Block, bool]] = [(block.born, block, True) for block in recording.blocks]
    events += [(block.died, block, False) for block in recording.blocks if block.died != STILL_HELD]
    events.sort(key=lambda event: event[0])
    return [(block, asked) for _, block, asked in events]


def _first_multiplications(recording: Recording) -> set[int]:
    """When the forward pass and autograd first multiply matrices; on the default stream alone where the others are known."""
    anywhere = recording.workspaces is None
    first: dict[Phase | Beside, int] = {}
    for block in recording.blocks:
        if block.operation.startswith(MULTIPLICATIONS) and (anywhere or not block.stream):
            first.setdefault(recording.spans[block.span].phase, block.born)
    return {moment for phase, moment in first.items() if phase in (Phase.FORWARD, Phase.BACKWARD)}
