"""``zeroplan verify``: is the estimate right? Runs the real engine and compares its memory with the estimate."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from zeroplan.cli import DISAGREES, say, say_notes
from zeroplan.cli.flags import TOLERANCE, AsJson, Tolerance, flag, number, parse_tolerance, refuse_given, switch, with_fields
from zeroplan.cli.job_flags import with_job_flags
from zeroplan.errors import MeasurementError, SpecError
from zeroplan.installation import not_installed
from zeroplan.resolve import Request, Resolved, resolve
from zeroplan.units import format_gb, parse_count
from zeroplan.whole import refuse_folder

if TYPE_CHECKING:
    from zeroplan.measurement import Measurement
    from zeroplan.spec.job import JobSpec
    from zeroplan.verify.task import Task

_SLURM = "Slurm"
_flag, _switch = partial(flag, panel="Run"), partial(switch, panel="Run")
BACKENDS = ("simulate", "cpu", "cuda")
_TRANSPORT: dict[str, Literal["gloo", "nccl"]] = {"cpu": "gloo", "cuda": "nccl"}
_SETTLED = 3
"""Steps until all engines are in their steady state. The first step allocates the optimizer's state. In the second, DDP rebuilds
its buckets, and DeepSpeed's stage 3 follows the trace of the first for the first time."""


class Flags(NamedTuple):
    """The values as typed."""

    backend: Annotated[
        str,
        _flag(
            "--backend", "simulate|cpu|cuda", "Run on fake tensors, on real tensors on the CPU, or on real GPUs.", shown=True
        ),
    ] = "simulate"
    nproc: Annotated[
        str | None,
        _flag(
            "--nproc",
            "N",
            "Start one process per GPU of the job: cpu over gloo, cuda over NCCL. (default: one process, fake group)",
        ),
    ] = None
    rank: Annotated[
        str,
        _flag("--as-rank", "R", "The rank that a single process runs as.", short="--rank", shown=True),
    ] = "0"
    of: Annotated[str | None, _flag("--of", "N", "The number of ranks: the same as --gpus.")] = None
    steps: Annotated[
        str | None,
        _flag("--steps", "N", "Optimizer steps; the last counts. (default: 3; FSDP2 and Megatron simulated: 2)"),
    ] = None
    all_layers: Annotated[
        bool, _switch("--all-layers", "With simulate: run every layer, instead of deriving all from a few.")
    ] = False
    workload: Annotated[
        str | None,
        _flag("--workload", "PACKAGE.MODULE:FUNCTION", "Your own module, example batch and loss, instead of the job's model."),
    ] = None
    timeout: Annotated[
        str, _flag("--timeout", "SECONDS", "Stop if a collective or a rank is silent for this long.", shown=True)
    ] = "300"
    matrix: Annotated[
        str | None,
        _flag("--matrix", "FILE", "Run many cases instead of one job: a TOML file, or the name of one in the package."),
    ] = None
    slurm: Annotated[bool, switch("--slurm", "Run all ranks as a Slurm job.", panel=_SLURM)] = False
    partition: Annotated[str | None, flag("--partition", "NAME", "Slurm's partition.", panel=_SLURM)] = None
    account: Annotated[str | None, flag("--account", "NAME", "Slurm's account.", panel=_SLURM)] = None
    time_limit: Annotated[
        str | None, flag("--time-limit", "MINUTES", "Time limit of the Slurm job. (default: 30)", panel=_SLURM)
    ] = None
    slurm_option: Annotated[
        list[str] | None,
        flag("--slurm-option", "NAME=VALUE", "Another option of sbatch, such as qos=debug; repeatable.", panel=_SLURM),
    ] = None
    resume: Annotated[
        str | None, flag("--resume", "DIR", "Reconnect to a job of --slurm by its --record-dir.", panel=_SLURM)
    ] = None
    tolerance: Tolerance = TOLERANCE
    out: Annotated[str | None, flag("--record-dir", "DIR", "Write the records to this folder.", short="--out")] = None
    snapshot: Annotated[
        str | None,
        flag("--snapshot", "DIR", "With cuda: write the allocator's snapshots to this folder, for `zeroplan diagnose`."),
    ] = None
    as_json: AsJson = False

    @property
    def folder(self) -> Path | None:
        """The folder for records."""
        return None if self.out is None else Path(self.out)

    @property
    def allowed(self) -> float:
        """The tolerance as a fraction."""
        return parse_tolerance(self.tolerance)

    def of_a_run(self) -> "dict[str, object]":
        """The flags that only apply to a single job; None for flags that are not given."""
        return {"--of": self.of, "--nproc": self.nproc, "--steps": self.steps, "--workload": self.workload,
                "--slurm": self.slurm or None, "--as-rank": None if self.rank == "0" else self.rank,
                "--all-layers": self.all_layers or None, "--snapshot": self.snapshot}  # fmt: skip

    def of_slurm(self) -> "dict[str, object]":
        """Slurm's flags; None for flags that are not given."""
        return {"--partition": self.partition, "--account": self.account, "--time-limit": self.time_limit,
                "--slurm-option": self.slurm_option or None}  # fmt: skip


