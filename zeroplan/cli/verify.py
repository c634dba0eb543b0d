"""``zeroplan verify``: is the estimate true? Runs the real engine and holds what it took against what was predicted."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from zeroplan.cli.compare import DISAGREES, TOLERANCE, parse_tolerance
from zeroplan.cli.job_flags import takes_a_job
from zeroplan.errors import MeasurementError, SpecError
from zeroplan.resolve import Resolved
from zeroplan.units import parse_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from zeroplan.measurement import Measurement
    from zeroplan.spec.job import JobSpec

_RUN, _OUTPUT = "Run", "Output"
#: What a shell makes of SIGINT, 128 + 2.
INTERRUPTED = 130
BACKENDS = ("simulate", "cpu", "cuda")
_SETTLED = 3
"""Steps until every engine is: the first makes the optimizer's state, in the second DDP rebuilds buckets, and DeepSpeed's stage 3
first follows the trace of the first."""


def _flag(name: str, value: str | None, text: str, *, panel: str = _RUN, shown: bool = False) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(name, metavar=value, help=text, rich_help_panel=panel, show_default=shown)
    return option


_Backend = Annotated[str, _flag("--backend", "simulate|cpu", "Fake tensors, or real tensors on the CPU.", shown=True)]
_Nproc = Annotated[
    str | None,
    _flag("--nproc", "N", "cpu: real processes over gloo, one per GPU of the job. (default: one process, fake group)"),
]
_Rank = Annotated[str, _flag("--rank", "R", "Which rank to be, where one process stands for all.", shown=True)]
_Steps = Annotated[str | None, _flag("--steps", "N", "Optimizer steps; the last counts. (default: 3; FSDP2 simulated: 2)")]
_AllLayers = Annotated[bool, _flag("--all-layers", None, "simulate: run every layer instead of extending a few.")]
_Workload = Annotated[
    str | None,
    _flag("--workload", "PACKAGE.MODULE:FUNCTION", "Your own module, example batch and loss, instead of the job's model."),
]
_Timeout = Annotated[str, _flag("--timeout", "SECONDS", "How long a collective or a rank may be silent.", shown=True)]
_Tolerance = Annotated[
    str,
    _flag("--tolerance", "FRACTION", "How far peak, held bytes and collectives may be apart.", panel=_OUTPUT, shown=True),
]
_Out = Annotated[str | None, _flag("--out", "DIR", "Write the records here.", panel=_OUTPUT)]
_Json = Annotated[bool, _flag("--json", None, "Versioned JSON.", panel=_OUTPUT)]


@takes_a_job
def verify_command(
    *,
    resolved: Resolved,
    backend: _Backend = "simulate",
    nproc: _Nproc = None,
    rank: _Rank = "0",
    steps: _Steps = None,
    all_layers: _AllLayers = False,
    workload: _Workload = None,
    timeout: _Timeout = "300",
    tolerance: _Tolerance = TOLERANCE,
    out: _Out = None,
    as_json: _Json = False,
) -> int:
    """Run the job's real engine without a GPU, and hold what it took against the estimate; exit with 3 beyond the tolerance."""
    limit, ranks = parse_tolerance(tolerance), resolved.job.mesh.world_size
    asked = _Asked(
        backend=_backend(backend),
        nproc=None if nproc is None else _nproc(nproc, ranks, backend),
        rank=_number(rank, "--rank", 0, ranks - 1),
        steps=_number(steps or _steps(backend, resolved.job), "--steps", 1, 1000),
        all_layers=all_layers,
        workload=workload or "",
        timeout_s=_seconds(timeout),
    )
    from zeroplan.cli.comparing import Held, judged, printed  # noqa: PLC0415  only this command needs them

    for note in resolved.notes:
        say(f"note: {note}")
    keeper = _Keeper(None if out is None else Path(out))
    _run(resolved.job, asked, keeper.keep)
    held = tuple(Held.of(measured) for measured in sorted(keeper.kept, key=lambda measured: measured.rank))
    typer.echo(printed(held, tolerance=limit, as_json=as_json))
    return 0 if all(one.comparison.agrees(limit) for one in judged(held)) else DISAGREES


