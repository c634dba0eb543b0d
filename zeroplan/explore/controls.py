"""The controls of the page, each with the name of its flag and its choices or range."""

from dataclasses import dataclass
from typing import Literal

from zeroplan.catalog.gpu import gpu_names
from zeroplan.catalog.model import model_names
from zeroplan.resolve import OPTIONS
from zeroplan.resolve.options import GROUPS, OF_RECIPE, Declared
from zeroplan.resolve.options import Control as DeclaredControl

Kind = Literal["choice", "number", "text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """One control: the flag's name, its label, its choices, or its range in doublings."""

    name: str
    label: str
    group: str
    kind: Kind = "choice"
    choices: tuple[str, ...] = ()
    least: int = 1
    most: int = 1
    default: str = ""
    empty: str = "default"
    """The label of the empty choice."""
    hint: str = ""


_SETTINGS = Control(
    name="set",
    label="Options of the engine",
    group=OF_RECIPE,
    kind="text",
    hint="for example fsdp2.reshard_after_forward=8; separate several by spaces",
)


def controls() -> tuple[Control, ...]:
    """Return every control, in the order of the page."""
    found = (*(_control(one, one.option.control) for one in OPTIONS.values() if one.option.control), _SETTINGS)
    return tuple(sorted(found, key=lambda one: GROUPS.index(one.group)))


def _control(one: Declared, own: DeclaredControl) -> Control:
    names = {"": (), "models": model_names, "gpus": gpu_names}[own.listed]
    choices = (*_choices(one, own), *(names() if callable(names) else ()))
    same = {field: value for field, value in own._asdict().items() if field not in ("choices", "listed", "may_be_empty")}
    return Control(name=one.field, choices=choices, **same)


def _choices(one: Declared, own: DeclaredControl) -> tuple[str, ...]:
    if own.choices is not None:
        return own.choices
    return (("",) if own.may_be_empty else ()) + (one.choices if own.kind == "choice" else ())
