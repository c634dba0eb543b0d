"""``zeroplan dryrun``: what would my own training script take? Runs it as one rank of N, without a GPU."""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from zeroplan.cli import NO, json_text, say
from zeroplan.cli.dryrun_files import Wanted, printable, saved_at, show_saved
from zeroplan.dryrun.command import Command, read_command
from zeroplan.dryrun.task import DryRunTask
from zeroplan.errors import MeasurementError, SpecError
from zeroplan.installation import not_installed
from zeroplan.units import Unit, parse_count, unit_named

if TYPE_CHECKING:
    from zeroplan.script_run import DryRun
    from zeroplan.script_trace import SavedRun

_MOST_GPUS = 1_000_000
_RUN, _OUTPUT = "The run", "Output"


def _flag(
    name: str, value: str, text: str, *, panel: str = _RUN, shown: bool = False, short: str = ""
) -> typer.models.OptionInfo:
    names = (name, short) if short else (name,)
    option: typer.models.OptionInfo = typer.Option(*names, metavar=value, help=text, rich_help_panel=panel, show_default=shown)
    return option


def _switch(name: str, text: str, *, short: str = "", panel: str = _OUTPUT) -> typer.models.OptionInfo:
    names = (name, short) if short else (name,)
    option: typer.models.OptionInfo = typer.Option(*names, help=text, rich_help_panel=panel)
    return option


def dryrun_command(
    *,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- COMMAND", help="The script and its arguments, -m module, torchrun …, accelerate launch …, deepspeed …"
        ),
    ] = None,
    gpus: Annotated[str | None, _flag("--gpus", "N", "Ranks in all. (default: what the launcher says, else 1)")] = None,
    gpu: Annotated[str, _flag("--gpu", "NAME", "The GPU, from the catalogue (`zeroplan gpus`).", shown=True)] = "h100-sxm-80gb",
    per_node: Annotated[str | None, _flag("--gpus-per-node", "N", "Ranks on a node. (default: the GPU's usual server)")] = None,
    rank: Annotated[str, _flag("--as-rank", "R", "Which rank to be.", shown=True, short="--rank")] = "0",
    steps: Annotated[str | None, _flag("--steps", "N", "Optimizer steps; then the script is stopped. (default: 2)")] = None,
    until_end: Annotated[
        bool,
        _switch(
            "--until-end", "Do not stop: run to the script's own end or to --timeout, evaluation and saving too.", panel=_RUN
        ),
    ] = False,
    eager: Annotated[bool, _switch("--eager", "Leave torch.compile out.", panel=_RUN)] = False,
    imbalance: Annotated[
        str, _flag("--imbalance", "X", "This rank's experts receive X times the even share of tokens.", shown=True)
    ] = "1",
    timeout: Annotated[str, _flag("--timeout", "SECONDS", "How long the script may run.", shown=True)] = "600",
    verbose: Annotated[bool, _switch("--verbose", "Every module, line, step, collective and note.", short="-v")] = False,
    quiet: Annotated[bool, _switch("--quiet", "Leave out what the script prints.", short="-q")] = False,
    show: Annotated[str | None, _flag("--show", "FILE", "Show a saved run again, and run nothing.", panel=_OUTPUT)] = None,
    save: Annotated[
        str | None, _flag("--save", "FILE", "Keep the run with every block of memory; .gz compresses it.", panel=_OUTPUT)
    ] = None,
    profile: Annotated[
        str | None,
        _flag(
            "--profile",
            "own|all",
            "Save a profile of the model, too, for --from-run of estimate, advise and plan: as the script "
            "executes it, or for other engines and recomputation as well.",
            panel=_OUTPUT,
        ),
    ] = None,
    against: Annotated[
        str | None, _flag("--against", "FILE", "Say what changed since a saved run, in place of the answer.", panel=_OUTPUT)
    ] = None,
    snapshot: Annotated[
        str | None, _flag("--snapshot", "FILE", "A memory snapshot, for pytorch.org/memory_viz.", panel=_OUTPUT)
    ] = None,
    trace: Annotated[
        str | None, _flag("--trace", "FILE", "Memory by kind, phases and collectives, for ui.perfetto.dev.", panel=_OUTPUT)
    ] = None,
    force: Annotated[bool, _switch("--force", "Write over files that are there.")] = False,
    unit: Annotated[str, _flag("--unit", "gib|gb", "Unit of sizes as text.", panel=_OUTPUT, shown=True)] = "gib",
    as_json: Annotated[bool, _switch("--json", "Versioned JSON.")] = False,
    check: Annotated[bool, _switch("--check", "Exit with 1 if the script does not fit its GPU.")] = False,
) -> int:
    """Run your own training script as one rank of N without a GPU, and say what it takes: zeroplan dryrun --gpus 8 -- train.py

    It runs the code that you name, as you would run it. The script prints to standard error, the answer goes to standard output.
    """
    sizes, wanted = unit_named(unit), Wanted(save, snapshot, trace, force)
    wanted.refuse()
    _refuse_profile(profile, save)
    if until_end and (steps or profile):
        raise SpecError(f"--until-end and {'--steps' if steps else '--profile'} exclude each other; leave one of them out")
    before = None if against is None else saved_at(against)
    if show is not None:
        found = show_saved(show, command)
    else:
        task = _task(read_command(command or []), gpus, gpu, per_node, rank, steps or "2")
        task = replace(task, traced=bool(wanted.named or before), eager=eager)
        task = replace(task, imbalance=_times(imbalance), profiled=profile)  # type: ignore[arg-type]  # it is one of two
        task = replace(task, until_end=int(_seconds(timeout)) if until_end else 0)
        found = _run(task, _seconds(timeout), quiet=quiet)
    wanted.write(found)
    if before is not None:
        typer.echo(_changed(before, found, str(against), sizes, as_json=as_json))
    else:
        typer.echo(_answered(found.run, sizes, verbose=verbose, as_json=as_json))
    from zeroplan.report.dryrun import fits  # noqa: PLC0415  start-up is part of every command's time

    return NO if check and not fits(found.run) else 0