def _verify(*, resolved: Resolved | None, flags: Flags) -> int:
    """Run the job's real engine, with or without GPUs, and compare its memory with the estimate. Exit code 3: they differ."""
    limit = flags.allowed
    if not flags.slurm:
        refuse_given(flags.of_slurm(), "needs --slurm; leave it out, or add --slurm")
    given = {"a job": resolved, **flags.of_a_run()}
    if flags.matrix is not None:
        refuse_given(given, "has no effect with --matrix, because each case sets it; leave it out")
        return _many(flags.matrix, flags, limit)
    if flags.resume is not None:
        refuse_given(given, "has no effect with --resume, because the job already has it; leave it out")
        from zeroplan.cli.verify_slurm import resume  # noqa: PLC0415  only Slurm needs it

        return resume(Path(flags.resume), tolerance=limit, as_json=flags.as_json)
    return _one(resolved or resolve(Request()), flags, limit)  # resolve raises for the missing model


def _many(matrix: str, flags: Flags, tolerance: float) -> int:
    from zeroplan.cli.verify_bulk import BulkFlags, verify_matrix  # noqa: PLC0415  only many cases need it

    return verify_matrix(
        BulkFlags(matrix, _backend(flags.backend), tolerance, _seconds(flags.timeout), flags.folder, flags.as_json)
    )


def _one(resolved: Resolved, flags: Flags, tolerance: float) -> int:
    """Run one job, on this machine or under Slurm."""
    task = _task(resolved.job, flags)
    _refuse_folders(task, flags.folder)
    say_notes(resolved.notes)
    if flags.slurm:
        from zeroplan.cli.verify_slurm import verify_on_slurm  # noqa: PLC0415  only Slurm needs it

        return verify_on_slurm(task, flags, tolerance=tolerance)
    return answer(_run(task, flags.folder), tolerance=tolerance, as_json=flags.as_json)


def _refuse_folders(task: "Task", records: Path | None) -> None:
    """Raise SpecError, before the run, if its results could not be written."""
    if records is not None:
        refuse_folder(records, "--record-dir")
    if task.snapshots:
        refuse_folder(Path(task.snapshots), "--snapshot")


def answer(kept: "list[Measurement]", *, tolerance: float, as_json: bool) -> int:
    """Print the comparison of records and estimate, and return the exit code."""
    from zeroplan.cli.comparing import Held, judged, printed  # noqa: PLC0415  only this command needs them

    held = tuple(Held.of(measured) for measured in sorted(kept, key=lambda measured: measured.rank))
    typer.echo(printed(held, tolerance=tolerance, as_json=as_json))
    return 0 if all(one.comparison.agrees(tolerance) for one in judged(held)) else DISAGREES


verify_command = with_job_flags(with_fields(_verify), or_none=True, gpus_as="of", traces=False)


