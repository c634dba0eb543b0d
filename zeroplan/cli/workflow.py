"""``zeroplan workflow NAME``: how much GPU memory does each phase of a fine-tuning loop need? Each loop has its own flags."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from zeroplan.cli import NO, json_text
from zeroplan.cli.flags import AsJson, Force, described, flag, keyword, number, switch
from zeroplan.cli.job_flags import with_job_flags
from zeroplan.cli.quick import as_command, group_of
from zeroplan.errors import SpecError
from zeroplan.resolve import Resolved
from zeroplan.resolve.padding import with_padding
from zeroplan.spec.job import JobSpec
from zeroplan.units import parse_count
from zeroplan.workflow.options import OPTIONS, WORKFLOWS, Option, WorkflowOptions, flag_of

if TYPE_CHECKING:
    from zeroplan.workflow import Loop

_ANSWER = {
    "explain": Annotated[bool, switch("--explain", "Every line with its source.")],
    "as_json": AsJson,
    "check": Annotated[bool, switch("--check", "Exit with 1 if a phase does not fit its GPU.")],
    "out": Annotated[str | None, flag("-o", "FILE", "Also draw the phases: a .png, .svg or .pdf.", short="--out")],
    "theme": Annotated[str, flag("--theme", "light|dark", "Colours for a light or a dark page.", shown=True)],
    "force": Force,
}
_DEFAULTS: dict[str, Any] = {"out": None, "theme": "light"}
"""The other flags of the answer are switches."""


def _command(name: Any) -> Any:  # noqa: ANN401  a Name, and click's command
    """Return the command of a workflow, with the flags of the job and of this workflow."""
    own = {field: one for field, one in OPTIONS.items() if name in one.of}

    def command(
        *, resolved: Resolved, explain: bool, as_json: bool, check: bool, out: str | None, theme: str, force: bool,
        **said: str | bool | None,
    ) -> int:  # fmt: skip
        mine = {field: _value(field, flag_of(field, name), said[field]) for field in own}
        values: dict[str, Any] = {field: resolved.loop.get(field) if value is None else value for field, value in mine.items()}
        options = WorkflowOptions(workflow=name, **values, **_of_the_file_alone(resolved, name))
        is_step = _is_the_step(resolved, options, any(mine.get(field) is not None for field in _OF_THE_STEP))
        picture = _Picture(out, theme, force)
        picture.refuse(as_json=as_json)
        loop, notes = _answered(resolved, options, is_step=is_step, check=check)
        _shown(loop, notes, explain=explain, as_json=as_json)
        picture.draw(loop)
        return NO if check and loop.verdict == "does not fit" else 0

    flags = {field: (_flag(flag_of(field, name), one), None if one.value else False) for field, one in own.items()}
    flags |= {"resolved": (Resolved, None)}
    answer = {field: (annotation, _DEFAULTS.get(field, False)) for field, annotation in _ANSWER.items()}
    parameters = [keyword(field, *said) for field, said in (flags | answer).items()]
    return as_command(name, with_job_flags(described(command, parameters, WORKFLOWS[name].says)))


def _of_the_file_alone(resolved: Resolved, name: Any) -> dict[str, Any]:  # noqa: ANN401  a Name; of the fields' own types
    """Return what a file of this loop says that no flag does, such as whether a reference model stays on the GPU."""
    if resolved.loop.get("workflow") != name:
        return {}
    return {field: one for field, one in resolved.loop.items() if field not in (*OPTIONS, "workflow", "alone")}


_OF_THE_STEP = ("full_logits", "max_completion_length", "ppo_max_token_len_per_gpu")
"""Options that change the training step, and not only what is beside it."""


def _is_the_step(resolved: Resolved, options: WorkflowOptions, changed: bool) -> bool:
    """Whether the resolved job is the loop's training step, as a file has it; raises SpecError for a file of another loop."""
    own = resolved.loop.get("workflow")
    if own not in (None, options.workflow):
        raise SpecError(f"the file is of a loop that `zeroplan workflow {own}` lists, not of {options.workflow}; use that")
    return own is not None and not changed


def _flag(called: str, one: Option) -> Any:  # noqa: ANN401  an annotation
    panel = "Loading and saving" if set(one.of) == set(WORKFLOWS) else "Workflow"
    declared = flag(called, one.value or None, one.says, panel=panel)
    return Annotated[str | None, declared] if one.value else Annotated[bool, declared]


