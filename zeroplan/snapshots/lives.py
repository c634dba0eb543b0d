"""When was each block of a snapshot allocated and freed, and how many bytes were in use after each event?

A snapshot's history may lack its beginning, but contains the blocks in use at its end. So this file walks the events backwards.
"""

from typing import NamedTuple

from zeroplan.script_trace import live_bytes
from zeroplan.snapshots.reading import Snapshot, Stack

BEFORE = -1
"""``born`` of a block that is older than the history."""


class Life(NamedTuple):
    """A block with the indices of its request and release; ``BEFORE`` and the number of events if they are not in the history."""

    address: int
    n_bytes: int
    born: int
    died: int
    stack: Stack
    """The stack of its request; empty if unknown."""


class Lives(NamedTuple):
    """All blocks, and the bytes in use before the first event and after each. [bytes]"""

    blocks: tuple[Life, ...]
    live_bytes: tuple[int, ...]
    """One more entry than events: the first is before all events."""


def lives_of(snapshot: Snapshot) -> Lives:
    """The lives of all blocks of a snapshot."""
    blocks: list[Life] = []
    over = len(snapshot.events)
    alive = {block.address: (over, block.n_bytes, block.stack) for block in snapshot.standing}
    for at in range(over - 1, -1, -1):
        event = snapshot.events[at]
        if event.action == "requested":
            died, _, _ = alive.pop(event.address, (at + 1, 0, ()))  # the history lacks its release
            blocks.append(Life(event.address, event.n_bytes, at, died, event.stack))
        elif event.action == "released":
            alive[event.address] = (at, event.n_bytes, ())
    blocks += (Life(address, n_bytes, BEFORE, died, stack) for address, (died, n_bytes, stack) in alive.items())
    blocks.sort(key=lambda life: life.born)
    columns = ([life.n_bytes for life in blocks], [life.born + 1 for life in blocks], [life.died + 1 for life in blocks])
    return Lives(tuple(blocks), tuple(live_bytes(over, *columns)))


def alive(lives: Lives, at: int) -> list[Life]:
    """The blocks in use after an event; with ``BEFORE``, before the first."""
    return [life for life in lives.blocks if life.born <= at < life.died]
