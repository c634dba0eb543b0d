"""Applies another program's configuration file to a request, and checks that it agrees with the flags."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

from zeroplan.catalog.model import WAYS_TO_NAME
from zeroplan.catalog.setups.reading import name_of, read_setup
from zeroplan.catalog.setups.settings import (
    COMPILED,
    COMPILED_PARTS,
    ends_counted_apart,
    ends_counted_as_one,
    option_value,
    request_settings,
)
from zeroplan.catalog.setups.setup import OwnModules, Setup
from zeroplan.catalog.text import shown
from zeroplan.errors import SpecError
from zeroplan.resolve.request import Request, SetupRead
from zeroplan.spec.job import DEFAULT_ENGINE, JobSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.spec.torchtitan import refusals


def read_beside(request: Request, path: Path, chosen: Sequence[str]) -> SetupRead:
    """Return the request with the file's values; raises SpecError for an invalid file or a contradiction."""
    setup = read_setup(path, gpus=request.gpus)
    where = f"{name_of(setup.kind)} {str(path)!r}"
    if setup.deepspeed is not None and request.deepspeed_config is not None:
        raise SpecError(f"--deepspeed-config and {where} both configure DeepSpeed; leave one of them out")
    by_user = {field.name: value for field in fields(request) if (value := getattr(request, field.name)) is not None}
    found = request_settings(setup, by_user, where)
    request = replace(request, from_file=None, **found.flags)  # type: ignore[arg-type]  # Request checks every field
    request = replace(request, **_engine_options(request, setup, where, chosen))  # type: ignore[arg-type]
    notes = tuple(f"{shown(path.name)}: {note}" for note in (*found.notes, *_keys_of(setup, found.filled)))
    own = setup.own and setup.own._replace(instead=tuple(f"{shown(path.name)}: {note}" for note in setup.own.instead))
    setup = setup._replace(own=own, pairs=setup.pairs and "micro_batch" not in by_user)
    return SetupRead(request, found.filled, notes, setup)


def _keys_of(setup: Setup, filled: Mapping[str, object]) -> Iterator[str]:
    """Yield notes on the file's keys that were used, and on values that are the program's defaults."""
    if setup.used:
        yield f"keys that zeroplan used: {', '.join(map(shown, setup.used))}"
    left_out = {
        name: setting.value
        for name, setting in setup.flags.items()
        if name not in WAYS_TO_NAME and setting.key not in setup.used
    }
    granted = [f"{name} {shown(value)}" for name, value in (left_out | {**filled}).items()]
    if granted:  # defaults of the program's code
        yield f"not in the file, so the program's defaults apply: {', '.join(granted)}"


def by_its_own_modules(read: SetupRead, complete: JobSpec, chosen: Sequence[str]) -> tuple[JobSpec, tuple[str, ...]]:
    """Return the job with the program's own modules, unless the user chose others or they are not modelled, and notes."""
    own, recipe = read.setup.own, complete.recipe
    if own is None:
        return complete, ()
    if read.request.modules is not None or "fsdp2.modules" in chosen:
        return _as_compiled(complete, own) if recipe.fsdp2.modules == own.name else (complete, own.instead)
    its_own = replace(recipe, fsdp2=replace(recipe.fsdp2, modules=own.name))
    for refused, _ in refusals(complete.model, its_own, complete.mesh, complete.batch):
        return complete, (*own.instead, f"{own.name}'s own modules are not modelled with {refused}")
    note = f"{own.name}'s own modules are counted, since its file was read; --modules transformers counts transformers'"
    found, notes = _as_compiled(replace(complete, recipe=its_own), own)
    return found, (note, *notes)


def _as_compiled(job: JobSpec, own: OwnModules) -> tuple[JobSpec, tuple[str, ...]]:
    """Return the job with what the program compiles, unless the user chose kernels or that is not modelled, and a note."""
    if not own.compiled or job.recipe.fused_kernels is not None:
        return job, ()
    kernels = ",".join(own.compiled)
    try:
        return replace(job, recipe=replace(job.recipe, fused_kernels=kernels)), (COMPILED_PARTS.format(kernels),)
    except SpecError as error:
        return job, (f"{COMPILED}; {error}",)


def by_its_own_units(read: SetupRead, complete: JobSpec, chosen: Sequence[str]) -> tuple[JobSpec, tuple[str, ...]]:
    """Return the job with the program's FSDP2 units, unless the user chose others or they are not modelled, and a note.

    A tied head is in the embedding's unit anyway. A DDP job gets the units that it would have under FSDP2.
    """
    recipe = complete.recipe
    is_asked = recipe.fsdp2.shards_ends or "fsdp2.ends_apart" in chosen
    if not read.setup.own_units or is_asked or recipe.engine == "deepspeed" or complete.model.tie_word_embeddings:
        return complete, ()
    is_noted = recipe.engine == "fsdp2"
    try:
        apart = replace(complete, recipe=replace(recipe, fsdp2=replace(recipe.fsdp2, ends_apart=True)))
    except SpecError:
        return complete, (ends_counted_as_one(read.setup.own_units),) * is_noted
    return apart, (ends_counted_apart(read.setup.own_units),) * is_noted


def _engine_options(request: Request, setup: Setup, where: str, chosen: Sequence[str]) -> dict[str, object]:
    """Return the engines' options: those of the file, combined with the user's."""
    groups: dict[str, object] = {}
    for name, setting in setup.options.items():
        group, _, option = name.partition(".")
        if setting.filled and _asks_for_another(request, group):
            continue
        default = getattr(RecipeSpec(), group)
        now = groups.get(group, getattr(request, group) or default)
        option_name = option if group == "deepspeed" else name  # passed on unchanged
        value = option_value(name, setting, getattr(now, option), getattr(default, option), where, chosen=option_name in chosen)
        groups[group] = replace(now, **{option: value})  # type: ignore[type-var]  # one of the engines' options
    return groups


def _asks_for_another(request: Request, engine: str) -> bool:
    """Whether the request names another engine, or a stage of another engine."""
    wanted = request.engine or (None if request.stage is None else DEFAULT_ENGINE[request.stage])
    return wanted not in (None, engine)
