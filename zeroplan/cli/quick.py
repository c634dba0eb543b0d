"""A command that answers in the time it takes to compute.

Every parameter of ours is a text, a switch or a list of texts, and the specs check what they say. Recent releases of typer
build a pydantic adapter per parameter before a command runs, which takes as long as everything else together; such a
parameter is told to hand on what was typed. Older releases have no such step and are left as they are.
"""

from typing import Any

from typer.core import TyperCommand, TyperGroup


class _AsTyped:
    """Stands where typer keeps a parameter's conversion: what was typed is the value."""

    def coerce(self, value: object, **_: object) -> object:
        """Hand on the value."""
        return tuple(value) if isinstance(value, list) else value


class QuickCommand(TyperCommand):
    """A typer command whose texts stay texts."""

    def get_params(self, ctx: Any) -> list[Any]:  # noqa: ANN401  click's context, whose home has moved
        """Return the parameters, help among them, without typer's conversions."""
        return _as_typed(super().get_params(ctx))


class QuickGroup(TyperGroup):
    """The program itself, whose switches stay switches."""

    def get_params(self, ctx: Any) -> list[Any]:  # noqa: ANN401  click's context, whose home has moved
        """Return the parameters, help among them, without typer's conversions."""
        return _as_typed(super().get_params(ctx))


def _as_typed(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if hasattr(parameter, "_runtime_param"):
            parameter._runtime_param = _AsTyped()  # noqa: SLF001  typer offers no public way
    return parameters
