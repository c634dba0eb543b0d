"""``zeroplan plot``: the kinds of pictures there are. What draws them is loaded when one is asked for."""

from typing import Any

import typer

from zeroplan.cli.quick import QuickGroup
from zeroplan.errors import SpecError, unknown_name

KINDS = ("stages", "timeline", "scaling", "heat", "pareto", "validation")


class _Kinds(QuickGroup):
    """One command per kind: the job's flags of five commands would slow down the start of every other."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ANN401, ARG002  click's context, whose home has moved
        """Return the names of the kinds."""
        return list(KINDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ANN401  click's context and command
        """Return the command of a kind; raise UnknownNameError for what is none."""
        if cmd_name not in KINDS:
            raise unknown_name("kind of plot", cmd_name, KINDS, f"there are {', '.join(KINDS)}")
        from zeroplan.cli.plotting import kinds_app  # noqa: PLC0415  see the class

        group = typer.main.get_group(kinds_app)
        return group.get_command(ctx, cmd_name)


plot_app = typer.Typer(cls=_Kinds, help="Pictures of the answers: PNG, SVG, PDF, on the screen, or as bars in the terminal.",
                       invoke_without_command=True, no_args_is_help=False)  # fmt: skip


@plot_app.callback()
def _plot(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        raise SpecError(f"a plot is of some kind; write `zeroplan plot stages ...`, or one of {', '.join(KINDS[1:])}")
