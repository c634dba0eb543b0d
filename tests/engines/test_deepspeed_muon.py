"""DeepSpeed's Muon at stages 1 and 2, by hand from its source. tests/verify compares with the engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.engines.columns import Columns, assert_is_its_points
from tests.formulas import assert_explained
from zeroplan.engines.deepspeed import account
from zeroplan.engines.deepspeed.muon import most_in_update, row_of_muon
from zeroplan.engines.rows import most_touched, of_ranks, partition_elements, touched_elements
from zeroplan.errors import SpecError
from zeroplan.estimator import estimate
from zeroplan.ledger import Kind
from zeroplan.spec.adapter import AdapterSpec
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import DeepSpeedOptions, RecipeSpec

TINY = ModelSpec(
    family="llama", hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    head_dim=4, vocab_size=10,
)  # fmt: skip
ADAM = 80 + 5 * 8 + 80
"""Elements of the embedding, five norms and the head."""


def job(n_ranks: int = 2, model: ModelSpec = TINY, **fields: Any) -> JobSpec:
    recipe = RecipeSpec(engine="deepspeed", optimizer="muon", **{"zero_stage": 2, **fields})
    return JobSpec(model=model, recipe=recipe, mesh=MeshSpec(dp_shard=n_ranks), batch=BatchSpec(seq_len=16))


def test_matrices_come_first_by_falling_shape_and_both_groups_are_padded():
    row = row_of_muon(TINY)
    shapes = [each.parameter.shape for each in row.placed]
    assert shapes[:14] == [(16, 8)] * 4 + [(8, 16)] * 2 + [(8, 8)] * 4 + [(4, 8)] * 4
    matrices = 2 * (3 * 128 + 2 * 64 + 2 * 32)
    assert [(group.start, group.end) for group in row.groups] == [(0, matrices), (matrices, matrices + ADAM)]
    assert partition_elements(row, 7) == 166 + 30  # 1152 and 200 elements in multiples of 14


def test_a_rank_in_the_middle_keeps_most_matrices_whole():
    row = row_of_muon(TINY)
    touched = [sum(each.end - each.start for each in inside) for inside in of_ranks(row, 0, 5)]
    assert touched == [256, 384, 384, 320, 256]  # shares of 232 elements
    assert most_touched(row, 0, 5) == 384
    assert most_touched(row, 0, 1) == 1152
    assert touched_elements(row, 1) == 1152 + ADAM


def test_states_on_one_rank():
    states = [line for line in estimate(job(1)).states if line.kind is Kind.OPTIMIZER_STATE]
    assert [line.n_bytes for line in states[:5]] == [4 * 1352, 2 * 1152, 2 * 1152, 4 * ADAM, 4 * ADAM]


def test_an_update_of_a_square_matrix_and_of_a_wide_one():
    assert most_in_update(8, 8, 2, is_fp16=False) == 2 * 6 * 64
    assert most_in_update(16, 8, 2, is_fp16=False) == 2 * (128 + 7 * 64)
    assert most_in_update(8, 800, 2, is_fp16=True) == 10 * 6400  # cast to fp32, normalised, cast to fp16


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16", "fp32", "fp16-mixed"])
@pytest.mark.parametrize("flattens", [True, False])
def test_every_line_has_a_formula(stage: int, precision: str, flattens: bool):
    options = DeepSpeedOptions(flatten_on_accelerator=flattens, reduce_bucket_size=150)
    for n_ranks in (1, 2, 7):
        assert_explained(estimate(job(n_ranks, zero_stage=stage, precision=precision, deepspeed=options)))


@pytest.mark.parametrize("stage", [1, 2])
def test_columns_of_ranks_equal_single_jobs(stage: int):
    one = job(zero_stage=stage, deepspeed=DeepSpeedOptions(reduce_bucket_size=150))
    points = [(MeshSpec(dp_shard=ranks), one.batch) for ranks in (1, 2, 3, 8, 50)]
    columns = Columns(points)
    each = [account(TINY, one.recipe, mesh, batch) for mesh, batch in points]
    assert_is_its_points(account(TINY, one.recipe, columns, columns), each)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"zero_stage": 3}, "stage 3"),
        ({"zero_stage": 0}, "stage 0"),
        ({"deepspeed": DeepSpeedOptions(offload_optimizer="cpu")}, "offload"),
        ({"deepspeed": DeepSpeedOptions(grad_accum_dtype="fp32")}, "grad_accum_dtype"),
        ({"deepspeed": DeepSpeedOptions(contiguous_gradients=False)}, "contiguous_gradients"),
        ({"model": replace(TINY, adapter=AdapterSpec(rank=2))}, "adapters"),
    ],
)
def test_refused(fields: dict[str, Any], part: str):
    with pytest.raises(SpecError, match=part):
        estimate(job(**fields))
