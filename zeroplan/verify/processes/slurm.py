"""Runs a task as a Slurm job: submitted through submitit, awaited, and resumed by any process that has the folder.

All files of a job are in one folder, which all nodes must see: its records, and in ``slurm/`` the job's id and task (``job.json``),
the reasons of ranks without a record (``failed/``), submitit's files and the ranks' output.
"""

import io
import json
import math
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import asdict
from pathlib import Path

from zeroplan.current_folder import environment
from zeroplan.errors import MeasurementError, SpecError, ZeroplanError
from zeroplan.installation import not_installed
from zeroplan.measurement import Measurement
from zeroplan.records import read_record, record_paths
from zeroplan.spec.base import Count, Spec, read
from zeroplan.spec.hardware import node_size
from zeroplan.verify.failures import FailedError, NotHereError, cause_of, ran_out_of_memory, text_of
from zeroplan.verify.task import Task
from zeroplan.whole import write_whole

_OUTPUT = "slurm"
_STATE, _FAILED = f"{_OUTPUT}/job.json", f"{_OUTPUT}/failed"
_POLL_S = 2.0
_GATHER_S = 60.0
"""How long files may take to appear here after the job has ended, because network file systems cache. [s]"""
_PER_NODE = 8
_NEVER = ("down", "drained", "inactive", "unavail", "limit", "invalid", "notallowed", "badconstraints", "held")
"""Words in the reason of a pending job that will not start by waiting for other jobs."""
_OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL", "DEADLINE")


class Wanted(Spec):
    """The resources to request from Slurm; ``options`` are sbatch's, by their long names."""

    partition: str = ""
    account: str = ""
    minutes: Count = 30
    options: dict[str, str] | None = None


class Submitted(Spec):
    """A submitted Slurm job."""

    schema_version: int = 1
    job_id: str
    task: Task


def submit(task: Task, wanted: Wanted, folder: Path) -> Submitted:
    """Submit a task to Slurm, one Slurm task per rank, and note the job in the folder.

    Raises MeasurementError if Slurm or submitit is missing, or with Slurm's own message if it refuses.
    """
    _refuse_where_there_is_none()
    if (folder / _STATE).exists():
        raise SpecError(f"{str(folder)!r} already has a Slurm job: continue it with --resume, or name another folder")
    import submitit  # noqa: PLC0415  an optional package, checked above

    nodes, per_node = _layout(task)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        executor = submitit.SlurmExecutor(folder=folder.absolute() / _OUTPUT)
        executor.update_parameters(
            job_name="zeroplan",
            nodes=nodes,
            ntasks_per_node=per_node,
            time=wanted.minutes,
            srun_args=["--kill-on-bad-exit=1"],
            setup=_exports(),
            **({"gpus_per_node": per_node} if task.tensors == "cuda" else {}),
            **({"partition": wanted.partition} if wanted.partition else {}),
            **({"account": wanted.account} if wanted.account else {}),
            **({"additional_parameters": wanted.options} if wanted.options else {}),
        )
        with redirect_stderr(io.StringIO()):  # submitit repeats sbatch's message there
            job = executor.submit(as_rank, json.dumps(asdict(task)), str(folder.absolute()))
    except submitit.core.utils.FailedJobError as error:
        raise NotHereError(f"Slurm refuses the job: {_refusal(str(error))}") from None
    except OSError as error:
        raise MeasurementError(f"{str(folder)!r} cannot be written: {error.strerror}") from None
    submitted = Submitted(job_id=str(job.job_id), task=task)
    write_whole(folder / _STATE, json.dumps(asdict(submitted)), force=True)
    return submitted


def _refuse_where_there_is_none() -> None:
    if lacking := not_installed("submitit", by="--slurm"):
        raise MeasurementError(lacking)
    if shutil.which("sbatch") is None:
        raise NotHereError("Slurm is not installed here: sbatch is not on the path; run this on a node that submits jobs")


def _exports() -> list[str]:
    """Shell lines that set the Python path before the ranks start, as in the folder where the job was submitted."""
    variables = environment()
    return [f"export {name}={shlex.quote(variables[name])}" for name in ("PYTHONSAFEPATH", "PYTHONPATH")]


def _layout(task: Task) -> tuple[int, int]:
    """The number of nodes, and of ranks per node."""
    ranks, cluster = task.job.mesh.world_size, task.job.cluster
    per_node = min(ranks, node_size(cluster) or _PER_NODE)
    if ranks % per_node:
        raise SpecError(f"{ranks:,} ranks do not fill nodes of {per_node} GPUs; set the ranks per node with --gpus-per-node")
    return math.ceil(ranks / per_node), per_node


def _refusal(message: str) -> str:
    r"""The first error line of a Slurm program, without the program's name.

    >>> _refusal("sbatch: error: invalid partition specified: x\nsbatch: error: Batch job submission failed: Invalid partition")
    'invalid partition specified: x'
    """
    lines = [line.partition("error: ")[2] for line in message.splitlines() if "error: " in line]
    first = (lines or message.strip().splitlines() or ["it gave no reason"])[0]
    return first.removeprefix("Batch job submission failed: ").strip()


# On the nodes


