"""``zeroplan advise``: which changes of this configuration free memory, how much, and at what cost?"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from zeroplan.catalog.setups.setup import Setup
from zeroplan.cli import json_text
from zeroplan.cli.flags import AsJson
from zeroplan.cli.job_flags import JobRequest, with_request_flags
from zeroplan.cli.plan import Calibrate, shares_measured
from zeroplan.resolve import Request, SetupRead, resolve, with_setup

if TYPE_CHECKING:
    from zeroplan.advice import Advice
    from zeroplan.spec.job import JobSpec


def _advise(
    *,
    job_request: JobRequest,
    calibrate: Calibrate = None,
    as_json: AsJson = False,
) -> int:
    """Rank single changes of a job or configuration file by the memory they free and the time they cost."""
    from zeroplan.advice import advise  # noqa: PLC0415  only this command pays for it
    from zeroplan.report.advice import advice_payload, advice_text  # noqa: PLC0415

    job, notes, *_ = resolve(job_request.request, extra=job_request.extra, chosen=job_request.chosen)
    measured = shares_measured(calibrate, job_request)
    shares = None if measured is None else measured(job.model)
    job, found = replace(job, cluster=replace(job.cluster, shares=shares)), _setup(job_request)
    job = _as_its_program_would(job, found)
    advised = advise(job)

    def words(one: "Advice") -> tuple[str, ...]:
        return _words(found, job, one)

    if as_json:
        typer.echo(json_text(advice_payload(advised, words, notes)))
    else:
        from zeroplan.cli.terminal import show  # noqa: PLC0415

        show(advice_text(advised, words, notes))
    return 0


def _setup(job_request: JobRequest) -> SetupRead:
    """The user's configuration file, so that advice can name its keys; ``--deepspeed-config`` counts as one."""
    request = job_request.request
    if request.from_file is None and request.deepspeed_config is not None:
        return SetupRead(request, setup=Setup("deepspeed"))
    return with_setup(request, job_request.chosen)


def _as_its_program_would(job: "JobSpec", found: SetupRead) -> "JobSpec":
    """The job with gradients reduced in bf16, as accelerate's FSDP2 does (also under transformers' Trainer)."""
    if found.setup.kind not in ("accelerate", "trainer", "llama-factory", "axolotl") or job.recipe.precision != "bf16-mixed":
        return job
    return replace(job, recipe=replace(job.recipe, fsdp2=replace(job.recipe.fsdp2, reduce_dtype="param")))


def _words(found: SetupRead, job: "JobSpec", one: "Advice") -> tuple[str, ...]:
    if found.setup.kind is None:
        return (one.change.flags,)
    from zeroplan.export.setup_words import deepspeed_place, in_its_words  # noqa: PLC0415  only configuration files need it

    place = (
        "" if found.setup.kind == "deepspeed" or found.setup.deepspeed is None else deepspeed_place(found.setup.deepspeed.where)
    )
    return in_its_words(job, one.change.job, found.setup.kind, found.setup.keys, place)


def _job_or_setup(path: Path) -> Request:
    """Read the argument, which is another program's configuration or a job file."""
    from zeroplan.catalog.setups.reading import is_setup  # noqa: PLC0415  only this command accepts both
    from zeroplan.job_file import read_job_file  # noqa: PLC0415

    return replace(Request(), from_file=str(path)) if is_setup(path) else read_job_file(path)


advise_command = with_request_flags(_advise, read_file=_job_or_setup)
