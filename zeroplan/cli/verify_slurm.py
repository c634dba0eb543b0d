"""``zeroplan verify --slurm`` and ``--resume``: a job's ranks as a job of Slurm's, awaited now or later."""

from pathlib import Path
from typing import NamedTuple

from zeroplan.cli.verify import answer, say
from zeroplan.errors import SpecError
from zeroplan.units import parse_count
from zeroplan.verify.processes.slurm import Submitted, Wanted, submit, taken_up, wait
from zeroplan.verify.task import Task


class Flags(NamedTuple):
    """What is asked of Slurm, as typed."""

    partition: str | None
    account: str | None
    time_limit: str | None
    options: tuple[str, ...]

    def wanted(self) -> Wanted:
        """Read them."""
        minutes = (
            30 if self.time_limit is None else parse_count(self.time_limit, what="--time-limit", examples="30, for minutes")
        )
        options = {}
        for text in self.options:
            name, equals, value = text.partition("=")
            if not equals or not name.strip("-"):
                raise SpecError(f"--slurm-option {text!r} is not NAME=VALUE; write qos=debug, say")
            options[name.strip("-").replace("-", "_")] = value
        return Wanted(partition=self.partition or "", account=self.account or "", minutes=minutes, options=options or None)


def verify_on_slurm(task: Task, flags: Flags, folder: Path | None, *, tolerance: float, as_json: bool) -> int:
    """Submit a task and wait for it."""
    if folder is None:
        raise SpecError("--slurm needs a folder that all nodes see, for its records and to be taken up again: --record-dir DIR")
    submitted = submit(task, flags.wanted(), folder)
    say(f"Slurm job {submitted.job_id}: {task.job.mesh.world_size:,} ranks; everything of it is in {folder}")
    return _awaited(submitted, folder, tolerance=tolerance, as_json=as_json)


def resume(folder: Path, *, tolerance: float, as_json: bool) -> int:
    """Take up a job of Slurm's again, wherever it is by now."""
    return _awaited(taken_up(folder), folder, tolerance=tolerance, as_json=as_json)


def _awaited(submitted: Submitted, folder: Path, *, tolerance: float, as_json: bool) -> int:
    try:
        found = wait(submitted, folder, say=say)
    except KeyboardInterrupt:
        job = submitted.job_id
        say(f"Slurm job {job} goes on: `zeroplan verify --resume {folder}` takes it up, `scancel {job}` ends it")
        raise
    return answer(found, tolerance=tolerance, as_json=as_json)