def _refuse_profile(profile: str | None, save: str | None) -> None:
    if profile not in (None, "own", "all"):
        raise SpecError(f"--profile {profile!r} is none of own, all")
    if profile is not None and save is None:
        raise SpecError(f"--profile {profile} goes into the file of a saved run; add --save FILE")


def _answered(run: "DryRun", sizes: Unit, *, verbose: bool, as_json: bool) -> str:
    from zeroplan.report.dryrun import dry_run_text  # noqa: PLC0415  as above

    return json_text(asdict(run)) if as_json else printable(dry_run_text(run, verbose=verbose, unit=sizes))


def _changed(before: "SavedRun", after: "SavedRun", where: str, sizes: Unit, *, as_json: bool) -> str:
    from zeroplan.report.dryrun_changes import changes, changes_text  # noqa: PLC0415  as above

    if not as_json:
        return printable(changes_text(before, after, where=where, unit=sizes))
    rows = [row._asdict() | {"change_bytes": row.change_bytes} for row in changes(before, after)]
    return json_text({"schema_version": 1, "against": where, "changes": rows, "run": asdict(after.run)})


def _run(task: DryRunTask, seconds: float, *, quiet: bool) -> "SavedRun":
    if lacking := not_installed("torch", by="a dry run"):
        raise MeasurementError(lacking)
    from zeroplan.dryrun.launch import dry_run  # noqa: PLC0415  as above

    if not quiet:
        until = "to its own end" if task.until_end else f"to {task.steps} optimizer steps"
        say(f"running {task.target} as rank {task.rank} of {task.gpus:,}, {until}")
    return dry_run(task, timeout_s=seconds, quiet=quiet)


def _task(found: Command, gpus: str | None, gpu: str, per_node: str | None, rank: str, steps: str) -> DryRunTask:
    from zeroplan.catalog.gpu import gpu as gpu_named  # noqa: PLC0415  as above

    kind = gpu_named(gpu)
    if kind.vendor != "nvidia":
        raise SpecError(f"--gpu {gpu!r} is no NVIDIA GPU; a dry run knows CUDA alone")
    per_node = per_node or str(found.gpus_per_node or kind.gpus_per_node)
    ranks = parse_count(gpus, what="--gpus") if gpus is not None else found.gpus or 1
    if not 1 <= ranks <= _MOST_GPUS:
        raise SpecError(f"--gpus {gpus!r} is not a number of ranks from 1 to {_MOST_GPUS:,}")
    return DryRunTask(
        target=found.target, module=found.module, arguments=found.arguments, gpus=ranks, gpu=kind.name, answer="answer.json",
        gpus_per_node=_number(per_node, "--gpus-per-node", 1, 1024), rank=_number(rank, "--as-rank", 0, ranks - 1),
        steps=_number(steps, "--steps", 1, 1000),
    )  # fmt: skip


def _number(text: str, what: str, low: int, high: int) -> int:
    if not text.strip().isdecimal() or not low <= int(text) <= high:
        raise SpecError(f"{what} {text!r} is not a whole number from {low:,} to {high:,}")
    return int(text)


def _times(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value <= 1e6:
        raise SpecError(f"--imbalance {text!r} is not a factor from 1 on; write 1.5")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 1 <= value <= 1e6:
        raise SpecError(f"--timeout {text!r} is not a number of seconds from 1 on; write 600")
    return value
