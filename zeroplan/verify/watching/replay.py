"""A recording replayed through the model of CUDA's allocator: what ``memory_allocated`` and ``memory_reserved`` would show.

The card is empty before the first step but for what initialisation leaves there: how a model is built (whole on the card, on the
host, on the meta device) is the user's choice, and what it takes for a while is told apart from the steps.

To the tensors come cuBLAS's workspaces, which torch takes from the same allocator and keeps: one when the forward pass first
multiplies matrices, one when autograd's thread does. Python numbers that became tensors stay in host memory.
"""

from typing import NamedTuple

from zeroplan.allocator import CachingAllocator, Chunk
from zeroplan.ledger import Phase
from zeroplan.measurement import SETTINGS, AllocatorMeasured
from zeroplan.verify.watching.recording import LIFTED, STILL_HELD, Block, Recording

#: Operators that run in cuBLAS.
_MULTIPLICATIONS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.")


#: The forward pass runs in one thread, autograd in another, and each has a handle of cuBLAS with a workspace.
_THREADS = 2


class Replay(NamedTuple):
    """What the allocator would show after every request and release. [bytes]"""

    allocated: list[int]
    reserved: list[int]


class Replays(NamedTuple):
    """A recording replayed with the allocator's default settings and with expandable segments."""

    default: Replay
    expandable_segments: Replay

    @classmethod
    def of(cls, recording: Recording, *, workspace_bytes: int) -> "Replays":
        """Replay a recording twice."""
        return cls(*(replay(recording, workspace_bytes=workspace_bytes, expandable_segments=how) for how in (False, True)))

    def measured(self, recording: Recording, *, workspace_bytes: int) -> tuple[AllocatorMeasured, ...]:
        """What the allocator shows in the end."""
        last = max(span.step for span in recording.spans if span.phase is Phase.STEP)
        start = next(span.start for span in recording.spans if span.step == last)
        return tuple(
            AllocatorMeasured(
                settings=settings,
                allocated_bytes=max(shown.allocated[start:]),
                reserved_bytes=shown.reserved[-1],
                workspace_bytes=_THREADS * workspace_bytes,
            )
            for settings, shown in zip(SETTINGS, self, strict=True)
        )


def replay(recording: Recording, *, workspace_bytes: int, expandable_segments: bool = False) -> Replay:
    """Replay a recording; the thread of the forward pass and autograd's take a workspace of ``workspace_bytes`` each."""
    card = CachingAllocator(expandable_segments=expandable_segments)
    first = _first_multiplications(recording)
    steps_begin = next(span.start for span in recording.spans if span.step >= 0)
    chunks: dict[Block, Chunk] = {}
    shown = Replay([0], [0])
    for block, asked in _events(recording):
        if block.born in first and asked:
            card.request(workspace_bytes)
        if asked and block.operation != LIFTED and block.died > steps_begin:
            chunks[block] = card.request(block.n_bytes, block.stream)
        elif block in chunks:
            card.release(chunks.pop(block))
        shown.allocated.append(card.allocated_bytes)
        shown.reserved.append(card.reserved_bytes)
    return shown


def _events(recording: Recording) -> list[tuple[Block, bool]]:
    """Every request (True) and release, in order; one per moment, beginning with the first."""
    events: list[tuple[int, Block, bool]] = [(block.born, block, True) for block in recording.blocks]
    events += [(block.died, block, False) for block in recording.blocks if block.died != STILL_HELD]
    events.sort(key=lambda event: event[0])
    return [(block, asked) for _, block, asked in events]


def _first_multiplications(recording: Recording) -> set[int]:
    """When the forward pass and autograd first multiply matrices."""
    first: dict[Phase, int] = {}
    for block in recording.blocks:
        if block.operation.startswith(_MULTIPLICATIONS):
            first.setdefault(recording.spans[block.span].phase, block.born)
    return {moment for phase, moment in first.items() if phase in (Phase.FORWARD, Phase.BACKWARD)}