class _Keeper:
    """Collects records, and writes each immediately if there is a folder."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self.kept: list[Measurement] = []

    def keep(self, measured: "Measurement") -> None:
        self.kept.append(measured)
        if self._folder is not None:
            from zeroplan.verify.record import write_record  # noqa: PLC0415  only a run pays for it

            say(f"record: {write_record(measured, self._folder)}")


def _run(task: "Task", folder: Path | None) -> "list[Measurement]":
    """Run the task in child processes, which may patch torch, print, and be killed without affecting this one."""
    from zeroplan.verify.failures import OutOfMemoryError  # noqa: PLC0415  only a run pays for it
    from zeroplan.verify.processes.launch import launch  # noqa: PLC0415

    if task.tensors == "fake":
        say(f"simulating rank {task.rank} of {task.job.mesh.world_size:,}")
    keeper = _Keeper(folder)
    try:
        launch(task, keep=keeper.keep, say=say)
    except OutOfMemoryError as error:
        raise OutOfMemoryError(f"{error.args[0].rstrip('.')}; {_estimated(task.job)}") from None
    return keeper.kept


def _estimated(job: "JobSpec") -> str:
    """The estimate in words, for the error of a job that ran out of memory."""
    from zeroplan.estimator import estimate  # noqa: PLC0415  only this failure needs it

    estimated = estimate(job)
    return f"the estimate was {format_gb(estimated.least_bytes)}, context and communicators included"


def _task(job: "JobSpec", flags: Flags) -> "Task":
    """Return the task for the flags; raises SpecError if it cannot run."""
    from zeroplan.verify.release import as_installed  # noqa: PLC0415  only a run pays for it
    from zeroplan.verify.task import Task  # noqa: PLC0415

    job = as_installed(job)
    ranks, backend = job.mesh.world_size, _backend(flags.backend)
    every = flags.nproc is not None or flags.slurm
    if every:
        _check_nproc(flags.nproc or str(ranks), ranks, backend)
    rank = _number(flags.rank, "--as-rank", 0, ranks - 1)
    task = Task(
        job=job,
        transport=_TRANSPORT[backend] if every else "fake",
        tensors="fake" if backend == "simulate" else backend,  # type: ignore[arg-type]  # one of BACKENDS
        all_layers=flags.all_layers,
        rank=None if every else rank,
        steps=_number(flags.steps or _steps(backend, job), "--steps", 1, 1000),
        workload=flags.workload or "",
        timeout_s=_seconds(flags.timeout),
        snapshots=_snapshots(flags.snapshot, backend),
    )
    _refuse_what_is_no_run(task)
    require(job)
    return task


def _snapshots(folder: str | None, backend: str) -> str:
    if folder is None:
        return ""
    if backend != "cuda" or not folder:
        raise SpecError(f"--snapshot {folder!r} writes snapshots of CUDA's allocator, which needs --backend cuda")
    return str(Path(folder).absolute())


def _refuse_what_is_no_run(task: "Task") -> None:
    from zeroplan.verify.task import refuse_unrunnable  # noqa: PLC0415  only a run pays for it

    refuse_unrunnable(task.job)
    if task.job.model.profile is not None and not task.workload:
        raise SpecError(
            "a profile describes a module but does not contain it; name the module with --workload PACKAGE.MODULE:FUNCTION"
        )


def require(job: "JobSpec") -> None:
    """Raise MeasurementError if a package that the job needs is missing; nothing is imported."""
    needed = ["torch", "transformers"]
    if job.recipe.engine == "deepspeed":
        needed.append("deepspeed")
    if job.recipe.engine == "megatron":
        needed.append("megatron")
    if job.model.adapter is not None:
        needed += ["peft"] if job.model.adapter.quantize == "none" else ["peft", "bitsandbytes"]
    if lacking := not_installed(*needed, by="the engine"):
        raise MeasurementError(lacking)


def _backend(name: str) -> str:
    if name not in BACKENDS:
        raise SpecError(f"--backend {name!r} is none of {', '.join(BACKENDS)}")
    return name


def _steps(backend: str, job: "JobSpec") -> str:
    return "2" if backend == "simulate" and job.recipe.engine in ("fsdp2", "megatron") else str(_SETTLED)


def _check_nproc(text: str, ranks: int, backend: str) -> None:
    if backend not in _TRANSPORT:
        raise SpecError(f"--nproc {text} and --slurm go with --backend cpu or cuda; backend {backend} runs in one process")
    count = _number(text, "--nproc", 1, 10**4)
    if count != ranks:
        raise SpecError(f"--nproc {count} does not fit the job's {ranks:,} GPUs; each process is one of them (--gpus {count})")


def _number(text: str, what: str, low: int, high: int) -> int:
    try:
        value = 0 if text.strip() == "0" else parse_count(text)
    except SpecError:
        value = -1
    if not low <= value <= high:
        raise SpecError(f"{what} {text!r} is not a whole number from {low:,} to {high:,}")
    return value


def _seconds(text: str) -> float:
    return number(text, "--timeout", 0.1, 1e6, "a number of seconds; write 300")
