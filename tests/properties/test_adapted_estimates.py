"""What holds for every estimate holds with adapters: formulas say what is computed, grids are their points, jobs read back."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.formulas import assert_explained, assert_symbols_mean_one_thing
from tests.strategies import batches, highest, models, recipes
from zeroplan import JobSpec, MeshSpec, ModelSpec, RecipeSpec, estimate
from zeroplan.errors import SpecError
from zeroplan.estimator import engine_module
from zeroplan.report.payload import estimate_payload
from zeroplan.spec.adapter import ADAPTED_FAMILIES, GROUPS, AdapterSpec
from zeroplan.spec.base import read
from zeroplan.spec.frozen import PARTS, FrozenSpec

ENGINES = ("ddp", "fsdp2", "deepspeed")
some = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


@st.composite
def adapted(draw: st.DrawFn, engine: str) -> ModelSpec:
    names = draw(st.lists(st.sampled_from((*GROUPS, *GROUPS["all-linear"])), min_size=1, max_size=3))
    quantize = draw(st.sampled_from(("none", "nf4", "nf4-double"))) if engine != "deepspeed" else "none"
    adapter = AdapterSpec(rank=draw(st.integers(1, 256)), targets=",".join(names), quantize=quantize)
    return replace(draw(models(ADAPTED_FAMILIES)), adapter=adapter)


def plain(recipe: RecipeSpec) -> RecipeSpec:
    """What is modelled with adapters."""
    attention = "sdpa" if recipe.attention == "eager" else recipe.attention
    return replace(recipe, loss="full", attention=attention, activation_model="module")


@st.composite
def partly_frozen(draw: st.DrawFn) -> ModelSpec:
    model = draw(models(ADAPTED_FAMILIES))
    parts = ["embedding", "head"] if model.tie_word_embeddings else draw(st.lists(st.sampled_from(PARTS), max_size=3))
    layers = draw(st.integers(0 if parts else 1, 9))
    deep = replace(model, num_hidden_layers=layers + draw(st.integers(1, 9)))
    return replace(deep, frozen=FrozenSpec(parts=",".join(parts), layers=layers))


@st.composite
def jobs(draw: st.DrawFn) -> JobSpec:
    mesh, recipe = MeshSpec(dp_shard=8 * draw(st.integers(1, 64))), plain(draw(recipes(ENGINES)))
    assume((recipe.engine, recipe.zero_stage) != ("deepspeed", 0))
    model = adapted(recipe.engine) if recipe.engine == "deepspeed" else st.one_of(adapted(recipe.engine), partly_frozen())
    return JobSpec(model=draw(model), recipe=recipe, mesh=mesh, batch=draw(batches()))


def answered(job: JobSpec) -> Any:
    try:
        return estimate(job)
    except SpecError:
        assume(condition=False)


@some
@given(jobs())
def test_an_adapted_estimate_is_explained_line_by_line(job: JobSpec):
    answer = answered(job)
    assert_explained(answer)
    assert_symbols_mean_one_thing(answer)
    assert all(line.n_bytes >= 0 for moment in answer.moments for line in moment.lines)
    assert read(JobSpec, estimate_payload(answer)["job"], where="payload") == job


@some
@given(jobs())
def test_adapters_take_less_than_training_everything(job: JobSpec):
    """Where states are whole on every rank; the layers of a shard's padding and a kept input may weigh more than a tiny model."""
    assume(job.recipe.engine == "ddp" and job.recipe.zero_stage == 0 and job.recipe.precision != "fp32")
    assume(4 * estimate(job).trained_parameters < estimate(job).parameters)
    whole = replace(job, model=replace(job.model, adapter=None, frozen=None))
    assert sum(answered(job).states_by_kind.values()) < sum(answered(whole).states_by_kind.values())


class Column:
    def __init__(self, **columns: Any) -> None:
        self.__dict__.update(columns)


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_grid_of_adapted_jobs_is_its_points(engine: str, data: st.DataObject):
    some_kind = adapted(engine) if engine == "deepspeed" else st.one_of(adapted(engine), partly_frozen())
    model, recipe = data.draw(some_kind), plain(data.draw(recipes((engine,))))
    assume((engine, recipe.zero_stage) != ("deepspeed", 0))
    points = data.draw(st.lists(st.tuples(st.integers(1, 512), batches()), min_size=2, max_size=3))
    account = engine_module(engine).account
    try:
        each = [account(model, recipe, MeshSpec(dp_shard=ranks), batch) for ranks, batch in points]
    except SpecError:
        assume(condition=False)
    names = ("micro_batch_size", "seq_len", "grad_accum_steps")
    ranks, one = np.array([n for n, _ in points], dtype=np.int64), np.ones(len(points), dtype=np.int64)
    columns = {name: np.array([getattr(batch, name) for _, batch in points], dtype=np.int64) for name in names}
    grid = account(model, recipe, Column(dp_shard=ranks, dp_replicate=one, tp=1, cp=1, pp=1, ep=1), Column(**columns))
    totals = [(moment.name, np.broadcast_to(moment.total_bytes, len(points))) for moment in grid.moments]
    for at, point in enumerate(each):
        found = highest((name, int(column[at])) for name, column in totals)
        assert found == highest((moment.name, int(moment.total_bytes)) for moment in point.moments)
