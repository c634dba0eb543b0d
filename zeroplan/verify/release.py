"""Whose FSDP2 a run shows: that of the torch that is installed, which is told by its metadata alone."""

from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from zeroplan.errors import MeasurementError
from zeroplan.spec.job import JobSpec

_CHANGED = (2, 15)
"""The first release whose ``fully_shard`` holds memory otherwise."""


def as_installed(job: JobSpec) -> JobSpec:
    """The job as the installed torch runs it. Raises MeasurementError where it is said to be another's."""
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
            return job  # which says as much by saying nothing; pipelines are not run by the schedules of 2.15
        return replace(job, recipe=replace(job.recipe, fsdp2=replace(options, torch=here)))
    if options.torch != here:
        raise MeasurementError(
            f"fsdp2.torch={options.torch} is not the FSDP2 of torch {version('torch')}, which is installed; leave it out, or "
            f"install another torch"
        )
    return job


def installed() -> Literal["2.13", "2.15"] | None:
    """As ``fsdp2.torch`` says it; None without torch."""
    try:
        major, minor, *_ = version("torch").split(".")
    except PackageNotFoundError:
        return None
    return "2.15" if (int(major), int(minor)) >= _CHANGED else "2.13"
