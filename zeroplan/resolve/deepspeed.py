"""Applies a DeepSpeed configuration to a request, and checks that it agrees with the flags."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

from zeroplan.catalog.deepspeed_config import Beside, DeepSpeedConfig, Stated, config_of, parsed_config
from zeroplan.catalog.text import shown
from zeroplan.errors import SpecError
from zeroplan.resolve.request import Request, SetupRead
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import DeepSpeedOptions


def config_beside(
    found: SetupRead, model: ModelSpec, chosen: Sequence[str]
) -> tuple[Request, tuple[str, ...], Mapping[str, str]]:
    """Return the request with the configuration's values, notes, and its keys by flag.

    Raises SpecError if it contradicts a flag.
    """
    request, full = found.request, found.complete
    data, where = found.setup.deepspeed or parsed_config(Path(request.deepspeed_config or ""))
    beside = Beside(model.hidden_size, request.gpus or 1, full.precision, full.micro_batch, full.grad_accum)
    config, by_user = config_of(data, where, beside), _set_by_user(request.deepspeed or DeepSpeedOptions(), chosen)
    _refuse_contradictions(request, by_user, config, where)
    from_file = {name: stated for name, stated in config.options.items() if name not in by_user}
    values: dict[str, object] = {name: stated.value for name, stated in config.flags.items()}
    values["deepspeed"] = DeepSpeedOptions(**by_user, **{name: stated.value for name, stated in from_file.items()})  # type: ignore[arg-type]
    filled_in = [f"{stated}, filled in for auto" for stated in from_file.values() if stated.auto]
    file = shown(Path(request.deepspeed_config or full.from_file or _quoted(where)).name)
    notes = tuple(f"{file}: {note}" for note in (*config.notes, *filled_in))
    filled, keys = {**found.filled, **config.of_the_script}, {name: stated.key for name, stated in config.flags.items()}
    read = found._replace(request=replace(request, **values), filled=filled)  # type: ignore[arg-type]  # Request checks every field
    return read.complete, notes, keys


def _refuse_contradictions(request: Request, by_user: Mapping[str, object], config: DeepSpeedConfig, where: str) -> None:
    for name, stated in config.flags.items():
        if getattr(request, name) not in (None, stated.value):
            raise SpecError(_contradiction(f"--{name.replace('_', '-')} {getattr(request, name)}", where, stated))
    for name, value in by_user.items():
        stated = config.options.get(name, Stated("", value))
        if stated.value != value and not stated.auto:
            raise SpecError(_contradiction(f"deepspeed.{name}={value}", where, stated))


def _contradiction(mine: str, where: str, stated: Stated) -> str:
    return f"{mine} contradicts {where}, where {stated}; leave one of them out"


def _set_by_user(options: DeepSpeedOptions, chosen: Sequence[str]) -> dict[str, object]:
    """Return the options that the user set beside the file: with ``--set``, or to another value than the default."""
    default, names = DeepSpeedOptions(), [field.name for field in fields(DeepSpeedOptions)]
    return {name: mine for name in names if (mine := getattr(options, name)) != getattr(default, name) or name in chosen}


def _quoted(where: str) -> str:
    """Return the file's name inside the quotes of ``where``."""
    return where.partition("'")[2].partition("'")[0]
