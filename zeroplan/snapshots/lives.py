"""Every block of a snapshot from its request to its release, and what was in use at each event.

The history may have begun late, or forgotten its beginning. What stood in the end is known, so the account is made backwards:
before a request a block was not there, before a release it was.
"""

from typing import NamedTuple

from zeroplan.snapshots.reading import Snapshot, Stack

BEFORE = -1
"""Born before the history begins."""


class Life(NamedTuple):
    """A block: the events at which it was asked for and released; ``BEFORE`` and the number of events where they are not there."""

    address: int
    n_bytes: int
    born: int
    died: int
    stack: Stack
    """Where it was asked for; empty where nobody noted it."""


class Lives(NamedTuple):
    """All blocks, and the bytes that were in use after each event, that before the first among them."""

    blocks: tuple[Life, ...]
    live_bytes: tuple[int, ...]
    """One more than there are events: the first is what was in use before."""


def lives_of(snapshot: Snapshot) -> Lives:
    """Follow every block."""
    blocks: list[Life] = []
    over = len(snapshot.events)
    alive = {block.address: (over, block.n_bytes, block.stack) for block in snapshot.standing}
    for at in range(over - 1, -1, -1):
        event = snapshot.events[at]
        if event.action == "asked":
            died, _, _ = alive.pop(event.address, (at + 1, 0, ()))  # its release fell out of the history
            blocks.append(Life(event.address, event.n_bytes, at, died, event.stack))
        elif event.action == "released":
            alive[event.address] = (at, event.n_bytes, ())
    blocks += (Life(address, n_bytes, BEFORE, died, stack) for address, (died, n_bytes, stack) in alive.items())
    blocks.sort(key=lambda life: life.born)
    return Lives(tuple(blocks), _live_bytes(blocks, over))


def _live_bytes(blocks: list[Life], events: int) -> tuple[int, ...]:
    changes = [0] * (events + 2)
    for life in blocks:
        changes[life.born + 1] += life.n_bytes
        changes[life.died + 1] -= life.n_bytes
    live, total = [], 0
    for change in changes[: events + 1]:
        total += change
        live.append(total)
    return tuple(live)


def alive(lives: Lives, at: int) -> list[Life]:
    """What was in use after an event, or with ``BEFORE`` before the first."""
    return [life for life in lives.blocks if life.born <= at < life.died]
