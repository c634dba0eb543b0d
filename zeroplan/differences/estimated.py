"""Turns an estimate, or the JSON that ``zeroplan estimate --json`` printed, into a side of a comparison."""

from collections.abc import Mapping
from typing import cast

from zeroplan.advice import time_of
from zeroplan.comparison import phase_as_run
from zeroplan.differences.settings import settings_of
from zeroplan.differences.side import At, Held, Sent, Side
from zeroplan.errors import SpecError, ZeroplanError
from zeroplan.estimator import Estimate, judged
from zeroplan.ledger import Line, Moment, Phase
from zeroplan.spec.base import read
from zeroplan.spec.job import JobSpec
from zeroplan.units import format_size

_LARGEST = 10**18


def of_estimate(answer: Estimate, name: str = "") -> Side:
    """Return the side of an estimate, tensor by tensor."""
    time = time_of(answer.job)
    sent = tuple(
        Sent(call.operation, f"{call.what}, {call.when}", int(call.payload_bytes), int(call.sent_bytes))
        for call in answer.traffic.collectives
        if call.sent_bytes
    )
    return Side(
        name=name,
        is_a="estimate",
        grain="tensor",
        peak=_moment(answer.peak, answer),
        moments=tuple(_moment(moment, answer) for moment in answer.moments),
        held=_lines(answer.held),
        sent=sent,
        totals=_totals(answer),
        settings=settings_of(answer.job),
        job=answer.job,
        verdict=answer.verdict,
        tensors="cuda",
        step_s=None if time is None else float(time.seconds),
        tokens_per_s=None if time is None else float(time.tokens_per_s),
    )


def _totals(answer: Estimate) -> dict[str, int]:
    return {
        "held between steps": sum(int(line.n_bytes) for line in answer.held),
        "reserved by the allocator": int(answer.reserved.expected_bytes),
        "must fit": answer.least_bytes,
        "host memory": answer.host_bytes,
        "NVMe": answer.nvme_bytes,
        "sent per step": int(answer.traffic.total_bytes),
    }


def _moment(moment: Moment, answer: Estimate) -> At:
    phase = phase_as_run(moment, answer.job.recipe.loss).value
    return At(moment.name, phase, int(moment.total_bytes), _lines(moment.lines))


def _lines(lines: tuple[Line, ...]) -> tuple[Held, ...]:
    return tuple(Held(line.kind.value, line.reason, int(line.n_bytes)) for line in lines if line.n_bytes)


def of_answer(data: Mapping[str, object], where: str, name: str = "") -> Side:
    """Return the side of a printed answer. Raises SpecError, in one line, for other JSON and for contradictions.

    If this zeroplan estimates the same peak for the answer's job, it returns the side of that estimate, which has more details.
    """
    try:
        printed = _printed(data, where, name)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(
            f"{where} is not as `zeroplan estimate --json` prints it ({type(error).__name__}: {error!s:.60})"
        ) from None
    try:
        now = of_estimate(judged(cast("JobSpec", printed.job)), name)
    except ZeroplanError as error:
        return printed._replace(notes=(f"{name} is taken as printed: this zeroplan does not estimate its job ({error})",))
    if (now.peak.n_bytes, sorted(now.peak.lines)) == (printed.peak.n_bytes, sorted(printed.peak.lines)):
        return now
    there, here = format_size(printed.peak.n_bytes), format_size(now.peak.n_bytes)
    return printed._replace(
        notes=(f"{name} is taken as printed, with a peak of {there}; this zeroplan says {here} for its job",)
    )


def _printed(data: Mapping[str, object], where: str, name: str) -> Side:
    job = job_of_answer(data, where)
    peak = _dict(data["peak"])
    lines = tuple(
        Held(_text(line["kind"]), _text(line["reason"]), _count(line["bytes"])) for line in map(_dict, _list(peak["lines"]))
    )
    if sum(line.n_bytes for line in lines) != _count(peak["allocated_bytes"]):
        raise SpecError(f"{where} contradicts itself: the lines of its peak do not add up to the peak")
    sent = tuple(_collective(one) for one in map(_dict, _list(_dict(data["communication"])["collectives"])))
    totals = {"sent per step": sum(one.sent_bytes or 0 for one in sent)}
    for key, total in (("host_bytes", "host memory"), ("nvme_bytes", "NVMe")):
        totals[total] = _count(data[key])
    totals["reserved by the allocator"] = _count(_dict(data["reserved"])["expected_bytes"])
    return Side(
        name=name,
        is_a="estimate",
        grain="tensor",
        peak=_at(peak)._replace(lines=lines),
        moments=tuple(_at(moment) for moment in map(_dict, _list(data["moments"]))),
        sent=sent,
        totals=totals,
        settings=settings_of(job),
        job=job,
        verdict=_text(data["verdict"]),
        tensors="cuda",
    )


def job_of_answer(data: Mapping[str, object], where: str) -> JobSpec:
    """Return the job of a printed answer."""
    return read(JobSpec, _dict(data["job"]), where=where)


def _at(moment: Mapping[str, object]) -> At:
    name, phase = _text(moment["moment"]), _text(moment["phase"])
    if phase == Phase.LOSS.value:
        phase = (Phase.FORWARD if "forward" in name else Phase.BACKWARD).value
    return At(name, phase, _count(moment["allocated_bytes"]))


def _collective(call: Mapping[str, object]) -> Sent:
    what = f"{_text(call['what'])}, {_text(call['when'])}"
    payload = _count(call["calls"]) * _count(call["bytes_per_call"])
    return Sent(_text(call["operation"]), what, payload, _count(call["sent_bytes"]))


def _dict(value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise TypeError(f"a {type(value).__name__} where keys and values should be")
    return value


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise TypeError(f"a {type(value).__name__} where a list should be")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} where a text should be")
    return value


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"a {type(value).__name__} where a whole number should be")
    if not 0 <= value <= _LARGEST:
        raise ValueError("a number that no memory has")
    return value
