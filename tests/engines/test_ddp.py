"""The estimate of DDP: totals by hand, traffic, and columns of jobs against single jobs."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from tests.causal_models import tiny_spec
from tests.engines.columns import Columns
from tests.formulas import assert_explained
from zeroplan import JobSpec, estimate
from zeroplan.engines.ddp import account, bucket_count
from zeroplan.ledger import Phase, total_bytes
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import DdpOptions, Precision, RecipeSpec
from zeroplan.transformer.params import parameter_count

LLAMA = tiny_spec("llama", heads=4, kv_heads=2, head_dim=8, ffn=72, vocab=100, layers=3)
GPT2 = tiny_spec("gpt2", heads=4, kv_heads=4, head_dim=8, ffn=128, vocab=90, layers=3)
PSI = parameter_count(LLAMA)
BATCH = BatchSpec(micro_batch_size=2, seq_len=16)


def recipe_of(*, views: bool = False, **fields: object) -> RecipeSpec:
    return RecipeSpec(**{"engine": "ddp", "zero_stage": 0, "ddp": DdpOptions(gradient_as_bucket_view=views), **fields})


@pytest.mark.parametrize(
    ("precision", "views", "impl", "states", "step"),
    [
        # Parameters 4, buckets 4, gradients 4, Adam 8. A foreach step adds one more copy.
        ("fp32", False, "foreach", 20, 24),
        ("fp32", False, "forloop", 20, None),
        ("fp32", True, "foreach", 16, 20),
        ("bf16-mixed", False, "foreach", 20, 24),
        # All in bf16 takes half of that.
        ("bf16", False, "foreach", 10, 12),
        ("bf16", True, "foreach", 8, 10),
    ],
)
def test_bytes_per_parameter_by_hand(precision: str, views: bool, impl: str, states: int, step: int | None) -> None:
    done = account(LLAMA, recipe_of(precision=precision, views=views, optimizer_impl=impl), MeshSpec(dp_shard=2), BATCH)
    assert total_bytes(done.states) == states * PSI
    if step is not None:
        (moment,) = [one for one in done.moments if one.phase is Phase.STEP]
        assert moment.total_bytes == step * PSI


def test_fp16_adds_only_the_loss_scale() -> None:
    bf16 = account(LLAMA, recipe_of(precision="bf16-mixed"), MeshSpec(dp_shard=2), BATCH)
    fp16 = account(LLAMA, recipe_of(precision="fp16-mixed"), MeshSpec(dp_shard=2), BATCH)
    more = [one.total_bytes - other.total_bytes for one, other in zip(fp16.moments, bf16.moments, strict=True)]
    assert set(more) == {8}


@pytest.mark.parametrize("spec", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize(("precision", "views"), [("fp32", False), ("bf16", True), ("fp16-mixed", False)])
def test_formulas_give_the_bytes_of_their_lines(spec: ModelSpec, precision: Precision, views: bool) -> None:
    for recompute, sync, accum in product(("none", "full"), (True, False), (1, 2, 3)):
        recipe = recipe_of(precision=precision, views=views, recompute=recompute, sync_every_micro_batch=sync)
        batch = BatchSpec(micro_batch_size=2, seq_len=16, grad_accum_steps=accum)
        assert_explained(estimate(JobSpec(model=spec, recipe=recipe, mesh=MeshSpec(dp_shard=2), batch=batch)))


def test_stage_1_divides_only_the_optimizer() -> None:
    whole = account(LLAMA, recipe_of(precision="fp32"), MeshSpec(dp_shard=4), BATCH)
    split = account(LLAMA, recipe_of(precision="fp32", zero_stage=1), MeshSpec(dp_shard=4), BATCH)
    saved = int(total_bytes(whole.states)) - int(total_bytes(split.states))
    # Tensors are not split, so the fullest of four ranks has at least a quarter of 8 bytes per parameter.
    assert 0 < saved <= 6 * PSI
    assert total_bytes(account(LLAMA, recipe_of(zero_stage=1), MeshSpec(), BATCH).states) == 16 * PSI  # one rank: no buckets


def test_an_all_reduce_is_two_passes_over_every_gradient() -> None:
    reduce, buffers = account(LLAMA, recipe_of(precision="fp32"), MeshSpec(dp_shard=4), BATCH).collectives
    assert (reduce.operation, reduce.calls, reduce.n_bytes, reduce.volume_elements) == ("all_reduce", 1, 4 * PSI, 2 * PSI)
    assert reduce.sent_bytes == 2 * 3 * PSI
    assert (buffers.operation, buffers.calls, buffers.n_bytes) == ("broadcast", 1, 2 * 4 * LLAMA.head_dim // 2)


def test_stage_1_broadcasts_updated_weights_after_the_all_reduce() -> None:
    reduce, broadcast, _ = account(LLAMA, recipe_of(precision="bf16", zero_stage=1), MeshSpec(dp_shard=4), BATCH).collectives
    assert (broadcast.operation, broadcast.n_bytes, broadcast.volume_elements) == ("broadcast", 2 * PSI, PSI)
    assert reduce.volume_elements + broadcast.volume_elements == 3 * PSI


def test_a_single_rank_sends_nothing() -> None:
    for one in account(LLAMA, recipe_of(zero_stage=1), MeshSpec(), BATCH).collectives:
        assert (one.sent_bytes, one.volume_elements) == (0, 0)


def test_accumulation_repeats_the_all_reduce_only_without_no_sync() -> None:
    four = BatchSpec(micro_batch_size=2, seq_len=16, grad_accum_steps=4)
    plain = account(LLAMA, recipe_of(), MeshSpec(dp_shard=2), four).collectives[0]
    window = account(LLAMA, recipe_of(sync_every_micro_batch=False), MeshSpec(dp_shard=2), four).collectives[0]
    assert (plain.calls, window.calls) == (4, 1)
    assert plain.sent_bytes == 4 * window.sent_bytes


def test_a_small_model_fills_one_bucket() -> None:
    assert bucket_count(LLAMA, 4) == 1


def test_every_moment_has_its_own_name_for_any_ranks_and_batch() -> None:
    for spec, recompute, views in product([LLAMA, GPT2], ["none", "full"], [False, True]):
        recipe = recipe_of(recompute=recompute, views=views)
        few = account(spec, recipe, MeshSpec(), BATCH).moments
        many = account(
            spec, recipe, MeshSpec(dp_shard=64), BatchSpec(micro_batch_size=9, seq_len=512, grad_accum_steps=3)
        ).moments
        names = [one.name for one in few]
        assert len(set(names)) == len(names)
        assert names == [one.name for one in many]


@pytest.mark.parametrize("spec", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"precision": "bf16", "views": True},
        {"zero_stage": 1, "recompute": "full"},
        {"zero_stage": 1, "optimizer": "adamw-8bit", "precision": "fp32"},
        {"views": True, "sync_every_micro_batch": False, "optimizer_impl": "forloop"},
        {"zero_stage": 1, "optimizer": "muon", "attention": "eager", "keep_logits": True},
    ],
)
def test_a_grid_is_its_points(spec: ModelSpec, fields: dict[str, object]) -> None:
    recipe = recipe_of(**fields)  # type: ignore[arg-type]
    points = [
        (MeshSpec(dp_shard=ranks), BatchSpec(micro_batch_size=micro, seq_len=length, grad_accum_steps=accum))
        for ranks, micro, length, accum in product((1, 3, 8, 500), (1, 2, 5), (16, 130), (1, 2, 3))
    ]
    columns = Columns(points)
    grid = account(spec, recipe, columns, columns)
    singles = [account(spec, recipe, mesh, batch) for mesh, batch in points]
    for index, moment in enumerate(grid.moments):
        expected = [single.moments[index].total_bytes for single in singles]
        assert np.broadcast_to(moment.total_bytes, len(points)).tolist() == expected, moment.name
    for index, collective in enumerate(grid.collectives):
        for field in ("calls", "n_bytes", "sent_bytes", "volume_elements"):
            column = np.broadcast_to(getattr(collective, field), len(points)).tolist()
            assert column == [getattr(single.collectives[index], field) for single in singles]
