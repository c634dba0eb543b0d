"""Records of the matrix, one per line of a small file: what of a record differs from the first line, which is one in full.

A line laid over the first is a record like any other (:class:`zeroplan.measurement.Measurement`) of the last step alone, so
that no default of a later version changes what an old line says. Needs no torch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pydantic import TypeAdapter

from zeroplan.measurement import Environment, Measurement
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
    """A job that could not be measured, and why, in one line."""

    job: JobSpec
    reason: str


def small(measured: Measurement) -> Measurement:
    """The record without what is the same for all, or says where it ran: one step, and kinds only where the peak is."""
    steady = measured.steady
    phases = tuple(
        replace(phase, kinds=phase.kinds if phase == steady.peak else {}, counted_bytes=None) for phase in steady.phases
    )
    first = measured.initialisation
    packages = {name: version for name, version in measured.environment.packages.items() if name != "zeroplan"}
    return replace(
        measured,
        environment=Environment(python="", platform="", packages=packages),
        initialisation=None if first is None else replace(first, kinds={}),
        steps=(replace(steady, phases=phases),),
        remarks=tuple(remark for remark in measured.remarks if remark.startswith("few layers")),
    )


def without_courses(measured: Measurement) -> Measurement:
    """The record without what is told block by block, which only pictures want."""
    steps = (replace(step, phases=tuple(replace(phase, course=None) for phase in step.phases)) for step in measured.steps)
    return replace(measured, steps=tuple(steps))


def records(path: Path = RECORDS) -> list[Measurement]:
    """Read all records of a file; none where there is no file."""
    adapter = TypeAdapter(Measurement)
    return [adapter.validate_json(json.dumps(line)) for line in _lines(path)]


def refusals(path: Path = REFUSED) -> list[Refusal]:
    """Read the jobs that could not be measured."""
    return [Refusal(read(JobSpec, line["job"], where=str(path)), str(line["reason"])) for line in _lines(path)]  # type: ignore[arg-type]


def keep(measured: Measurement, path: Path = RECORDS) -> None:
    """Append a record; the first one is written in full."""
    _append(_plain(asdict(measured)), path)


def keep_refusal(job: JobSpec, reason: str, path: Path = REFUSED) -> None:
    """Append a job that could not be measured."""
    _append({"job": _plain(asdict(job)), "reason": reason}, path)


def sort(path: Path, jobs: Iterable[JobSpec]) -> None:
    """Put records into the order of the sample, so that two runs of it differ in no line that did not change."""
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
    """The lines of a file, each as what differs from the first and, in its model, from the first one of the same name."""
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
    """The first line, with the model of this name where there was one."""
    return {**first, "job": {**first["job"], "model": models.get(name, first["job"]["model"])}}


def difference(base: Json, full: Json) -> Json:
    """What must be laid over ``base`` to make ``full``. Of a key that only ``base`` has, ``null`` takes its place."""
    made: Json = {}
    for key in (*full, *(key for key in base if key not in full)):
        here, there = full.get(key), base.get(key)
        if here != there or (key in full) != (key in base):
            made[key] = difference(there, here) if isinstance(here, dict) and isinstance(there, dict) else here
    return made


def laid_over(base: Json, line: Json) -> Json:
    """Lay a line over the first one; the inverse of :func:`difference` (JSON Merge Patch, RFC 7396, for objects).

    >>> laid_over({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": None}, "e": 4})
    {'a': 1, 'b': {'c': 2}, 'e': 4}
    """
    made = {**base}
    for key, value in line.items():
        there = made.get(key)
        made[key] = laid_over(there, value) if isinstance(there, dict) and isinstance(value, dict) else value
    return {key: value for key, value in made.items() if value is not None}


def _plain(value: object) -> object:
    """Without fields that say nothing; tuples as lists."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items() if not _says_nothing(key, part)}
    if isinstance(value, (tuple, list)):
        return [_plain(part) for part in value]
    return value


def _says_nothing(key: str, value: object) -> bool:
    """Nothing, an empty text and a modelled allocator are the defaults of every field that may be so."""
    return value is None or (value == "" and key not in _REQUIRED) or (key == "modelled" and value is True)
