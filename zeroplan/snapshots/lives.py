"""Follows every block of a snapshot from its request to its release, and counts the bytes in use at each event.

The history may have begun late or lost its beginning. The blocks at the end are known, so they are traced backwards: before its
request a block did not exist, before its release it did.
"""

from typing import NamedTuple

from zeroplan.script_trace import live_bytes
from zeroplan.snapshots.reading import Snapshot, Stack

BEFORE = -1
"""``born`` of a block from before the history."""


class Life(NamedTuple):
    """A block, with the events of its request and its release; ``BEFORE`` and the number of events if they are missing."""

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
    """One more entry than events: the first is before them."""


def lives_of(snapshot: Snapshot) -> Lives:
    """The lives of all blocks of a snapshot."""
    blocks: list[Life] = []
    over = len(snapshot.events)
    alive = {block.address: (over, block.n_bytes, block.stack) for block in snapshot.standing}
    for at in range(over - 1, -1, -1):
        event = snapshot.events[at]
        if event.action == "requested":
            died, _, _ = alive.pop(event.address, (at + 1, 0, ()))  # its release is missing in the history
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
