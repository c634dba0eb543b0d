"""``zeroplan dryrun``: what would my own training script take? Runs it as one rank of N, without a GPU."""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from zeroplan.cli import NO, json_text
from zeroplan.cli.compare import TOLERANCE, parse_tolerance
from zeroplan.cli.dryrun_files import Wanted, printable, saved_at, show_saved
from zeroplan.cli.dryrun_on_card import Asked, Limits, on_card, refuse_beside
from zeroplan.cli.dryrun_task import ANY_GPU, Ranks, dry_run_of
from zeroplan.dryrun.command import read_command
from zeroplan.errors import SpecError
from zeroplan.units import Unit, unit_named

if TYPE_CHECKING:
    from zeroplan.script_run import DryRun
    from zeroplan.script_trace import SavedRun

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
    gpu: Annotated[
        str | None, _flag("--gpu", "NAME", f"The GPU, from the catalogue (`zeroplan gpus`). (default: {ANY_GPU})")
    ] = None,
    per_node: Annotated[str | None, _flag("--gpus-per-node", "N", "Ranks on a node. (default: the GPU's usual server)")] = None,
    rank: Annotated[str | None, _flag("--as-rank", "R", "Which rank to be. (default: 0)", short="--rank")] = None,
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
    backend: Annotated[
        str,
        _flag(
            "--backend",
            "fake|cuda",
            "cuda: run the script on this machine's GPUs too, and compare the dry run with what they count.",
            shown=True,
        ),
    ] = "fake",
    tolerance: Annotated[
        str, _flag("--tolerance", "FRACTION", "With --backend cuda: how far the two may be apart; 3 beyond it.", shown=True)
    ] = TOLERANCE,
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
        str | None,
        _flag(
            "--against",
            "FILE",
            "Say what changed since a saved run, in place of the answer. With --backend cuda: the dry run to compare with.",
            panel=_OUTPUT,
        ),
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
    before, how = None if against is None else saved_at(against), Ranks(gpus, gpu, per_node, rank, steps or "2")
    if backend != "fake":
        limits = Limits(backend, parse_tolerance(tolerance), _seconds(timeout))
        refuse_beside(
            limits, {"--show": show, "--profile": profile, "--check": check, "--until-end": until_end}, wanted, against
        )
        asked = Asked(read_command(command or []), how, limits, imbalance=_times(imbalance), eager=eager, quiet=quiet)
        return on_card(asked, wanted, None if before is None else (str(against), before), sizes, as_json=as_json)
    if show is not None:
        found = show_saved(show, command)
    else:
        task = replace(how.task(read_command(command or [])), traced=bool(wanted.named or before), eager=eager)
        task = replace(task, imbalance=_times(imbalance), profiled=profile)  # type: ignore[arg-type]  # it is one of two
        task = replace(task, until_end=int(_seconds(timeout)) if until_end else 0)
        found = dry_run_of(task, _seconds(timeout), quiet=quiet)
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
