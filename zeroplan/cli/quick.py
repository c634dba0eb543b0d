"""Makes commands start fast: no pydantic adapters for parameters, and no import of commands that do not run.

All parameters are texts, switches or lists of texts, which the specs check. Recent releases of typer build a pydantic adapter
per parameter before a command runs, which takes as long as everything else together. Here parameters skip that step. Older
releases of typer do not have it.

A command is imported when it is requested, since declaring the flags of all commands takes longer than most answers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from zeroplan.errors import SpecError, unknown_name


class _AsTyped:
    """Replaces typer's conversion of a parameter: the value is the typed text."""

    def coerce(self, value: object, **_: object) -> object:
        """Return the value unchanged."""
        return tuple(value) if isinstance(value, list) else value


class QuickCommand(TyperCommand):
    """A typer command without conversions. Its ``--help`` leaves out rarely needed flags; ``--help-all`` has all."""

    @property
    def rarely_needed(self) -> frozenset[str]:
        """Flags that ``--help`` only names and ``--help-all`` explains."""
        return getattr(self.callback, "rarely_needed", frozenset())

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401  click's context and formatter
        """Write the help; after ``--help-all`` for all flags."""
        left_out = [] if ctx.meta.get(ALL_FLAGS) else [one for one in self.params if self.rarely_needed & set(one.opts)]
        epilog, self.epilog = self.epilog, _more_flags(_called(ctx), left_out) or self.epilog
        for one in left_out:
            one.hidden = True  # type: ignore[attr-defined]  # of an option
        try:
            super().format_help(ctx, formatter)
        finally:
            self.epilog = epilog
            for one in left_out:
                one.hidden = False  # type: ignore[attr-defined]  # as above

    def get_params(self, ctx: Any) -> list[Any]:  # noqa: ANN401  click's context, whose module has moved
        """Return the parameters, --help included, without typer's conversions."""
        return _as_typed(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401  as above
        """Parse, and add the context to errors that lack it: those about a flag without its value."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if getattr(error, "ctx", ctx) is None:
                error.ctx = ctx  # type: ignore[attr-defined]  # the parser's own
            raise


ALL_FLAGS = "zeroplan: the help of all flags"
"""The key in a context's ``meta`` that says that ``--help-all`` was given."""


def _called(context: Any) -> str:  # noqa: ANN401  click's context, whose home has moved
    """Return the command as a user types it, however the program was started."""
    names: list[str] = []
    while context.parent is not None:
        names, context = [context.info_name, *names], context.parent
    return " ".join(["zeroplan", *names])


def _more_flags(command: str, left_out: list[Any]) -> str:
    """Return a paragraph on ``--help-all``, and one paragraph with the names of flags per panel."""
    panels: dict[str, list[str]] = {}
    for one in left_out:
        panels.setdefault(one.rich_help_panel or "Options", []).append(one.opts[0])
    named = (f"{panel.partition(' (')[0]}: {' '.join(flags)}" for panel, flags in panels.items())
    return "\n\n".join((f"More flags, which `{command} --help-all` explains:", *named)) if panels else ""


class QuickGroup(TyperGroup):
    """A group of commands without typer's conversions."""

    def get_params(self, ctx: Any) -> list[Any]:  # noqa: ANN401  click's context, whose home has moved
        """Return the parameters, help among them, without typer's conversions."""
        return _as_typed(super().get_params(ctx))


def group_of(what: str, names: Sequence[str], command_of: Callable[[str], Any], says: str) -> typer.Typer:
    """Return a group with one command per name. Each is built on use: the job's flags of all of them slow down the start."""

    class Group(QuickGroup):
        def list_commands(self, ctx: Any) -> list[str]:  # noqa: ANN401, ARG002  click's context, whose home has moved
            return list(names)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ANN401, ARG002  click's context and command
            if cmd_name not in names:
                raise unknown_name(what, cmd_name, names, f"there are {', '.join(names)}")
            return command_of(cmd_name)

    def begin(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            raise SpecError(
                f"no {what} is named; write `zeroplan {context.info_name} {names[0]} ...`, or {', '.join(names[1:])}"
            )

    app = typer.Typer(cls=Group, help=says, invoke_without_command=True, no_args_is_help=False)
    app.callback()(begin)
    return app


def _as_typed(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if hasattr(parameter, "_runtime_param"):
            parameter._runtime_param = _AsTyped()  # noqa: SLF001  typer offers no public way
        if getattr(parameter, "is_flag", False):
            parameter.display_type_rich = lambda **_: None  # "<bool>" in the help would read as a value to be typed
    return parameters


class Commands(Mapping[str, Any]):
    """Commands by name, imported on first use; ``places`` has the module and the function's name of each."""

    def __init__(self, places: Mapping[str, tuple[str, str]]) -> None:
        self._places = places
        self._read: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401  click's command, whose home has moved
        if name not in self._read:
            module, called = self._places[name]
            self._read[name] = as_command(name, getattr(import_module(module), called))
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def as_command(name: str, written: Any) -> Any:  # noqa: ANN401  click's command
    """Return a function, or a typer group, as a command of this name."""
    if isinstance(written, typer.Typer):
        group = typer.main.get_group(written)
        group.name = name
        return group
    alone = typer.Typer(add_completion=False)
    alone.command(name, cls=QuickCommand)(written)
    return typer.main.get_command(alone)
