"""``zeroplan plot``: the group of commands, one per kind of picture. Each is imported on use; see ``plotting.py``."""

from typing import Any

import typer

from zeroplan.cli.quick import group_of

KINDS = ("stages", "timeline", "scaling", "heat", "pareto", "validation")


def _command(name: str) -> Any:  # noqa: ANN401  click's command
    from zeroplan.cli.plotting import kinds_app  # noqa: PLC0415  the job's flags of five commands slow down the start

    return typer.main.get_group(kinds_app).commands[name]


plot_app = group_of(
    "kind of plot", KINDS, _command, "Draw the answer as PNG, SVG or PDF, on the screen, or as bars in the terminal."
)
