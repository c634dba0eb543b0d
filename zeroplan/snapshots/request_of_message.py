"""Which request of a job's step failed, according to torch's out-of-memory message?

The allocator's model replays the step with the message's memory. If the replay fails at a request of the message's size, with the
message's allocated bytes, that is the request. Otherwise the run differed from the job, and the best match is the request of that
size before which the allocated bytes are nearest to the message's.
"""

from itertools import accumulate
from typing import NamedTuple

from zeroplan.allocator import counted_bytes, segment_bytes
from zeroplan.engines.requests import not_written
from zeroplan.engines.requests.log import Log
from zeroplan.estimator import Estimate
from zeroplan.ledger import Kind, bytes_by_kind
from zeroplan.replay import Full, StepReplay, module_of
from zeroplan.snapshots.message import Message, as_torch_prints
from zeroplan.spec.hardware import SETTINGS
from zeroplan.units import GIB, MIB


class Found(NamedTuple):
    """A request of the step: its purpose, its place in the step, and the bytes alive before it. [bytes]"""

    kind: str
    reason: str
    step: int
    """The step's number from 0; -1 before the first step."""
    phase: str
    module: str
    n_bytes: int
    live_bytes: int
    replayed: bool
    """Whether the replay fails at this request."""


def request_of(message: Message, answer: Estimate) -> Found | None:
    """Return the failed request; None if no request has the message's size or zeroplan does not know the job's requests."""
    if not_written(answer.job):
        return None
    replay = _replay_of(answer)
    if full := _replayed(message, replay):
        return _found(replay.log, full.at, _alive(replay.log, answer)[full.at], replayed=True)
    return _nearest(message, replay.log, answer)


def nearest_request(message: Message, answer: Estimate) -> Found | None:
    """Return the request of the message's size with the nearest allocated bytes, without a replay; None if there is none."""
    return None if not_written(answer.job) else _nearest(message, _replay_of(answer).log, answer)


def _replay_of(answer: Estimate) -> StepReplay:
    return StepReplay(answer.job, pipeline_rank=answer.pipeline[0].rank if answer.pipeline else None)


def _nearest(message: Message, log: Log, answer: Estimate) -> Found | None:
    alike = [at for at, event in enumerate(log.events) if event >= 0 and _printed(log, at) == message.tried_text]
    if not alike:
        return None
    alive = _alive(log, answer)
    nearest = min(alike, key=lambda at: abs(alive[at] - message.allocated_bytes))
    return _found(log, nearest, alive[nearest], replayed=False)


def _replayed(message: Message, replay: StepReplay) -> Full | None:
    """Return the request at which a replay fails like the message; None if no replay does."""
    room = message.reserved_bytes + message.free_bytes
    for settings in SETTINGS:
        for off in _OFF_MIB:
            full = replay.full_at(room + off * MIB, settings)
            if full is not None and _printed(replay.log, full.at) == message.tried_text and _is_as_full(full, message):
                return full
    return None


_OFF_MIB = (0, -4, 4, -8, 8, -12, 12, -16, 16)
"""The room is the sum of three figures of the message, each rounded to two digits: up to 5 MiB off each if in GiB."""
_ROUNDED = 0.006
"""The rounding error of a figure of the message; reserved memory is the sum of two figures. [GiB or MiB]"""


def _is_as_full(full: Full, message: Message) -> bool:
    """Whether allocated and reserved bytes equal the message's, within its rounding."""
    pairs = ((full.allocated_bytes, message.allocated_bytes), (full.reserved_bytes, message.reserved_bytes))
    return all(
        abs(one - other) <= _ROUNDED * (GIB if other >= GIB else MIB) * digits for digits, (one, other) in enumerate(pairs, 1)
    )


def _alive(log: Log, answer: Estimate) -> list[int]:
    """Return the bytes alive before each deed of the log, workspaces included."""
    beside = int(bytes_by_kind(answer.peak.lines).get(Kind.WORKSPACE, 0))
    sizes = [one.n_bytes for one in log.requests]
    changes = (sizes[event] if event >= 0 else -sizes[-1 - event] for event in log.events)
    return list(accumulate(changes, initial=beside))


def _printed(log: Log, at: int) -> str:
    """Return the size that torch would print if this request failed; empty for a release."""
    event = log.events[at]
    return as_torch_prints(segment_bytes(counted_bytes(log.requests[event].n_bytes))) if event >= 0 else ""


def _found(log: Log, at: int, live: int, *, replayed: bool) -> Found:
    one = log.requests[log.events[at]]
    span = [span for span in log.spans if span.start <= at][-1]
    return Found(one.kind.value, one.reason, span.step, span.phase.value, module_of(one.layer), one.n_bytes, live, replayed)
