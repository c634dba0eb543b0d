"""Turns the flags of `zeroplan dryrun` into the task of its child process, and runs it."""

from typing import TYPE_CHECKING, NamedTuple

from zeroplan.cli import say
from zeroplan.dryrun.command import Command
from zeroplan.dryrun.task import DryRunTask
from zeroplan.errors import MeasurementError, SpecError
from zeroplan.installation import not_installed
from zeroplan.units import parse_count

if TYPE_CHECKING:
    from zeroplan.script_trace import SavedRun

ANY_GPU = "h100-sxm-80gb"
"""The GPU of a dry run without --gpu."""
_MOST_GPUS = 1_000_000


class Ranks(NamedTuple):
    """The flags for the number of ranks, the GPU, the rank and the steps, as typed."""

    gpus: str | None
    gpu: str | None
    per_node: str | None
    rank: str | None
    steps: str

    def task(self, found: Command) -> DryRunTask:
        """Return the task of a command; raises SpecError for a wrong flag."""
        from zeroplan.catalog.gpu import gpu as gpu_named  # noqa: PLC0415  start-up is part of every command's time

        kind = gpu_named(self.gpu or ANY_GPU)
        if kind.vendor != "nvidia":
            raise SpecError(f"--gpu {self.gpu!r} is not an NVIDIA GPU; a dry run supports only CUDA")
        per_node = self.per_node or str(found.gpus_per_node or kind.gpus_per_node)
        ranks = parse_count(self.gpus, what="--gpus") if self.gpus is not None else found.gpus or 1
        if not 1 <= ranks <= _MOST_GPUS:
            raise SpecError(f"--gpus {self.gpus!r} is not a number of ranks from 1 to {_MOST_GPUS:,}")
        return DryRunTask(
            target=found.target, module=found.module, arguments=found.arguments, gpus=ranks, gpu=kind.name, answer="answer.json",
            gpus_per_node=_number(per_node, "--gpus-per-node", 1, 1024), rank=_number(self.rank or "0", "--as-rank", 0, ranks - 1),
            steps=_number(self.steps, "--steps", 1, 1000), launcher=found.launcher,
        )  # fmt: skip


def _number(text: str, what: str, low: int, high: int) -> int:
    if not text.strip().isdecimal() or not low <= int(text) <= high:
        raise SpecError(f"{what} {text!r} is not a whole number from {low:,} to {high:,}")
    return int(text)


def dry_run_of(task: DryRunTask, seconds: float, *, quiet: bool) -> "SavedRun":
    """Run a task without a GPU; raises MeasurementError if torch is not installed."""
    if lacking := not_installed("torch", by="a dry run"):
        raise MeasurementError(lacking)
    from zeroplan.dryrun.launch import dry_run  # noqa: PLC0415  see above

    if not quiet:
        until = "to its own end" if task.until_end else f"to {task.steps} optimizer steps"
        say(f"running {task.target} as rank {task.rank} of {task.gpus:,}, {until}")
    return dry_run(task, timeout_s=seconds, quiet=quiet)
