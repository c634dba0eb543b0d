"""What held the memory at a snapshot's peak, or when the GPU ran out of memory? Start at :func:`diagnose`."""

from collections import Counter
from typing import NamedTuple

from zeroplan.snapshots.kinds import Part, sorted_into_kinds
from zeroplan.snapshots.lives import Life, Lives, alive, lives_of
from zeroplan.snapshots.reading import Frame, Snapshot
from zeroplan.snapshots.replayed import Replayed, replayed

_SITES = 3
_NOT_THE_USERS = ("/torch/", "torch/", "site-packages/transformers/integrations", "/einops/", "opt_einsum")


class Site(NamedTuple):
    """A place in a program, and the bytes in use that it requested. [bytes]"""

    where: str
    n_bytes: int


class Held(NamedTuple):
    """The bytes in use of one kind, and the places that requested most of them. [bytes]"""

    kind: str
    n_bytes: int
    sites: tuple[Site, ...]


class Failure(NamedTuple):
    """A failed request. [bytes]

    ``free_bytes``: free memory of the driver; ``idle_bytes``: reserved memory that was not in use.
    """

    asked_bytes: int
    free_bytes: int
    idle_bytes: int
    where: str

    def fragmented(self, largest_free_bytes: int) -> bool:
        """Whether there was enough free memory for the request, but not in one piece."""
        return self.idle_bytes + self.free_bytes >= self.asked_bytes > largest_free_bytes


class Diagnosis(NamedTuple):
    """The bytes in use by kind at a snapshot's failed request or peak, the largest first. [bytes]"""

    device: int
    events: int
    before_bytes: int
    """Bytes in use at the start of the history."""
    live_bytes: int
    reserved_bytes: int
    largest_free_bytes: int
    part: str
    """The part of the training loop at that moment."""
    held: tuple[Held, ...]
    failure: Failure | None
    replayed: Replayed | None
    """A replay of the requests through the allocator's model; None if segments were already expandable."""
    with_stacks: bool


def diagnose(snapshot: Snapshot) -> Diagnosis:
    """The diagnosis at the last failed request, or else at the peak."""
    lives = lives_of(snapshot)
    found = sorted_into_kinds(snapshot, lives)
    at, failure = moment_of(snapshot, lives)
    kinds = dict(zip(lives.blocks, found.kinds, strict=True))
    return Diagnosis(
        device=snapshot.device,
        events=len(snapshot.events),
        before_bytes=lives.live_bytes[0],
        live_bytes=lives.live_bytes[at + 1],
        reserved_bytes=snapshot.reserved_bytes,
        largest_free_bytes=snapshot.largest_free_bytes,
        part=(found.parts[at] if at >= 0 else Part.OTHER).value,
        held=_held(alive(lives, at), kinds),
        failure=failure,
        replayed=None if snapshot.expandable_segments else replayed(snapshot, lives),
        with_stacks=any(event.stack for event in snapshot.events) or any(block.stack for block in snapshot.standing),
    )


def moment_of(snapshot: Snapshot, lives: Lives) -> tuple[int, Failure | None]:
    """The index of the last failed request and the failure, or of the event after which most bytes were in use."""
    failed = [at for at, event in enumerate(snapshot.events) if event.action == "out of memory"]
    if not failed:
        return lives.live_bytes.index(max(lives.live_bytes)) - 1, None
    at = failed[-1]
    event, in_use = snapshot.events[at], lives.live_bytes[at + 1]
    idle = max(0, snapshot.reserved_bytes - in_use)
    return at, Failure(event.n_bytes, event.address, idle, place(event.stack))


def _held(lives: list[Life], kinds: dict[Life, str]) -> tuple[Held, ...]:
    totals: Counter[str] = Counter()
    sites: dict[str, Counter[str]] = {}
    for life in lives:
        kind = kinds[life]
        totals[kind] += life.n_bytes
        sites.setdefault(kind, Counter())[place(life.stack)] += life.n_bytes
    return tuple(
        Held(kind, n_bytes, tuple(Site(*one) for one in sites[kind].most_common(_SITES) if one[0]))
        for kind, n_bytes in totals.most_common()
    )


def place(stack: tuple[Frame, ...]) -> str:
    """The innermost line outside torch; else autograd's operator, else torch's line, else empty.

    >>> place((Frame("/lib/torch/nn/functional.py", "silu", 9), Frame("/home/me/model.py", "forward", 12)))
    'model.py:12 forward'
    """
    python = [frame for frame in stack if frame.file.endswith(".py")]
    users = next((frame for frame in python if not any(part in frame.file for part in _NOT_THE_USERS)), None)
    operator = next((frame.name for frame in stack if "Backward" in frame.name and "generated::" in frame.name), "")
    if users is not None:
        return _line(users)
    if operator:
        return operator.partition("generated::")[2].partition("::")[0]
    return _line(python[0]) if python else ""


def _line(frame: Frame) -> str:
    return f"{frame.file.replace(chr(92), '/').rsplit('/', 1)[-1]}:{frame.line} {frame.name}"
