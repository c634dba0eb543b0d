"""The collectives of one step, as a record has them."""

from collections import Counter, defaultdict

from zeroplan.measurement import CollectiveMeasured
from zeroplan.verify.watching.group import Transport
from zeroplan.verify.watching.log import Log

_FAKE = "the process group is torch's fake one: collectives move no data, and this process is the only one"


def collectives_of_step(log: Log, step: int) -> tuple[CollectiveMeasured, ...]:
    """Calls of one step, alike ones together; what one rank says to itself is left out."""
    beginning = f"{step}:"
    calls: Counter[tuple[str, str, str, int]] = Counter()
    n_bytes: Counter[tuple[str, str, str, int]] = Counter()
    seconds: defaultdict[tuple[str, str, str, int], list[float | None]] = defaultdict(list)
    for call in log.calls:
        if call.phase.startswith(beginning) and call.group > 1:
            key = (call.operation, call.dtype, call.phase.removeprefix(beginning), call.group)
            calls[key] += 1
            n_bytes[key] += call.n_bytes
            seconds[key].append(call.seconds)
    return tuple(
        CollectiveMeasured(operation=key[0], dtype=key[1], phase=key[2], group=key[3], calls=count, n_bytes=n_bytes[key],
                           seconds=_sum(seconds[key]))
        for key, count in calls.items()
    )  # fmt: skip


def _sum(seconds: list[float | None]) -> float | None:
    known = [one for one in seconds if one is not None]
    return sum(known) if len(known) == len(seconds) else None


def only_one_process(transport: Transport) -> tuple[str, ...]:
    """What must be said of a run under the fake process group."""
    return (_FAKE,) if transport == "fake" else ()
