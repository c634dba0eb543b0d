"""What does a set-up of another program's say of a job, and does it agree with what is said beside it?"""

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from zeroplan.catalog.setups.reading import name_of, read_setup
from zeroplan.catalog.setups.told import Setup, option_taken, taken
from zeroplan.catalog.text import shown
from zeroplan.errors import SpecError
from zeroplan.resolve.request import Request, SetupRead
from zeroplan.spec.job import DEFAULT_ENGINE
from zeroplan.spec.recipe import RecipeSpec


def read_beside(request: Request, path: Path, chosen: Sequence[str]) -> SetupRead:
    """Add what the file says to a request; raises SpecError where it is none, or contradicts what is said."""
    setup = read_setup(path, gpus=request.gpus)
    where = f"{name_of(setup.kind)} {str(path)!r}"
    if setup.deepspeed is not None and request.deepspeed_config is not None:
        raise SpecError(f"--deepspeed-config beside {where}, which brings its own; leave one of them out")
    said = {field.name: value for field in fields(request) if (value := getattr(request, field.name)) is not None}
    found = taken(setup, said, where)
    request = replace(request, from_file=None, **found.flags)  # type: ignore[arg-type]  # Request checks every field
    request = replace(request, **_engine_options(request, setup, where, chosen))  # type: ignore[arg-type]
    notes = tuple(f"{shown(path.name)}: {note}" for note in found.notes)
    keys = {name: told.key for name, told in setup.flags.items()}
    return SetupRead(request, found.filled, notes, setup.deepspeed, setup.kind, keys)


def _engine_options(request: Request, setup: Setup, where: str, chosen: Sequence[str]) -> dict[str, object]:
    """Options of an engine that the file says, beside those that are asked for."""
    groups: dict[str, object] = {}
    for name, told in setup.options.items():
        group, _, option = name.partition(".")
        if told.filled and _asks_for_another(request, group):
            continue
        default = getattr(RecipeSpec(), group)
        now = groups.get(group, getattr(request, group) or default)
        asked = option if group == "deepspeed" else name  # as they are handed on
        value = option_taken(name, told, getattr(now, option), getattr(default, option), where, chosen=asked in chosen)
        groups[group] = replace(now, **{option: value})  # type: ignore[type-var]  # one of the engines' options
    return groups


def _asks_for_another(request: Request, engine: str) -> bool:
    """Whether an engine or a stage is asked for that another engine than this one runs."""
    asked = request.engine or (None if request.stage is None else DEFAULT_ENGINE[request.stage])
    return asked not in (None, engine)
