"""Random jobs vary every field of every spec. If you add a field, this test fails until the jobs draw it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import fields
from itertools import chain
from typing import get_type_hints

from tests import strategies
from tests.properties.nightly import drawn
from zeroplan import JobSpec
from zeroplan.spec.base import Spec
from zeroplan.spec.pipeline import PipelineSchedule
from zeroplan.spec.profile import Profile

#: Fields with only one value, those that only workflows or files of NeMo AutoModel set, and those of Mixtral before transformers 5.
CONSTANT = {
    "Profile.schema_version",
    "ModelSpec.predictions",
    "MoeSpec.separate",
    "ModelSpec.predictor_repeats",
    "RecipeSpec.forward_only",
    "RecipeSpec.log_probs",
    "RecipeSpec.prompt_len",
}
DRAWN = 8000


def _seen(value: object, found: defaultdict[str, set[str]]) -> None:
    """Collect the values of every field, up to two."""
    for spec in _inside(value):
        for field in fields(spec):  # type: ignore[arg-type]
            of_field = getattr(spec, field.name)
            known = found[f"{type(spec).__name__}.{field.name}"]
            if len(known) < 2:
                known.add(repr(of_field)[:2000])
            _seen(of_field, found)


def _inside(value: object) -> list[Spec]:
    if isinstance(value, Spec):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
    return [spec for part in parts for spec in _inside(part)]


def _named(hint: object) -> set[type[Spec]]:
    """Return the spec classes in a type annotation."""
    if isinstance(hint, type) and issubclass(hint, Spec):
        return {hint}
    return {one for inner in getattr(hint, "__args__", ()) for one in _named(inner)}


def _every(spec: type[Spec]) -> set[type[Spec]]:
    """Return a spec class and all spec classes in its fields."""
    inner = {one for hint in get_type_hints(spec).values() for one in _named(hint)} - {spec}
    return {spec}.union(*(_every(one) for one in inner))


def test_every_field_is_drawn_with_more_than_one_value():
    found = defaultdict[str, set[str]](set)
    profiles = set[object]()  # profiles are large, and there are few: each is read once
    some = (strategies.job(drawn(case)) for case in range(DRAWN))
    for job in chain(some, (strategies.job(drawn(case), ["megatron"]) for case in range(DRAWN // 3))):
        if job.model.profile is None or job.model.profile not in profiles:
            _seen(job, found)
        profiles.add(job.model.profile)
    there = {f"{spec.__name__}.{field.name}" for spec in _every(JobSpec) | _every(Profile) for field in fields(spec)}
    assert sorted(there - set(found)) == []
    assert {name for name, values in found.items() if len(values) < 2} == CONSTANT


def test_every_split_and_every_schedule_is_drawn():
    found, schedules = set[tuple[str, ...]](), set[str | None]()
    for case in range(DRAWN):
        job = strategies.job(drawn(case))
        if job.recipe.engine == "fsdp2":
            found.add(tuple(way for way in ("tp", "cp", "pp", "ep") if getattr(job.mesh, way) > 1))
        schedules.add(job.recipe.pipeline_schedule)
    assert found == {tuple(sorted(manner.split(), key=("tp", "cp", "pp", "ep").index)) for manner in strategies._SPLITS} | {()}
    assert schedules == {None, *PipelineSchedule.__args__}  # type: ignore[attr-defined]
