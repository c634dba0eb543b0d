"""How a field of a :class:`~zeroplan.resolve.Request` declares its flag, its control on the page, and the job's field that it sets.

Each field's metadata has an :class:`Option`. Command line, job files, the page, the documentation and the conversion between
request and job all read these declarations.
"""

from collections.abc import Mapping
from dataclasses import fields
from operator import attrgetter
from types import NoneType
from typing import Final, Literal, NamedTuple

from zeroplan.spec.base import Check, Spec, checks_of
from zeroplan.spec.job import JobSpec

MODEL: Final = "Model (name one)"
CLUSTER: Final = "Cluster"
RECIPE: Final = "Recipe"
SWITCHES: Final = "Switches of the recipe"
BATCH: Final = "Batch"

#: Groups of controls, in the order of the page.
GROUPS: Final = ("Model", "GPUs", "Recipe", "Batch", "Split of the model")
OF_MODEL, OF_GPUS, OF_RECIPE, OF_BATCH, OF_SPLIT = GROUPS

#: The choices of a switch on the page.
SWITCH: Final = ("no", "yes")
#: The text that users write for ``keep_logits``, and its value.
KEEP_LOGITS: Final[Mapping[str, bool | Literal["fp32"]]] = {"no": False, "yes": True, "fp32": "fp32"}


class Control(NamedTuple):
    """An option's control on the page."""

    label: str
    group: str
    default: str = ""
    kind: Literal["choice", "number", "text"] = "choice"
    choices: tuple[str, ...] | None = None
    """``None``: the choices of the field's type."""
    listed: Literal["", "models", "gpus"] = ""
    """The catalogue whose names are choices as well."""
    may_be_empty: bool = False
    """The first choice leaves the option out."""
    least: int = 1
    most: int = 1
    empty: str = "default"
    """The label of the empty choice."""
    hint: str = ""


class Option(NamedTuple):
    """The declaration of a request's field, beside its type."""

    help: str = ""
    """The flag's help; an option without help has no flag."""
    panel: str = ""
    """The panel of ``--help`` with the flag."""
    metavar: str = ""
    sets: str = ""
    """The job's field that the option sets, such as ``mesh.tp``; empty if it sets no single field."""
    searched: bool = False
    """``plan`` chooses the value if the request has none."""
    control: Control | None = None


class Declared(NamedTuple):
    """A request's field with its option."""

    field: str
    option: Option
    checks: tuple[Check, ...]
    """The accepted types and values, without None."""

    @property
    def help(self) -> str:
        """The help text of its flag."""
        return self.option.help

    @property
    def flag(self) -> str:
        """The name of its flag."""
        return "--from" if self.field == "from_file" else "--" + self.field.replace("_", "-")

    @property
    def is_number(self) -> bool:
        """Whether its value can only be a whole number."""
        return self._is_only(int)

    @property
    def is_switch(self) -> bool:
        """Whether its flag is a switch."""
        return self._is_only(bool)

    def _is_only(self, kind: type) -> bool:
        return [one.type for one in self.checks] == [kind]

    @property
    def choices(self) -> tuple[str, ...]:
        """The choices of its type; empty if it has none."""
        return tuple(str(choice) for one in self.checks for choice in one.choices)


def declared(request: type[Spec]) -> Mapping[str, Declared]:
    """Return the options that a request class declares, by the field's name and in order.

    Types come from the class's checks, since reading annotations again would be slow.
    """
    checks = checks_of(request)
    return {
        field.name: Declared(field.name, option, tuple([one for one in checks[field.name] if one.type is not NoneType]))
        for field in fields(request)
        if isinstance(option := field.metadata.get("option"), Option)
    }


def value_of(job: JobSpec, one: Declared) -> object:
    """Return the value of the job's field that an option sets."""
    return attrgetter(one.option.sets)(job)
