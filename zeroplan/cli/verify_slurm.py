"""``zeroplan verify --slurm`` and ``--resume``: runs a job's ranks as a Slurm job, and waits for it now or later."""

from pathlib import Path

from zeroplan.cli import say
from zeroplan.cli.verify import Flags, answer
from zeroplan.errors import SpecError
from zeroplan.units import parse_count
from zeroplan.verify.processes.slurm import Submitted, Wanted, resumed_job, submit, wait
from zeroplan.verify.task import Task


def _wanted(flags: Flags) -> Wanted:
    minutes = 30 if flags.time_limit is None else parse_count(flags.time_limit, what="--time-limit", examples="30, for minutes")
    options = {}
    for text in flags.slurm_option or ():
        name, equals, value = text.partition("=")
        if not equals or not name.strip("-"):
            raise SpecError(f"--slurm-option {text!r} is not NAME=VALUE; write qos=debug, say")
        options[name.strip("-").replace("-", "_")] = value
    return Wanted(partition=flags.partition or "", account=flags.account or "", minutes=minutes, options=options or None)


def verify_on_slurm(task: Task, flags: Flags, *, tolerance: float) -> int:
    """Submit a task, wait for it, print the comparison, and return the exit code."""
    if (folder := flags.folder) is None:
        raise SpecError("--slurm needs a folder that all nodes see, for the records and for --resume; add --record-dir DIR")
    submitted = submit(task, _wanted(flags), folder)
    say(f"Slurm job {submitted.job_id}: {task.job.mesh.world_size:,} ranks; everything of it is in {folder}")
    return _awaited(submitted, folder, tolerance=tolerance, as_json=flags.as_json)


def resume(folder: Path, *, tolerance: float, as_json: bool) -> int:
    """Reconnect to a Slurm job in any state, wait for it, print the comparison, and return the exit code."""
    return _awaited(resumed_job(folder), folder, tolerance=tolerance, as_json=as_json)


def _awaited(submitted: Submitted, folder: Path, *, tolerance: float, as_json: bool) -> int:
    try:
        found = wait(submitted, folder, say=say)
    except KeyboardInterrupt:
        job = submitted.job_id
        say(f"Slurm job {job} continues: `zeroplan verify --resume {folder}` reconnects, `scancel {job}` ends it")
        raise
    return answer(found, tolerance=tolerance, as_json=as_json)
