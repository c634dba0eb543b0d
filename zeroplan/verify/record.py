"""Writes records of measurements: each file is complete or absent, and replaces no other."""

import json
import re
from dataclasses import asdict
from pathlib import Path

from zeroplan.measurement import Measurement
from zeroplan.spec.job import JobSpec
from zeroplan.verify.failures import NotHereError
from zeroplan.whole import put_numbered, unfinished


def record_name(measured: Measurement) -> str:
    """The file name of a record, made of model, engine, stage, ranks and backend: ``gpt2-ddp-stage1-n4-rank0-cpu.json``."""
    return f"{run_name(measured.job, measured.workload, measured.rank)}-{measured.backend}.json"


def run_name(job: JobSpec, workload: str, rank: int) -> str:
    """The name of one rank's run, in characters that every file system accepts: ``gpt2-ddp-stage1-n4-rank0``."""
    named = (workload or job.model.name or job.model.family).lower()
    model = re.sub(r"[^a-z0-9.]+", "-", named).strip("-.") or job.model.family
    degrees = (("tp", job.mesh.tp), ("cp", job.mesh.cp), ("pp", job.mesh.pp), ("ep", job.mesh.ep))
    ways = "".join(f"-{name}{degree}" for name, degree in degrees if degree > 1)
    return f"{model[:80]}-{job.recipe.engine}-stage{job.recipe.zero_stage}-n{job.mesh.world_size}{ways}-rank{rank}"


def write_record(measured: Measurement, folder: Path) -> Path:
    """Write the record into ``folder`` and return its path.

    An earlier record of the same name stays: the new one is numbered. The file is written under another name in the same folder,
    flushed to disk, and renamed, so that nobody sees half of it.
    """
    text = json.dumps(asdict(measured), indent=1, ensure_ascii=False) + "\n"
    name = record_name(measured)
    try:
        with unfinished(folder / name) as beside:
            beside.write_text(text, encoding="utf-8")
            return put_numbered(beside, folder, name.removesuffix(".json"), ".json")
    except OSError as error:
        raise NotHereError(f"the record cannot be written to {str(folder)!r}: {error.strerror}") from None
