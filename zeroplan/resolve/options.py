"""How a field of a :class:`~zeroplan.resolve.Request` declares the option that it is: its flag, its control, what it sets in a job.

The metadata of each field of a request hold an :class:`Option`. The flags of the command line, the keys of a job file, the controls
of the page, the rows of the documentation and the way from a request to a job and back are all read from these declarations.
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

#: What a person writes for ``keep_logits``, and its value.
#: Values of a control whose flag takes none.
SWITCH: Final = ("no", "yes")
KEEP_LOGITS: Final[Mapping[str, bool | Literal["fp32"]]] = {"no": False, "yes": True, "fp32": "fp32"}


class Control(NamedTuple):
    """How the page offers an option."""

    label: str
    group: str
    default: str = ""
    kind: Literal["choice", "number", "text"] = "choice"
    choices: tuple[str, ...] | None = None
    """``None``: those of the field's type."""
    listed: Literal["", "models", "gpus"] = ""
    """The names of this catalogue are choices, too."""
    may_be_empty: bool = False
    """The first choice is none, which leaves the option out."""
    least: int = 1
    most: int = 1
    empty: str = "default"
    """What the empty choice is called."""
    hint: str = ""


class Option(NamedTuple):
    """What a field of a request declares beside its type."""

    help: str = ""
    """Of its flag; an option without a help text has no flag."""
    panel: str = ""
    """Where ``--help`` lists the flag."""
    metavar: str = ""
    sets: str = ""
    """Part and field of a job, as ``mesh.tp``; empty where the option sets no single field of it."""
    searched: bool = False
    """``plan`` decides it where the request does not."""
    control: Control | None = None


class Declared(NamedTuple):
    """A field of a request with its option."""

    field: str
    option: Option
    checks: tuple[Check, ...]
    """What its value may be, None left out."""

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
        """Whether its value is a whole number and nothing else."""
        return self._is_only(int)

    @property
    def is_switch(self) -> bool:
        """Whether its flag is a switch."""
        return self._is_only(bool)

    def _is_only(self, kind: type) -> bool:
        return [one.type for one in self.checks] == [kind]

    @property
    def choices(self) -> tuple[str, ...]:
        """The choices of its type; empty where it has none."""
        return tuple(str(choice) for one in self.checks for choice in one.choices)


def declared(request: type[Spec]) -> Mapping[str, Declared]:
    """Return the options that a kind of request declares, by the field's name and in order.

    Types are those of the request's own checks: reading annotations is slow, and the first request needs these anyway.
    """
    checks = checks_of(request)
    return {
        field.name: Declared(field.name, option, tuple([one for one in checks[field.name] if one.type is not NoneType]))
        for field in fields(request)
        if isinstance(option := field.metadata.get("option"), Option)
    }


def value_of(job: JobSpec, one: Declared) -> object:
    """Return what a complete job has for an option that sets a field of it."""
    return attrgetter(one.option.sets)(job)
