"""The reference of the command line, from zeroplan's own Typer application."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from tests.docs.generated.markdown import code, prose, table
from zeroplan.cli.app import app
from zeroplan.cli.job_flags import FLAGS

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The parameters that describe a job. Many commands share them, so that the page lists them once.
_OF_A_JOB = frozenset({"job_file", "settings", "help_all", *(flag.field for flag in FLAGS)})


def commands() -> str:
    """Return a section for every command, with its arguments and flags."""
    return "\n".join(_section(names, command) for names, command in _all())


def job_flags() -> str:
    """Return the table of flags that describe a job, from `zeroplan estimate`."""
    estimate = dict(_all())["estimate",]
    return _flags([parameter for parameter in estimate.params if parameter.name in _OF_A_JOB])


def paths() -> list[str]:
    """Return the name of every command and subcommand."""
    return [" ".join(names) for names, _ in _all()]


def _all() -> Iterator[tuple[tuple[str, ...], Any]]:
    return _below((), typer.main.get_command(app))


def _below(names: tuple[str, ...], command: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    context = command.make_context("zeroplan", [], resilient_parsing=True)
    for name in command.list_commands(context):
        one = command.get_command(context, name)
        yield (*names, name), one
        if hasattr(one, "list_commands"):
            yield from _below((*names, name), one)


def _section(names: tuple[str, ...], command: Any) -> str:
    level = "##" if len(names) == 1 else "###"
    own = [parameter for parameter in command.params if parameter.name not in _OF_A_JOB and parameter.name != "help"]
    shared = sum(parameter.name in _OF_A_JOB for parameter in command.params)
    parts = [f"{level} zeroplan {' '.join(names)}\n", command.help + "\n", f"```text\n{_usage(names, command)}\n```\n"]
    if shared >= len(FLAGS):
        parts.append("Takes the [flags of a job](#the-flags-of-a-job).\n")
    elif shared:
        mine = ", ".join(code(_name(one)) for one in command.params if one.name in _OF_A_JOB)
        parts.append(f"Of the [flags of a job](#the-flags-of-a-job): {mine}.\n")
    return "\n".join([*parts, *([_flags(own)] if own else [])])


def _usage(names: tuple[str, ...], command: Any) -> str:
    arguments = [_name(one) for one in command.params if _is_argument(one)]
    flags = ["[OPTIONS]"] if any(not _is_argument(one) for one in command.params) else []
    below = ["COMMAND"] if hasattr(command, "list_commands") else []
    return " ".join(["zeroplan", *names, *arguments, *flags, *below])


def _flags(parameters: list[Any]) -> str:
    panels: dict[str, list[Any]] = {}
    for one in parameters:
        panels.setdefault(_panel(one), []).append(one)
    return "\n".join(
        f"**{panel}**\n\n" + table(("flag", "what"), [(_flag(one), _what(one)) for one in some])
        for panel, some in panels.items()
    )


def _panel(parameter: Any) -> str:
    return parameter.rich_help_panel or ("Arguments" if _is_argument(parameter) else "Options")


def _is_argument(parameter: Any) -> bool:
    return parameter.param_type_name == "argument"


def _name(parameter: Any) -> str:
    if _is_argument(parameter):
        return parameter.metavar or parameter.name.upper()
    return parameter.opts[-1]


def _flag(parameter: Any) -> str:
    if _is_argument(parameter):
        return code(_name(parameter))
    value = "" if parameter.is_flag else f" {parameter.metavar or 'TEXT'}"
    named = ", ".join(code(name + (value if name == parameter.opts[-1] else "")) for name in parameter.opts)
    return ", ".join([named, *map(code, parameter.secondary_opts)])


def _what(parameter: Any) -> str:
    default = parameter.default
    said = default not in (None, False, "", ()) and "(default" not in (parameter.help or "")
    parts = [prose(parameter.help or ""), f"(default: {default})" if said else ""]
    environment = getattr(parameter, "envvar", None)
    parts.append(f"(environment: `{environment}`)" if environment else "")
    return " ".join(part for part in parts if part)
