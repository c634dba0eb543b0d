"""What a run measures because it is installed: torch's FSDP2, transformers' release, and the kernels of linear attention."""

from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Literal

from zeroplan.errors import MeasurementError
from zeroplan.spec.job import JobSpec
from zeroplan.spec.linear_kernels import runs_by_kernels
from zeroplan.spec.recipe import LinearAttention
from zeroplan.spec.releases import NOW, release_of, within

_CHANGED = (2, 15)
"""The first torch release whose ``fully_shard`` holds memory differently."""


_KERNELS = ("fla", "causal_conv1d", "triton")
"""The packages that transformers runs linear attention by."""


def with_installed_kernels(job: JobSpec) -> JobSpec:
    """The job with its linear attention as transformers runs it here: by kernels only if all their packages are installed."""
    if job.model.linear is None or not runs_by_kernels(job.model, job.recipe):
        return job
    runs: LinearAttention = "kernels" if all(find_spec(name) is not None for name in _KERNELS) else "torch"
    return replace(job, recipe=replace(job.recipe, linear_attention=runs))


def with_installed_transformers(job: JobSpec) -> JobSpec:
    """The job with the installed release of transformers, if the job names none and that release holds other tensors."""
    here = installed_transformers()
    if job.recipe.transformers is not None or here is None or not within(here) or release_of(here) == NOW:
        return job
    return replace(job, recipe=replace(job.recipe, transformers=here))


def installed_transformers() -> str | None:
    """The installed release of transformers, such as ``5.23``; None without it."""
    try:
        return ".".join(version("transformers").split(".")[:2])
    except PackageNotFoundError:
        return None


def as_installed(job: JobSpec) -> JobSpec:
    """The job with the installed torch's FSDP2, the installed transformers, and the installed kernels of linear attention.

    Raises MeasurementError if the job names another release.
    """
    job, here = with_installed_transformers(with_installed_kernels(job)), installed()
    if job.recipe.engine != "fsdp2" or here is None:
        return job
    options = job.recipe.fsdp2
    if options.are_torchtitans:
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
