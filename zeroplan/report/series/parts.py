"""Shared by all series: memory by kind in the order of a stack, and the caption with the job."""

from collections.abc import Iterator
from dataclasses import dataclass

from zeroplan.estimator import Estimate
from zeroplan.ledger import Line, bytes_by_kind
from zeroplan.report.palette import ORDER, OUTSIDE
from zeroplan.report.words import batch_line, mesh_line, partly_trained, recipe_line, subject
from zeroplan.spec.job import JobSpec


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of one kind; ``what`` is a key of :data:`zeroplan.report.palette.LOOKS`."""

    what: str
    n_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Caption:
    """A picture's title, and the lines below it that describe the job."""

    title: str
    lines: tuple[str, ...]


def parts(lines: tuple[Line, ...], *, outside_bytes: int = 0) -> tuple[Part, ...]:
    """The nonzero bytes of each kind, from the bottom of the stack up."""
    found = {kind.value: int(n_bytes) for kind, n_bytes in bytes_by_kind(lines).items()}
    found[OUTSIDE] = outside_bytes
    return tuple(Part(what, found[what]) for what in ORDER if found.get(what))


def kinds_of(stacks: tuple[tuple[Part, ...], ...]) -> tuple[str, ...]:
    """The kinds in any of these stacks, in stack order, for a legend."""
    seen = {part.what for stack in stacks for part in stack}
    return tuple(what for what in ORDER if what in seen)


def caption(answer: Estimate, title: str, *more: str, batch: bool = True) -> Caption:
    """The caption below a picture: the job, and the inexact parts of its estimate."""
    return Caption(title=title, lines=tuple(_about(answer, more, batch=batch)))


def _about(answer: Estimate, more: tuple[str, ...], *, batch: bool) -> Iterator[str]:
    job = answer.job
    yield "; ".join(part for part in (subject(job), mesh_line(job.mesh), partly_trained(job.model), _offloaded(job)) if part)
    yield "; ".join((recipe_line(job.recipe), *((batch_line(job.batch, job.mesh),) if batch else ())))
    yield from more
    if answer.approximate:
        yield answer.approximate


_PLACES = {"cpu": "in host memory", "nvme": "on NVMe"}


def _offloaded(job: JobSpec) -> str:
    """The offloaded states and their places, in words."""
    recipe, options = job.recipe, job.recipe.deepspeed
    if not recipe.offloads:
        return ""
    if recipe.engine != "deepspeed":
        return "parameters, gradients and optimizer in host memory"
    devices = {"optimizer": options.offload_optimizer, "parameters": options.offload_param}
    return ", ".join(f"{what} {_PLACES[device]}" for what, device in devices.items() if device != "none")
