"""``zeroplan estimate``: how much memory does one GPU need for this job, when, and why?"""

from pathlib import Path
from typing import Annotated

import typer

from zeroplan.cli import NO, json_text
from zeroplan.cli.job_flags import takes_a_job
from zeroplan.errors import SpecError
from zeroplan.estimator import Estimate, estimate
from zeroplan.remedies import Remedy, remedies
from zeroplan.resolve import Resolved
from zeroplan.units import unit_named

_OUTPUT = "Output"


@takes_a_job
def estimate_command(
    *,
    resolved: Resolved,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Also every kind, pipeline rank, collective and note.", rich_help_panel=_OUTPUT),
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Every line with its formula, numbers and source.", rich_help_panel=_OUTPUT)
    ] = False,
    unit: Annotated[str, typer.Option("--unit", help="Unit of sizes as text: gib or gb.", rich_help_panel=_OUTPUT)] = "gib",
    as_json: Annotated[bool, typer.Option("--json", help="Versioned JSON.", rich_help_panel=_OUTPUT)] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Markdown.", rich_help_panel=_OUTPUT)] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 if the job does not fit its GPU.", rich_help_panel=_OUTPUT)
    ] = False,
    replay: Annotated[
        bool,
        typer.Option(
            "--replay",
            help="Replay the step's requests as CUDA's allocator: what is reserved, as a figure.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Write the step for Perfetto (ui.perfetto.dev).", rich_help_panel=_OUTPUT),
    ] = None,
    snapshot: Annotated[
        Path | None,
        typer.Option(
            "--snapshot", metavar="FILE", help="Write the step for torch's memory_viz, as a pickle.", rich_help_panel=_OUTPUT
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that are there.", rich_help_panel=_OUTPUT)] = False,
) -> int:
    """Per-GPU memory of a training job: states, activations, buffers, the peak and its moment, and what is sent."""
    if check and resolved.job.cluster.gpu is None:
        raise SpecError("--check asks whether the job fits, but no GPU is named; add --gpu NAME (`zeroplan gpus` lists them)")
    if as_json and as_markdown:
        raise SpecError("--json and --markdown are two renderings; choose one")
    sizes = unit_named(unit)
    answer = estimate(resolved.job, replay=replay or trace is not None or snapshot is not None)
    _write(answer, trace, snapshot, force=force)
    changes = remedies(answer)
    if as_json:
        typer.echo(_json(answer, resolved.notes, changes))
    elif as_markdown:
        from zeroplan.report.markdown import estimate_markdown  # noqa: PLC0415  only the rendering asked for is loaded

        typer.echo(estimate_markdown(answer, resolved.notes, changes, explain=explain))
    else:
        from zeroplan.cli.terminal import show  # noqa: PLC0415  only the rendering asked for is loaded
        from zeroplan.report.screen import COLUMNS  # noqa: PLC0415
        from zeroplan.report.text import estimate_text  # noqa: PLC0415
        from zeroplan.report.words import WIDTH  # noqa: PLC0415

        text = estimate_text(answer, resolved.notes, changes, verbose=verbose, explain=explain, unit=sizes)
        show(text, WIDTH if verbose or explain else COLUMNS)
    return NO if check and not answer.fits else 0


def _write(answer: Estimate, trace: Path | None, snapshot: Path | None, *, force: bool) -> None:
    """Write the replayed step to the files that were asked for."""
    if answer.replay is None or (trace is None and snapshot is None):
        return
    from zeroplan.replay import trace_of  # noqa: PLC0415  only what is asked for is loaded
    from zeroplan.saved_runs.perfetto import save_events  # noqa: PLC0415
    from zeroplan.saved_runs.snapshot import save_requests  # noqa: PLC0415

    requests = trace_of(answer.replay.log)
    if trace is not None:
        save_events(requests, _name(answer), Path(trace), force=force)
    if snapshot is not None:
        save_requests(requests, Path(snapshot), force=force)


def _name(answer: Estimate) -> str:
    job = answer.job
    return f"{job.model.name or job.model.family}, {job.recipe.engine}, one of {job.mesh.world_size} GPUs, estimated"


def _json(answer: Estimate, notes: tuple[str, ...], changes: tuple[Remedy, ...]) -> str:
    from zeroplan.report.payload import estimate_payload  # noqa: PLC0415  only the rendering asked for is loaded

    return json_text(estimate_payload(answer, notes, changes))