def _value(field: str, called: str, text: str | bool | None) -> Any:  # noqa: ANN401  of the field's own type
    if not isinstance(text, str):
        return text or None
    if OPTIONS[field].value == "N":
        return parse_count(text, what=called, examples="8 or 1024")
    if OPTIONS[field].value == "X":
        return number(text, called, -1e9, 1e9, "a number; write one as 0.3")
    return text


class _Picture(NamedTuple):
    """The picture of the phases, if one was requested."""

    out: str | None
    theme: str
    force: bool

    def refuse(self, *, as_json: bool) -> None:
        """Raise SpecError, before anything is computed, for a picture that could not be written."""
        if self.out is not None and as_json:
            raise SpecError("--json prints data and -o draws a picture; leave one of them out")
        if self.out is not None or self.force:
            from zeroplan.cli.plotting import Where  # noqa: PLC0415  only pictures need it

            Where(self.out, self.theme, force=self.force).check()

    def draw(self, loop: "Loop") -> None:
        """Write the picture."""
        if self.out is None:
            return
        from zeroplan.cli.plotting import Where, drawn  # noqa: PLC0415  only pictures need it
        from zeroplan.report.series.phases import phases  # noqa: PLC0415

        drawn("phases", phases(loop), Where(self.out, self.theme, force=self.force))


def _answered(resolved: Resolved, options: WorkflowOptions, *, is_step: bool, check: bool) -> tuple["Loop", tuple[str, ...]]:
    from zeroplan.workflow.loop import loop_of_step, step_of  # noqa: PLC0415  --help does not need it

    if check and resolved.job.cluster.gpu is None:
        raise SpecError("--check needs a GPU to compare with; add --gpu NAME (`zeroplan gpus` lists them)")
    job, pairs = resolved.job, resolved.pairs and WORKFLOWS[options.workflow].sequences > 1
    if pairs and not is_step:  # step_of makes two sequences of a pair
        job = replace(job, batch=replace(job.batch, micro_batch_size=job.batch.micro_batch_size // 2))
    step, padding = _padded(job if is_step else step_of(job, options), resolved, options)
    notes = (*resolved.notes, *_another_loss(job.recipe.loss, step.recipe.loss, options), padding)
    return loop_of_step(step, options), tuple(dict.fromkeys(filter(None, notes)))  # a note on padding may be there already


def _shown(loop: "Loop", notes: tuple[str, ...], *, explain: bool, as_json: bool) -> None:
    if as_json:
        from zeroplan.report.workflow import loop_payload  # noqa: PLC0415  only the chosen rendering is loaded

        typer.echo(json_text(loop_payload(loop, notes)))
        return
    from zeroplan.cli.terminal import show  # noqa: PLC0415  only the chosen rendering is loaded
    from zeroplan.report.workflow import loop_text  # noqa: PLC0415

    show(loop_text(loop, notes, explain=explain))


def _padded(step: JobSpec, resolved: Resolved, options: WorkflowOptions) -> tuple[JobSpec, str]:
    """Return the step with padding if its trainer pads sequences, and a note. Without a file TRL's do and verl's do not."""
    pads = options.workflow != "ppo" if resolved.pads is None else resolved.pads
    padded = True if step.recipe.padded else resolved.padded
    return with_padding(step, padded=padded, varying=resolved.varying, trainer_pads=pads)


def _another_loss(of_job: str, counted: str, options: WorkflowOptions) -> tuple[str, ...]:
    """A note if the trainer computes another loss than the job's."""
    if of_job == counted:
        return ()
    if WORKFLOWS[options.workflow].log_probs != "tiles":
        return (f"this trainer has a loss of its own; `zeroplan estimate` counts {of_job}",)
    instead = ", and --full-logits makes this command count it" if options.workflow in OPTIONS["full_logits"].of else ""
    return (f"this trainer's loss is {counted}; `zeroplan estimate` counts {of_job} unless you add --loss {counted}{instead}",)


workflow_app = group_of("workflow", tuple(WORKFLOWS), _command, "Estimate each phase of a fine-tuning loop on shared GPUs: "
                        "loading, scoring, rollouts, training.")  # fmt: skip