def as_rank(task: str, folder: str) -> None:
    """Run the rank that Slurm assigned; write its record, or the reason of failure and exit with 1, which ends the others."""
    import submitit  # noqa: PLC0415  every node that runs this has it

    from zeroplan.verify.processes.torchrun import measured_as_rank, meeting  # noqa: PLC0415  on the node only

    submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
    try:
        mine = read(Task, json.loads(task), where="task")
        measured_as_rank(mine, store=meeting(mine), folder=Path(folder))
    except (Exception, SystemExit) as error:  # noqa: BLE001  every error is reported to the waiting process
        rank = int(os.environ["RANK"])
        why = {"rank": rank, "cause": cause_of(error), "text": text_of(error), "at": time.time()}
        write_whole(Path(folder) / _FAILED / f"rank{rank}.json", json.dumps(why), force=True)
        os._exit(1)


# On the submitting node


def resumed_job(folder: Path) -> Submitted:
    """The job in a folder. Raises SpecError if it has none."""
    path = folder / _STATE
    if not path.is_file():
        raise SpecError(f"{str(folder)!r} has no Slurm job ({_STATE} is missing); name the --record-dir of a --slurm run")
    try:
        return read(Submitted, json.loads(path.read_text(encoding="utf-8")), where=str(path))
    except ValueError as error:
        raise error if isinstance(error, SpecError) else SpecError(f"{str(path)!r} is not complete JSON") from None


def wait(submitted: Submitted, folder: Path, *, say: Callable[[str], None]) -> list[Measurement]:
    """Wait for a job to end, report its state, and return the records of all its ranks.

    Raises :class:`~zeroplan.verify.failures.NotHereError` if Slurm will not start it (the job is then cancelled). With fewer
    records than ranks, raises the error of the first failed rank, or how the job ended.
    """
    reported, hopeless = "", 0
    while True:
        state, reason = _state(submitted.job_id)
        if state in _OVER or not state:
            return _collected(submitted, folder, state)
        now = f"{state.lower()} ({reason})" if reason not in ("", "None") else state.lower()
        if now != reported:
            say(f"Slurm job {submitted.job_id}: {now}")
        reported, hopeless = now, hopeless + 1 if state == "PENDING" and _will_not_start(reason) else 0
        if hopeless > 1:
            _run("scancel", submitted.job_id)
            raise NotHereError(f"Slurm cannot start job {submitted.job_id}: {reason}; it was cancelled")
        time.sleep(_POLL_S)


def _state(job_id: str) -> tuple[str, str]:
    """A job's state and reason; empty if Slurm has forgotten it, some time after its end."""
    line = _run("squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%T|%r")
    state, _, reason = line.strip().partition("|")
    return state, reason


def _will_not_start(reason: str) -> bool:
    """Whether a pending job waits for something other than its turn.

    >>> [_will_not_start(reason) for reason in ("Resources", "Priority", "ReqNodeNotAvail, UnavailableNodes:n1", "PartitionDown")]
    [False, False, True, True]
    """
    return any(word in reason.lower().replace(" ", "") for word in _NEVER)


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)  # noqa: S603  Slurm's own programs
    except FileNotFoundError:
        raise NotHereError(f"Slurm is not installed here: {command[0]} is not on the path") from None
    except subprocess.TimeoutExpired:
        raise MeasurementError(f"Slurm does not answer: {command[0]} ran for more than a minute") from None
    if done.returncode and "Invalid job id" not in done.stderr:
        raise MeasurementError(f"Slurm does not answer: {_refusal(done.stderr)}")
    return done.stdout


def _collected(submitted: Submitted, folder: Path, state: str) -> list[Measurement]:
    ranks, until = submitted.task.job.mesh.world_size, time.monotonic() + (_GATHER_S if state == "COMPLETED" else 0)
    while len(found := _records(folder)) < ranks and not _failures(folder) and time.monotonic() < until:
        time.sleep(_POLL_S)
    if len(found) >= ranks:
        return found
    raise _why(submitted, folder, state, len(found))


def _records(folder: Path) -> list[Measurement]:
    return [read_record(path) for path in record_paths(folder)] if any(folder.glob("*.json")) else []


def _failures(folder: Path) -> list[dict[str, str]]:
    """The reasons of ranks without a record, the first failure first."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in (folder / _FAILED).glob("rank*.json")]
    return sorted(found, key=lambda one: float(one["at"]))


def _why(submitted: Submitted, folder: Path, state: str, found: int) -> ZeroplanError:
    failures = _failures(folder)
    if not failures:
        ended = f"ended {state.lower().replace('_', ' ')}" if state else "is no longer known to Slurm"
        return FailedError(
            f"Slurm job {submitted.job_id} {ended} with {found} of {submitted.task.job.mesh.world_size:,} records; the output of "
            f"its ranks is in {str(folder / _OUTPUT)!r}"
        )
    rank, text = failures[0]["rank"], failures[0]["text"].strip()
    match failures[0]["cause"]:
        case "input":
            return SpecError(text)
        case "machine" | "here":
            return NotHereError(f"rank {rank} of Slurm job {submitted.job_id}: {text}")
        case "memory":
            return ran_out_of_memory(rank, text)
    return FailedError(
        f"rank {rank} of Slurm job {submitted.job_id} failed: {text.splitlines()[-1] if text else 'it gave no reason'}"
    )
