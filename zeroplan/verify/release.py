"""The release of FSDP2 that a run measures: the installed torch's, read from the package metadata."""

from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from zeroplan.errors import MeasurementError
from zeroplan.spec.job import JobSpec

_CHANGED = (2, 15)
"""The first torch release whose ``fully_shard`` holds memory differently."""


def as_installed(job: JobSpec) -> JobSpec:
    """The job with the installed torch's FSDP2. Raises MeasurementError if the job names another release."""
    here = installed()
    if job.recipe.engine != "fsdp2" or here is None:
        return job
    options = job.recipe.fsdp2
    if options.modules == "torchtitan":
        raise MeasurementError(
            "torchtitan's own modules are not run by `zeroplan verify`; run torchtitan itself with `zeroplan dryrun`, or add "
            "--modules transformers"
        )
    if options.torch is None:
        if here == "2.13" or job.mesh.pp > 1:
            return job  # 2.13 is the default; pipelines do not use the schedules of 2.15
        return replace(job, recipe=replace(job.recipe, fsdp2=replace(options, torch=here)))
    if options.torch != here:
        raise MeasurementError(
            f"fsdp2.torch={options.torch} is not the FSDP2 of torch {version('torch')}, which is installed; leave it out, or "
            f"install another torch"
        )
    return job


def installed() -> Literal["2.13", "2.15"] | None:
    """The FSDP2 release of the installed torch, as ``fsdp2.torch`` spells it; None without torch."""
    try:
        major, minor, *_ = version("torch").split(".")
    except PackageNotFoundError:
        return None
    return "2.15" if (int(major), int(minor)) >= _CHANGED else "2.13"
