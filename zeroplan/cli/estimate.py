"""``zeroplan estimate``: how much memory does one GPU need for this job, when, and why?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from zeroplan.cli import NO, json_text, say
from zeroplan.cli.flags import AsJson, AsMarkdown, Force, UnitName, flag, refuse_two_renderings, switch, with_fields
from zeroplan.cli.job_flags import with_job_flags
from zeroplan.errors import SpecError
from zeroplan.estimator import Estimate, estimate, replayed_if_tight
from zeroplan.resolve import Resolved
from zeroplan.units import unit_named

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zeroplan.remedies import Longest, Remedy
    from zeroplan.report.checks import Beside


class Flags(NamedTuple):
    """The values as typed: the format of the answer, and the files to write for a replayed step."""

    verbose: Annotated[bool, switch("--verbose", "Also print every kind, pipeline rank, collective and note.", short="-v")] = (
        False
    )
    explain: Annotated[bool, switch("--explain", "Print every line with its formula, numbers and source.")] = False
    unit: UnitName = "gib"
    as_json: AsJson = False
    as_markdown: AsMarkdown = False
    check: Annotated[bool, switch("--check", "Exit with 1 if the job does not fit its GPU.")] = False
    replay: Annotated[
        bool,
        switch(
            "--replay",
            "Replay the step's requests through a model of CUDA's allocator: one figure for reserved memory, not a range.",
        ),
    ] = False
    max_seq: Annotated[
        bool, switch("--max-seq", "Also find the longest sequences that fit the GPU, with everything else as it is.")
    ] = False
    trace: Annotated[str | None, flag("--trace", "FILE", "Write the step for Perfetto (ui.perfetto.dev).")] = None
    snapshot: Annotated[str | None, flag("--snapshot", "FILE", "Write the step for torch's memory_viz, as a pickle.")] = None
    force: Force = False

    @property
    def wanted(self) -> bool:
        """Whether any file was requested."""
        return self.trace is not None or self.snapshot is not None

    def refuse(self) -> None:
        """Raise SpecError for --force without a file."""
        if self.force and not self.wanted:
            raise SpecError(
                "--force overwrites a file, but no flag writes one; add --trace FILE or --snapshot FILE, or leave --force out"
            )

    def write(self, answer: Estimate) -> None:
        """Write the requested files."""
        if answer.replay is None or not self.wanted:
            return
        from zeroplan.replay import trace_of  # noqa: PLC0415  imports only what was requested
        from zeroplan.saved_runs.perfetto import save_events  # noqa: PLC0415
        from zeroplan.saved_runs.snapshot import save_requests  # noqa: PLC0415

        requests = trace_of(answer.replay.log)
        if self.trace is not None:
            save_events(requests, _name(answer), Path(self.trace), force=self.force)
        if self.snapshot is not None:
            save_requests(requests, Path(self.snapshot), force=self.force)

    def show(self, answer: Estimate, resolved: Resolved, changes: "tuple[Remedy, ...]", longest: "Longest | None") -> None:
        """Print the answer."""
        notes, lengths, lines = resolved.notes, None, _in_words(longest)
        if resolved.varying is not None:
            from zeroplan.report.lengths import lengths_lines, lengths_payload  # noqa: PLC0415  only lengths that vary pay for it
            from zeroplan.step_peaks import step_peaks  # noqa: PLC0415

            found = step_peaks(answer, resolved.varying)
            lines, lengths = lengths_lines(found, unit_named(self.unit)), lengths_payload(found)
        if self.as_json:
            typer.echo(_json(answer, notes, changes, lengths, longest))
        elif self.as_markdown:
            from zeroplan.report.markdown import estimate_markdown  # noqa: PLC0415  only the chosen rendering is loaded

            typer.echo(estimate_markdown(answer, notes, changes, explain=self.explain, lengths=lines))
        else:
            self._show_text(answer, notes, changes, lines)

    def _show_text(
        self, answer: Estimate, notes: tuple[str, ...], changes: "tuple[Remedy, ...]", lengths: tuple[str, ...]
    ) -> None:
        from zeroplan.cli.terminal import show  # noqa: PLC0415  only the chosen rendering is loaded
        from zeroplan.report.text import estimate_text  # noqa: PLC0415
        from zeroplan.report.words import COLUMNS, WIDTH  # noqa: PLC0415

        how = {"verbose": self.verbose, "explain": self.explain}
        text = estimate_text(answer, notes, changes, **how, unit=unit_named(self.unit), lengths=lengths)
        show(text, WIDTH if self.verbose or self.explain else COLUMNS)


@with_job_flags
@with_fields
def estimate_command(*, resolved: Resolved, flags: Flags) -> int:
    """Estimate the memory of each GPU: does the job fit, when is the peak, and what is alive then?"""
    unit_named(flags.unit)
    refuse_two_renderings(as_json=flags.as_json, as_markdown=flags.as_markdown)
    flags.refuse()
    if flags.check and resolved.job.cluster.gpu is None:
        raise SpecError("--check needs a GPU to compare with; add --gpu NAME (`zeroplan gpus` lists them)")
    longest = _longest(resolved) if flags.max_seq else None
    answer = replayed_if_tight(estimate(resolved.job, replay=flags.replay or flags.wanted))
    flags.write(answer)
    loop = _loop(resolved)
    in_short = not (flags.verbose or flags.explain or flags.as_json or flags.as_markdown)
    if loop is not None and not in_short:
        resolved = resolved._replace(notes=(loop.says, *resolved.notes))
    flags.show(answer, resolved, _changes(answer, resolved.keys), longest)
    if loop is not None and in_short:
        say(loop.says)
    return NO if flags.check and not (_passes(answer) and (loop is None or loop.fits)) else 0


def _changes(answer: Estimate, keys: "Mapping[str, str]") -> "tuple[Remedy, ...]":
    """Return changes that make the job fit, if it does not."""
    if answer.fits is not False:
        return ()
    from zeroplan.remedies import in_keys, remedies  # noqa: PLC0415  few jobs need them

    return in_keys(remedies(answer), keys)


def _longest(resolved: Resolved) -> "Longest":
    """Return the longest sequences that fit; raises SpecError without a GPU, or with lengths that vary."""
    from zeroplan.remedies import longest_sequences  # noqa: PLC0415  only this flag pays for it

    if resolved.varying is not None:
        raise SpecError("--max-seq is for sequences of one length; leave --lengths out")
    return longest_sequences(resolved.job)


def _passes(answer: Estimate) -> bool:
    from zeroplan.report.checks import passes  # noqa: PLC0415  only a check pays for it

    return passes(answer)


def _loop(resolved: Resolved) -> "Beside | None":
    """Return the verdict of the fine-tuning loop that the user's file describes; None if it describes none."""
    if not resolved.loop:
        return None
    from zeroplan.report.checks import loop_beside  # noqa: PLC0415  few files have a loop

    return loop_beside(resolved.job, resolved.loop)


def _in_words(longest: "Longest | None") -> tuple[str, ...]:
    if longest is None:
        return ()
    from zeroplan.remedies import longest_sentence  # noqa: PLC0415  only a flag pays for it

    return (longest_sentence(longest),)


def _name(answer: Estimate) -> str:
    job = answer.job
    return f"{job.model.name or job.model.family}, {job.recipe.engine}, one of {job.mesh.world_size} GPUs, estimated"


def _json(
    answer: Estimate,
    notes: tuple[str, ...],
    changes: "tuple[Remedy, ...]",
    lengths: dict[str, object] | None,
    longest: "Longest | None",
) -> str:
    from zeroplan.report.payload import estimate_payload  # noqa: PLC0415  only the chosen rendering is loaded

    return json_text(estimate_payload(answer, notes, changes, lengths, longest))
