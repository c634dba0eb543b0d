"""Which degrees of parallelism are modelled for a family, whatever the recipe?"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import pytest

from zeroplan import BatchSpec, JobSpec, MeshSpec, RecipeSpec, SpecError
from zeroplan.catalog.model import model, model_names
from zeroplan.spec.split import may_split

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zeroplan.spec.recipe import Engine

FAMILIES = {model(name).family: name for name in model_names()}
DEGREES = [dict(zip(("tp", "cp", "pp", "ep"), ways, strict=True)) for ways in product((1, 2), repeat=4)]


def accepted(name: str, engine: Engine, degrees: dict[str, int]) -> Iterator[RecipeSpec]:
    """Recipes with which a job has these degrees."""
    mesh = MeshSpec(dp_shard=8, **degrees)
    for stage, recompute, loss in product((1, 2, 3), ("none", "full"), ("full", "chunked")):
        with suppress(SpecError):
            recipe = RecipeSpec(engine=engine, zero_stage=stage, recompute=recompute, loss=loss)  # type: ignore[arg-type]
            recipe = replace(recipe, sequence_parallel=engine == "megatron" and degrees["tp"] > 1)
            JobSpec(model=model(name), recipe=recipe, mesh=mesh, batch=BatchSpec(seq_len=1024, grad_accum_steps=4))
            yield recipe


@pytest.mark.parametrize("engine", ["fsdp2", "megatron"])
@pytest.mark.parametrize("name", FAMILIES.values(), ids=FAMILIES.keys())
def test_degrees_that_are_not_modelled_for_a_family_are_refused_with_every_recipe(name: str, engine: Engine):
    for degrees in DEGREES:
        if not may_split(model(name), engine, MeshSpec(dp_shard=8, **degrees)):
            assert not list(accepted(name, engine, degrees))


def test_degrees_that_are_modelled_are_accepted_with_some_recipe():
    for name, engine in product(("llama-3.1-8b", "mixtral-8x7b"), ("fsdp2", "megatron")):
        for degrees in DEGREES:
            if degrees["ep"] == 1 or name == "mixtral-8x7b":
                modelled = may_split(model(name), engine, MeshSpec(dp_shard=8, **degrees))
                assert modelled == any(accepted(name, engine, degrees)), degrees
