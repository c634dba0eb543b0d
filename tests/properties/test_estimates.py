"""What holds for every job: lines sum, grids are their points, formulas say what is computed, more never costs less."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.formulas import WITHOUT_FORMULA, assert_symbols_mean_one_thing, evaluate
from tests.strategies import ENGINES, batches, highest, jobs, models, recipes
from zeroplan import JobSpec, Kind, MeshSpec, estimate
from zeroplan.errors import SpecError
from zeroplan.estimator import engine_module
from zeroplan.report.payload import estimate_payload
from zeroplan.spec.base import read

thorough = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
PB = 10**15


def answered(job: JobSpec) -> Any:
    """The estimate; a combination that the engine itself does not offer is not an example."""
    try:
        return estimate(job)
    except SpecError:
        assume(condition=False)


@thorough
@given(jobs())
def test_lines_sum_to_totals_and_the_peak_is_the_largest_moment(job: JobSpec):
    answer = answered(job)
    totals = [sum(line.n_bytes for line in moment.lines) for moment in answer.moments]
    assert answer.peak_bytes == max(totals)
    assert all(line.n_bytes >= 0 for moment in answer.moments for line in moment.lines)
    assert sum(answer.states_by_kind.values()) == sum(line.n_bytes for line in answer.states)
    low, expected, high = answer.reserved
    assert answer.peak_bytes == low <= expected <= high
    assert 0 < answer.peak_bytes < 100 * PB
    assert answer.traffic.total_bytes == sum(call.sent_bytes for call in answer.traffic.collectives) >= 0


@thorough
@given(jobs())
def test_every_formula_evaluates_to_its_bytes(job: JobSpec):
    answer = answered(job)
    for moment in answer.moments:
        for line in moment.lines:
            if line.formula:
                assert evaluate(line.formula, answer.legend) == line.n_bytes, (moment.name, line)


@thorough
@given(jobs())
def test_every_line_has_a_formula_and_a_source(job: JobSpec):
    answer = answered(job)
    for line in {*answer.states, *(line for moment in answer.moments for line in moment.lines)}:
        if line.n_bytes:
            assert line.source, line
            assert line.formula or line.reason in WITHOUT_FORMULA, line


@thorough
@given(jobs())
def test_a_symbol_stands_for_one_thing(job: JobSpec):
    assert_symbols_mean_one_thing(answered(job))


@dataclass(frozen=True)
class GridMesh:
    dp_shard: np.ndarray
    dp_replicate: np.ndarray
    tp: int = 1
    cp: int = 1
    ep: int = 1


@dataclass(frozen=True)
class GridBatch:
    micro_batch_size: np.ndarray
    seq_len: np.ndarray
    grad_accum_steps: np.ndarray


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_grid_is_its_points(engine: str, data: st.DataObject):
    model, recipe = data.draw(models()), data.draw(recipes((engine,)))
    several = st.lists(st.tuples(st.integers(1, 512), st.sampled_from((1, 2)), batches()), min_size=2, max_size=4)
    points = [
        (MeshSpec(dp_shard=n, dp_replicate=r if engine in ("paper", "fsdp2") else 1), batch)
        for n, r, batch in data.draw(several)
    ]
    try:
        accounts = [engine_module(engine).account(model, recipe, mesh, batch) for mesh, batch in points]
    except SpecError:
        assume(condition=False)
    mesh = GridMesh(*(np.array([getattr(m, name) for m, _ in points], dtype=np.int64) for name in ("dp_shard", "dp_replicate")))
    batch = GridBatch(
        *(
            np.array([getattr(b, name) for _, b in points], dtype=np.int64)
            for name in ("micro_batch_size", "seq_len", "grad_accum_steps")
        )
    )
    grid = engine_module(engine).account(model, recipe, mesh, batch)
    totals = [(moment.name, np.broadcast_to(moment.total_bytes, len(points))) for moment in grid.moments]
    for at, account in enumerate(accounts):
        assert highest((name, int(column[at])) for name, column in totals) == highest(
            (moment.name, int(moment.total_bytes)) for moment in account.moments
        )
    for at, call in enumerate(grid.collectives):
        column = np.broadcast_to(call.sent_bytes, len(points)).tolist()
        assert column == [account.collectives[at].sent_bytes for account in accounts], call.what


@thorough
@given(jobs(), st.sampled_from(("micro_batch_size", "seq_len")))
def test_a_larger_batch_never_needs_less(job: JobSpec, what: str):
    larger = replace(job, batch=replace(job.batch, **{what: 2 * getattr(job.batch, what)}))
    assert answered(larger).peak_bytes >= answered(job).peak_bytes


@thorough
@given(jobs())
def test_another_layer_never_needs_less(job: JobSpec):
    assume(job.recipe.engine != "deepspeed")  # its buckets and windows end after so many elements, which may fall out better
    deeper = replace(job, model=replace(job.model, num_hidden_layers=job.model.num_hidden_layers + 1))
    assert answered(deeper).peak_bytes >= answered(job).peak_bytes


@thorough
@given(jobs(("paper", "fsdp2", "deepspeed")))
def test_twice_the_ranks_never_hold_more_states(job: JobSpec):
    """Stage 1 under ZeroRedundancyOptimizer hands out whole tensors, where an odd split can be a little worse: not asked."""
    assume(job.recipe.optimizer != "adamw-8bit")  # a shard below 4,096 elements keeps its states in 32 bits
    wider = replace(job, mesh=replace(job.mesh, dp_shard=2 * job.mesh.dp_shard))
    fewer, more = answered(job).states_by_kind, answered(wider).states_by_kind
    # DeepSpeed keeps whole gradients of every parameter that touches its partition, and pads to 2·N elements.
    slack = 64 * 2 * wider.mesh.dp_shard if job.recipe.engine == "deepspeed" else 0
    for kind in (Kind.PARAMETERS, Kind.OPTIMIZER_STATE):
        assert more[kind] <= fewer[kind] + slack


@thorough
@given(jobs())
def test_recomputing_everything_needs_at_most_a_block_input_and_a_mask_more(job: JobSpec):
    """Where the first block's backward is the peak there is nothing left to save.

    Its checkpoint comes on top, and the mask of eager attention, which only recomputation needs so late.
    """
    none, full = (replace(job, recipe=replace(job.recipe, recompute=choice)) for choice in ("none", "full"))
    batch = job.batch
    block_input = 4 * batch.micro_batch_size * batch.seq_len * job.model.hidden_size
    mask = 4 * batch.micro_batch_size * batch.seq_len**2 if job.recipe.attention == "eager" else 0
    assert answered(full).peak_bytes <= answered(none).peak_bytes + block_input + mask


@thorough
@given(models(), batches(), st.sampled_from(("bf16-mixed", "fp32", "bf16")))
def test_all_stages_of_the_paper_agree_on_one_rank(model: Any, batch: Any, precision: str):
    totals = set()
    for stage in range(4):
        job = JobSpec(model=model, batch=batch)
        recipe = replace(job.recipe, engine="paper", zero_stage=stage, precision=precision)
        totals.add(estimate(replace(job, recipe=recipe)).peak_bytes)
    assert len(totals) == 1


@thorough
@given(jobs())
def test_the_job_in_the_json_reads_back(job: JobSpec):
    assert read(JobSpec, estimate_payload(answered(job))["job"], where="payload") == job
