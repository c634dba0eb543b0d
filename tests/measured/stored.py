"""Stores records of the matrix in a small file, one per line.

The first line is a whole record. Each other line has only the values in which its record differs from the first. A line merged
into the first is an ordinary record (:class:`zeroplan.measurement.Measurement`) of the last step, and of the first if that is
higher, so that no default of a later version changes what an old line means. Needs no torch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pydantic import TypeAdapter

from zeroplan.measurement import Environment, Measurement, StepMeasured
from zeroplan.spec.base import read
from zeroplan.spec.job import JobSpec
from zeroplan.whole import write_whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

FOLDER = Path(__file__).parent
RECORDS, REFUSED = FOLDER / "matrix.jsonl", FOLDER / "refused.jsonl"
FRESH, PEERS, OPTIONS = FOLDER / "fresh.jsonl", FOLDER / "peers.jsonl", FOLDER / "options.jsonl"
OPTIONS_TORCH, OPTIONS_DEEPSPEED = FOLDER / "options_torch.jsonl", FOLDER / "options_deepspeed.jsonl"
FSDP1 = FOLDER / "fsdp1.jsonl"
#: Of DeepSpeed's stage 3, with the first micro-batch as the highest.
STAGE3_FIRST = FOLDER / "stage3_first.jsonl"
#: Of Megatron-Core.
MEGATRON = FOLDER / "megatron.jsonl"
#: Over options, optimizers and few ranks, engine by engine.
VARIED = tuple(path for path in (OPTIONS_TORCH, OPTIONS_DEEPSPEED, FSDP1) if path.exists())
#: All that were taken under the versions of ``constraints.txt``.
SAMPLES = (RECORDS, FRESH, OPTIONS, *VARIED)
#: Whose replay also says in how little room the allocator goes through.
ROOMS = FOLDER / "rooms.jsonl"
#: Of other versions than those that all others were taken under.
VERSIONS = FOLDER / "versions.jsonl"

Json = dict[str, object]
#: Texts without a default, left empty where they would name a machine.
_REQUIRED = ("python", "platform")


class Refusal(NamedTuple):
    """A job that could not be measured, and the reason in one line."""

    job: JobSpec
    reason: str


def small(measured: Measurement) -> Measurement:
    """Return a record of the last step, with kinds only at the peak, and without what all share or where it ran.

    The first step stays if it is higher.
    """
    begun, steady = measured.steps[0], measured.steady
    steps = (begun, steady) if begun.peak.peak_bytes > steady.peak.peak_bytes else (steady,)
    first, early = measured.initialisation, measured.first_micro_batches
    packages = {name: version for name, version in measured.environment.packages.items() if name != "zeroplan"}
    return replace(
        measured,
        environment=Environment(python="", platform="", packages=packages),
        initialisation=None if first is None else replace(first, kinds={}),
        first_micro_batches=None if early is None else replace(early, kinds={}, counted_bytes=None),
        steps=tuple(map(_small_step, steps)),
        remarks=tuple(remark for remark in measured.remarks if remark.startswith("few layers")),
    )


def _small_step(step: StepMeasured) -> StepMeasured:
    phases = (replace(phase, kinds=phase.kinds if phase == step.peak else {}, counted_bytes=None) for phase in step.phases)
    return replace(step, phases=tuple(phases))


def without_courses(measured: Measurement) -> Measurement:
    """Return a record without the figures of each block, which only pictures need."""
    steps = (replace(step, phases=tuple(replace(phase, course=None) for phase in step.phases)) for step in measured.steps)
    return replace(measured, steps=tuple(steps))


def records(path: Path = RECORDS) -> list[Measurement]:
    """Return all records of a file; none if the file does not exist."""
    adapter = TypeAdapter(Measurement)
    return [adapter.validate_json(json.dumps(line)) for line in _lines(path)]


def refusals(path: Path = REFUSED) -> list[Refusal]:
    """Return the jobs that could not be measured."""
    return [Refusal(read(JobSpec, line["job"], where=str(path)), str(line["reason"])) for line in _lines(path)]  # type: ignore[arg-type]


def keep(measured: Measurement, path: Path = RECORDS) -> None:
    """Append a record; the first one is written in full."""
    _append(_plain(asdict(measured)), path)


def keep_refusal(job: JobSpec, reason: str, path: Path = REFUSED) -> None:
    """Append a job that could not be measured."""
    _append({"job": _plain(asdict(job)), "reason": reason}, path)


def sort(path: Path, jobs: Iterable[JobSpec]) -> None:
    """Sort records as in the sample, so that two runs differ only in changed lines."""
    order = {job: number for number, job in enumerate(jobs)}
    kept = sorted(_lines(path), key=lambda line: order.get(_job(line), len(order)))
    if kept:
        write_whole(path, _text(kept), force=True)


def _job(line: Json) -> JobSpec:
    return read(JobSpec, line["job"], where="a stored job")  # type: ignore[arg-type]


def _append(full: Json, path: Path) -> None:
    before = list(_lines(path))
    written = _text([*before, full]).splitlines(keepends=True)[len(before) :]
    with path.open("a", encoding="utf-8") as file:
        file.writelines(written)


def _text(lines: list[Json]) -> str:
    """Return a file's lines: what differs from the first line and, in the model, from the first line with the same name."""
    models: dict[str, Json] = {}
    written = []
    for line in lines:
        name = line["job"]["model"]["name"]
        written.append({"of": name, **difference(_base(lines[0], models, name), line)} if written else line)
        models.setdefault(name, line["job"]["model"])
    return "".join(json.dumps(line, separators=(",", ":"), ensure_ascii=False) + "\n" for line in written)


def _lines(path: Path) -> Iterator[Json]:
    first: Json | None = None
    models: dict[str, Json] = {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        line = json.loads(text)
        full = line if first is None else laid_over(_base(first, models, line.pop("of")), line)
        first = first or full
        models.setdefault(full["job"]["model"]["name"], full["job"]["model"])
        yield full


def _base(first: Json, models: dict[str, Json], name: str) -> Json:
    """Return the first line, with the model of this name if an earlier line has it."""
    return {**first, "job": {**first["job"], "model": models.get(name, first["job"]["model"])}}


def difference(base: Json, full: Json) -> Json:
    """Return what to merge into ``base`` to get ``full``; ``null`` removes a key that only ``base`` has."""
    made: Json = {}
    for key in (*full, *(key for key in base if key not in full)):
        here, there = full.get(key), base.get(key)
        if here != there or (key in full) != (key in base):
            made[key] = difference(there, here) if isinstance(here, dict) and isinstance(there, dict) else here
    return made


def laid_over(base: Json, line: Json) -> Json:
    """Merge a line into the first; the inverse of :func:`difference` (JSON Merge Patch, RFC 7396, for objects).

    >>> laid_over({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": None}, "e": 4})
    {'a': 1, 'b': {'c': 2}, 'e': 4}
    """
    made = {**base}
    for key, value in line.items():
        there = made.get(key)
        made[key] = laid_over(there, value) if isinstance(there, dict) and isinstance(value, dict) else value
    return {key: value for key, value in made.items() if value is not None}


def _plain(value: object) -> object:
    """Return plain values: without empty fields, and tuples as lists."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items() if not _says_nothing(key, part)}
    if isinstance(value, (tuple, list)):
        return [_plain(part) for part in value]
    return value


def _says_nothing(key: str, value: object) -> bool:
    """Whether a value is a field's default: nothing, an empty text, or a modelled allocator."""
    return value is None or (value == "" and key not in _REQUIRED) or (key == "modelled" and value is True)
