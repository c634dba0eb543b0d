"""``zeroplan workflow NAME``: how much GPU memory does each phase of a fine-tuning loop need, and which one needs most?

Each workflow is a command with its own flags alone, made of the table of options.
"""

import inspect
from typing import Annotated, Any

import typer

from zeroplan.cli import NO, json_text
from zeroplan.cli.flags import AsJson, flag, number, switch
from zeroplan.cli.job_flags import takes_a_job
from zeroplan.cli.quick import QuickGroup, as_command
from zeroplan.errors import SpecError, unknown_name
from zeroplan.resolve import Resolved
from zeroplan.units import parse_count
from zeroplan.workflow.asked import OPTIONS, WORKFLOWS, Asked, Name, Option, flag_of

_ANSWER = {
    "explain": Annotated[bool, switch("--explain", "Every line with its source.")],
    "as_json": AsJson,
    "check": Annotated[bool, switch("--check", "Exit with 1 if a phase does not fit its GPU.")],
}


class _Workflows(QuickGroup):
    """One command per workflow, made when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ANN401, ARG002  click's context, whose home has moved
        """Return the names of the workflows."""
        return list(WORKFLOWS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ANN401, ARG002  click's context and command
        """Return the command of a workflow; raise UnknownNameError for what is none."""
        if cmd_name not in WORKFLOWS:
            raise unknown_name("workflow", cmd_name, WORKFLOWS, f"there are {', '.join(WORKFLOWS)}")
        return as_command(cmd_name, _command(cmd_name))


workflow_app = typer.Typer(cls=_Workflows, help="The phases of a fine-tuning loop that share a GPU: loading, scoring, rollouts, "
                           "training, saving.", invoke_without_command=True, no_args_is_help=False)  # fmt: skip


@workflow_app.callback()
def _workflow(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        raise SpecError(f"name a workflow, as `zeroplan workflow sft ...`: there are {', '.join(WORKFLOWS)}")


def _command(name: Name) -> Any:  # noqa: ANN401  what typer takes
    """Return the function behind a workflow, whose signature has the flags of the job and of this workflow."""
    own = {field: one for field, one in OPTIONS.items() if name in one.of}

    def command(*, resolved: Resolved, explain: bool, as_json: bool, check: bool, **said: str | bool | None) -> int:
        values = {field: _value(field, said[field]) for field in own}
        return _answered(resolved, Asked(workflow=name, **values), explain=explain, as_json=as_json, check=check)

    flags = {field: (_flag(field, one), None if one.value else False) for field, one in own.items()}
    flags |= {field: (annotation, False) for field, annotation in _ANSWER.items()}
    parameters = [inspect.Parameter("resolved", inspect.Parameter.KEYWORD_ONLY)]
    parameters += [
        inspect.Parameter(field, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for field, (annotation, default) in flags.items()
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    command.__doc__ = WORKFLOWS[name].says
    return takes_a_job(command)


def _flag(field: str, one: Option) -> Any:  # noqa: ANN401  an annotation
    panel = "Loading and saving" if set(one.of) == set(WORKFLOWS) else "Workflow"
    declared = flag(flag_of(field), one.value or None, one.says, panel=panel)
    return Annotated[str | None, declared] if one.value else Annotated[bool, declared]


def _value(field: str, text: str | bool | None) -> Any:  # noqa: ANN401  of the field's own type
    if not isinstance(text, str):
        return text or None
    if OPTIONS[field].value == "N":
        return parse_count(text, what=flag_of(field), examples="8 or 1024")
    if OPTIONS[field].value == "X":
        return number(text, flag_of(field), -1e9, 1e9, "a number; write one as 0.3")
    return text


def _answered(resolved: Resolved, asked: Asked, *, explain: bool, as_json: bool, check: bool) -> int:
    from zeroplan.workflow import loop_of  # noqa: PLC0415  help does not pay for it

    if check and resolved.job.cluster.gpu is None:
        raise SpecError("--check asks whether the phases fit, but no GPU is named; add --gpu NAME (`zeroplan gpus` lists them)")
    loop = loop_of(resolved.job, asked)
    if as_json:
        from zeroplan.report.workflow import loop_payload  # noqa: PLC0415  only the rendering asked for is loaded

        typer.echo(json_text(loop_payload(loop, resolved.notes)))
    else:
        from zeroplan.cli.terminal import show  # noqa: PLC0415  only the rendering asked for is loaded
        from zeroplan.report.workflow import loop_text  # noqa: PLC0415

        show(loop_text(loop, resolved.notes, explain=explain))
    return NO if check and loop.verdict == "does not fit" else 0
