"""``zeroplan mcp``: a server of the Model Context Protocol, for agents."""

from typing import Annotated

import typer

from zeroplan.errors import MeasurementError
from zeroplan.installation import not_installed


def mcp_command(
    *,
    skill: Annotated[
        bool,
        typer.Option("--skill", help="Print a skill file that tells an agent which command answers which question, and exit."),
    ] = False,
) -> None:
    """Serve read-only tools for agents on standard input and output: estimate, check, explain, plan, compare, models, gpus."""
    if skill:
        from zeroplan.agents.skill import skill as skill_file  # noqa: PLC0415  start-up is part of every command's time

        typer.echo(skill_file(), nl=False)
        return
    if lacking := not_installed("mcp", by="the server"):
        raise MeasurementError(lacking)
    from zeroplan.agents.server import serve  # noqa: PLC0415  the same

    serve()