class _Asked(NamedTuple):
    """How to run, as the flags say."""

    backend: str
    nproc: int | None
    rank: int
    steps: int
    all_layers: bool
    workload: str
    timeout_s: float


class _Keeper:
    """Collects records as they come, and writes each at once where a folder was named."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self.kept: list[Measurement] = []

    def keep(self, measured: "Measurement") -> None:
        self.kept.append(measured)
        if self._folder is not None:
            from zeroplan.verify.record import write_record  # noqa: PLC0415  only a run pays for it

            say(f"record: {write_record(measured, self._folder)}")


def say(text: str) -> None:
    """Progress and what went wrong on the way: beside the answer, not in it."""
    print(text, file=sys.stderr, flush=True)


def _run(job: "JobSpec", asked: _Asked, keep: "Callable[[Measurement], None]") -> None:
    if job.recipe.engine == "paper":
        raise SpecError("engine 'paper' is an account on paper, there is nothing to run; use --engine ddp, fsdp2 or deepspeed")
    if job.model.profile is not None and not asked.workload:
        raise SpecError("a profile says what a module takes, and is no module; name it with --workload PACKAGE.MODULE:FUNCTION")
    _require(job)
    if asked.backend == "simulate":
        say(f"simulating rank {asked.rank} of {job.mesh.world_size:,}")
    _launch(job, asked, keep)


def _launch(job: "JobSpec", asked: _Asked, keep: "Callable[[Measurement], None]") -> None:
    """Run in processes of their own: torch is patched there, printed to, killed, and nothing of it is left here."""
    from zeroplan.verify.launch import launch  # noqa: PLC0415  only a run pays for it
    from zeroplan.verify.task import Task  # noqa: PLC0415

    task = Task(
        job=job,
        transport="fake" if asked.nproc is None else "gloo",
        tensors="cpu" if asked.backend == "cpu" else "fake",
        all_layers=asked.all_layers,
        rank=asked.rank if asked.nproc is None else None,
        steps=asked.steps,
        workload=asked.workload,
        timeout_s=asked.timeout_s,
    )
    launch(task, keep=keep, say=say)


def _require(job: "JobSpec") -> None:
    """Refuse, with the extra to install, what is not there; nothing is imported."""
    needed = {"torch": "verify", "transformers": "verify"}
    if job.recipe.engine == "deepspeed":
        needed["deepspeed"] = "deepspeed"
    if job.model.adapter is not None:
        needed["peft"] = "verify"
        if job.model.adapter.quantize != "none":
            needed["bitsandbytes"] = "verify"
    for package, extra in needed.items():
        if find_spec(package) is None:
            raise MeasurementError(f"{package} is not installed, and the engine needs it: pip install 'zeroplan[{extra}]'")


def _backend(name: str) -> str:
    if name not in BACKENDS:
        raise SpecError(f"--backend {name!r} is none of {', '.join(BACKENDS)}")
    if name == "cuda":
        raise MeasurementError(
            "backend cuda, real GPUs, is not part of this version; use --backend simulate, or cpu for a small model"
        )
    return name


def _steps(backend: str, job: "JobSpec") -> str:
    return "2" if backend == "simulate" and job.recipe.engine == "fsdp2" else str(_SETTLED)


def _nproc(text: str, ranks: int, backend: str) -> int:
    if backend != "cpu":
        raise SpecError(f"--nproc {text} goes with --backend cpu; backend {backend} runs in one process")
    count = _number(text, "--nproc", 1, 10**4)
    if count != ranks:
        raise SpecError(f"--nproc {count} does not fit the job's {ranks:,} GPUs; each process is one of them (--gpus {count})")
    return count


def _number(text: str, what: str, low: int, high: int) -> int:
    value = 0 if text.strip() == "0" else parse_count(text, what=what)
    if not low <= value <= high:
        raise SpecError(f"{what} {text} is not from {low:,} to {high:,}")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.1 <= value <= 1e6:
        raise SpecError(f"--timeout {text!r} is not a number of seconds; write 300")
    return value
