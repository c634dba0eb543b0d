"""Expert parallelism under FSDP2: refusals, formulas, columns of jobs, and a rank's share of the experts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engines.columns import Columns, assert_is_its_points
from tests.expert_jobs import JOBS, expert_job, expert_model
from tests.formulas import assert_explained, assert_symbols_mean_one_thing
from zeroplan.engines.fsdp2 import account
from zeroplan.errors import SpecError
from zeroplan.estimator import account_of, estimate
from zeroplan.ledger import Kind, bytes_by_kind
from zeroplan.resolve import job as named
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.recipe import Fsdp2Options
from zeroplan.steptime import step_time


@pytest.mark.parametrize("name", JOBS)
def test_every_line_is_explained(name: str) -> None:
    answer = estimate(JOBS[name])
    assert_explained(answer)
    assert_symbols_mean_one_thing(answer)
    assert any("even routing" in note or "the even share" in note for note in answer.notes)


def test_a_rank_holds_its_part_of_its_experts_and_of_everything_else() -> None:
    """Mixtral 8x7B on 64 GPUs: shares are even, except of the routers, whose eight rows leave at most one row per rank."""
    answer = estimate(replace(named(model="mixtral-8x7b", gpus=64, stage=3), mesh=MeshSpec(dp_shard=64, ep=8)))
    assert answer.states_by_kind[Kind.PARAMETERS] == 4 * (46_702_792_704 // 64 + 32 * (4096 - 4096 * 8 // 64))


def test_a_column_of_ranks_and_batches_is_its_points() -> None:
    one = expert_job(recompute="full")
    points = [
        (MeshSpec(dp_shard=ranks, ep=8), BatchSpec(micro_batch_size=size, seq_len=64, grad_accum_steps=steps))
        for ranks, size, steps in ((8, 1, 1), (16, 2, 2), (32, 2, 3), (64, 4, 1))
    ]
    columns = Columns(points)
    whole = account(one.model, one.recipe, columns, columns)
    assert_is_its_points(whole, [account(one.model, one.recipe, mesh, batch) for mesh, batch in points])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"ep": 3, "dp_shard": 9}, "ep=3 does not divide the 8 experts"),
        ({"ep": 4, "dp_shard": 6}, "ep=4 does not divide the 6 ranks"),
        ({"ep": 4, "fsdp2": Fsdp2Options(reshard_after_forward=2)}, "a number for reshard_after_forward is not modelled"),
        ({"ep": 4, "fsdp2": Fsdp2Options(cpu_offload=True)}, "offload to host memory is not modelled"),
        ({"ep": 4, "engine": "ddp", "zero_stage": 0}, "engine 'ddp' is not modelled"),
        ({"ep": 2, "dp_shard": 20}, "10 ranks that have the same experts"),
        ({"ep": 2, "model": named(model="gpt2", gpus=8, stage=3).model}, "has none"),
    ],
)
def test_what_is_not_modelled_is_refused(changed: dict[str, object], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        expert_job(**changed)


def test_traffic_is_counted_and_timed() -> None:
    """In each of 4 layers tokens go out and return, in forward, backward and recomputation; 3/4 of them leave their rank."""
    pairs = 2 * 64 * 2 * 64 * 2  # b·s·t·h elements of 2 bytes
    for recompute, times in (("none", 4), ("full", 6)):
        sent = sum(
            call.sent_bytes
            for call in estimate(expert_job(recompute=recompute)).traffic.collectives
            if call.operation == "all_to_all" and call.what.startswith("tokens")
        )
        assert sent == times * 4 * pairs * 3 // 4
    job = named(model="mixtral-8x7b", gpus=64, stage=3, gpu="h100-sxm-80gb", recompute="full")
    waits = {}
    for ep in (2, 8):
        split = replace(job, mesh=replace(job.mesh, ep=ep))
        took = step_time(account_of(split, split.batch), split.model, split.recipe, split.mesh, split.batch, split.cluster)
        waits[ep] = sum(part.seconds for part in took.parts if "waiting" in part.name)
    assert 0 < waits[8] < waits[2], waits  # with the eight experts on a node's eight GPUs, tokens stay in the node


def test_fewer_experts_than_ranks_are_not_padded() -> None:
    """Sharded along dim 0, eight experts on 64 ranks would take eight times their share."""
    states = bytes_by_kind(estimate(expert_job(dp_shard=64, ep=8)).states)
    along_dim_0 = bytes_by_kind(estimate(expert_job(dp_shard=64, ep=1)).states)
    assert 4 * states[Kind.PARAMETERS] < along_dim_0[Kind.PARAMETERS]
    assert expert_model().moe.num_experts == 8
