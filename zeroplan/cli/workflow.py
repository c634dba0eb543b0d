"""``zeroplan workflow NAME``: how much GPU memory does each phase of a fine-tuning loop need? Each loop has its own flags."""

import inspect
from typing import Annotated, Any

import typer

from zeroplan.cli import NO, json_text
from zeroplan.cli.flags import AsJson, flag, number, switch
from zeroplan.cli.job_flags import keyword, takes_a_job
from zeroplan.cli.quick import as_command, group_of
from zeroplan.errors import SpecError
from zeroplan.resolve import Resolved
from zeroplan.units import parse_count
from zeroplan.workflow.asked import OPTIONS, WORKFLOWS, Asked, Option, flag_of

_ANSWER = {
    "explain": Annotated[bool, switch("--explain", "Every line with its source.")],
    "as_json": AsJson,
    "check": Annotated[bool, switch("--check", "Exit with 1 if a phase does not fit its GPU.")],
}


def _command(name: Any) -> Any:  # noqa: ANN401  a Name, and click's command
    """Return the command of a workflow, with the flags of the job and of this workflow."""
    own = {field: one for field, one in OPTIONS.items() if name in one.of}

    def command(*, resolved: Resolved, explain: bool, as_json: bool, check: bool, **said: str | bool | None) -> int:
        of_file = resolved.loop if resolved.loop.get("workflow") == name else {}
        values = {field: _value(field, flag_of(field, name), said[field]) for field in own}
        values = {field: of_file.get(field) if value is None else value for field, value in values.items()}
        return _answered(resolved, Asked(workflow=name, **values), explain=explain, as_json=as_json, check=check)

    flags = {field: (_flag(flag_of(field, name), one), None if one.value else False) for field, one in own.items()}
    flags |= {"resolved": (Resolved, None), **{field: (annotation, False) for field, annotation in _ANSWER.items()}}
    parameters = [keyword(field, *said) for field, said in flags.items()]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    command.__doc__ = WORKFLOWS[name].says
    return as_command(name, takes_a_job(command, in_pairs=WORKFLOWS[name].sequences > 1))


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


def _answered(resolved: Resolved, asked: Asked, *, explain: bool, as_json: bool, check: bool) -> int:
    from zeroplan.workflow import loop_of  # noqa: PLC0415  --help does not need it

    if check and resolved.job.cluster.gpu is None:
        raise SpecError("--check needs a GPU to compare with; add --gpu NAME (`zeroplan gpus` lists them)")
    loop = loop_of(resolved.job, asked)
    if as_json:
        from zeroplan.report.workflow import loop_payload  # noqa: PLC0415  only the rendering asked for is loaded

        typer.echo(json_text(loop_payload(loop, resolved.notes)))
    else:
        from zeroplan.cli.terminal import show  # noqa: PLC0415  only the rendering asked for is loaded
        from zeroplan.report.workflow import loop_text  # noqa: PLC0415

        show(loop_text(loop, resolved.notes, explain=explain))
    return NO if check and loop.verdict == "does not fit" else 0


workflow_app = group_of("workflow", tuple(WORKFLOWS), _command, "Estimate each phase of a fine-tuning loop on shared GPUs: "
                        "loading, scoring, rollouts, training.")  # fmt: skip
