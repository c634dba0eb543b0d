"""Sums equal collectives of one step, as records list them."""

from collections import defaultdict
from collections.abc import Iterable

from zeroplan.measurement import CollectiveMeasured
from zeroplan.verify.task import Transport
from zeroplan.verify.watching.log import Call, Log

_FAKE = "the process group is torch's fake one: collectives move no data, and there is only this process"


def collectives_of_step(log: Log, step: int) -> tuple[CollectiveMeasured, ...]:
    """The summed collectives of one step, without those of groups of one rank."""
    beginning = f"{step}:"
    return summed(
        call._replace(phase=call.phase.removeprefix(beginning))
        for call in log.calls
        if call.phase.startswith(beginning) and call.group > 1
    )


def summed(calls: Iterable[Call]) -> tuple[CollectiveMeasured, ...]:
    """Calls of one step, summed by operation, dtype, phase and group."""
    alike: defaultdict[tuple[str, str, str, int], list[Call]] = defaultdict(list)
    for call in calls:
        alike[call.operation, call.dtype, call.phase, call.group].append(call)
    return tuple(
        CollectiveMeasured(operation=operation, dtype=dtype, phase=phase, group=group, calls=len(same),
                           n_bytes=sum(one.n_bytes for one in same), seconds=_sum([one.seconds for one in same]))
        for (operation, dtype, phase, group), same in alike.items()
    )  # fmt: skip


def _sum(seconds: list[float | None]) -> float | None:
    known = [one for one in seconds if one is not None]
    return sum(known) if len(known) == len(seconds) else None


def only_one_process(transport: Transport) -> tuple[str, ...]:
    """The remark for a run under the fake process group; empty for other transports."""
    return (_FAKE,) if transport == "fake" else ()
