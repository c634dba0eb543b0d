"""The collectives of one step, as a record has them: alike ones together."""

from collections import defaultdict
from collections.abc import Iterable

from zeroplan.measurement import CollectiveMeasured
from zeroplan.verify.task import Transport
from zeroplan.verify.watching.log import Call, Log

_FAKE = "the process group is torch's fake one: collectives move no data, and this process is the only one"


def collectives_of_step(log: Log, step: int) -> tuple[CollectiveMeasured, ...]:
    """Calls of one step; what one rank says to itself is left out."""
    beginning = f"{step}:"
    return summed(
        call._replace(phase=call.phase.removeprefix(beginning))
        for call in log.calls
        if call.phase.startswith(beginning) and call.group > 1
    )


def summed(calls: Iterable[Call]) -> tuple[CollectiveMeasured, ...]:
    """Calls of one step, by operation, dtype, phase and group."""
    alike: defaultdict[tuple[str, str, str, int], list[Call]] = defaultdict(list)
    for call in calls:
        alike[call.operation, call.dtype, call.phase, call.group].append(call)
    return tuple(
        CollectiveMeasured(operation=operation, dtype=dtype, phase=phase, group=group, calls=len(those),
                           n_bytes=sum(one.n_bytes for one in those), seconds=_sum([one.seconds for one in those]))
        for (operation, dtype, phase, group), those in alike.items()
    )  # fmt: skip


def _sum(seconds: list[float | None]) -> float | None:
    known = [one for one in seconds if one is not None]
    return sum(known) if len(known) == len(seconds) else None


def only_one_process(transport: Transport) -> tuple[str, ...]:
    """What must be said of a run under the fake process group."""
    return (_FAKE,) if transport == "fake" else ()
