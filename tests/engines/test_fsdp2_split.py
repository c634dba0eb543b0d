"""FSDP2 with tensor and context parallelism: columns of jobs, shares, traffic, step time, and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engines.columns import Columns, assert_is_its_points
from zeroplan import BatchSpec, JobSpec, MeshSpec, RecipeSpec, SpecError, estimate
from zeroplan.catalog.gpu import gpu
from zeroplan.catalog.model import model
from zeroplan.engines import fsdp2
from zeroplan.engines.fsdp2.traffic import KEYS
from zeroplan.ledger import Kind
from zeroplan.spec.adapter import AdapterSpec
from zeroplan.spec.hardware import ClusterSpec
from zeroplan.spec.recipe import Fsdp2Options
from zeroplan.steptime import step_time
from zeroplan.steptime.links import crosses, links
from zeroplan.steptime.sending import group_of

LLAMA = model("llama-3.1-8b")
_WHOLE = RecipeSpec(precision="bf16", fsdp2=Fsdp2Options(sequence_parallel=False))
JOB = JobSpec(model=LLAMA, mesh=MeshSpec(dp_shard=2, tp=4), batch=BatchSpec(seq_len=4096))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_columns_are_their_points(recompute: str):
    recipe = RecipeSpec(recompute=recompute)
    points = [
        (MeshSpec(dp_shard=1, tp=2), BatchSpec(seq_len=128)),
        (MeshSpec(dp_shard=8, tp=2), BatchSpec(micro_batch_size=3, seq_len=4096, grad_accum_steps=2)),
        (MeshSpec(dp_shard=4, dp_replicate=2, tp=2), BatchSpec(micro_batch_size=2, seq_len=64, grad_accum_steps=3)),
    ]
    columns = Columns(points)
    grid = fsdp2.account(LLAMA, recipe, columns, columns)
    assert_is_its_points(grid, [fsdp2.account(LLAMA, recipe, mesh, batch) for mesh, batch in points])


@pytest.mark.parametrize("optimizer", ["te-adam", "te-adam-masters", "te-adam-remainders"])
def test_transformer_engines_adam_has_states_of_a_ranks_own_parts(optimizer: str):
    """Norms are whole on every rank, so a rank of four has a little more than a quarter."""
    job = replace(JOB, recipe=RecipeSpec(optimizer=optimizer, precision="bf16"))  # type: ignore[arg-type]
    whole, split = (
        estimate(one).states_by_kind[Kind.OPTIMIZER_STATE] for one in (replace(job, mesh=MeshSpec(dp_shard=2)), job)
    )
    assert 1 <= 4 * split / whole < 1.001


def test_tensor_parallel_ranks_hold_their_share():
    """Everything except norms is split. The embedding's gradient is whole for a moment."""
    whole, split = estimate(replace(JOB, mesh=MeshSpec(dp_shard=2))), estimate(JOB)
    norms = 65 * LLAMA.hidden_size
    assert sum(split.states_by_kind.values()) * 4 == sum(whole.states_by_kind.values()) + 3 * 16 * norms // 2
    (line,) = {line for moment in split.moments for line in moment.lines if line.reason == "gradient of the whole embedding"}
    assert line.n_bytes == 2 * LLAMA.vocab_size * LLAMA.hidden_size


def test_tensor_parallel_traffic_stays_among_neighbours_and_nothing_hides_it():
    cluster = ClusterSpec(gpu=gpu("h100-sxm-80gb"), gpus_per_node=8)
    mesh = MeshSpec(dp_shard=2, tp=8)
    account = fsdp2.account(LLAMA, RecipeSpec(), mesh, JOB.batch)
    among = [call for call in account.collectives if call.near]
    assert {int(call.group) for call in among} == {8}
    assert {call.operation for call in among} == {"all_gather", "reduce_scatter", "all_reduce"}
    quick = step_time(account, LLAMA, RecipeSpec(), mesh, JOB.batch, cluster, mfu=0.5)  # given mfu: no wait for kernels
    slow = step_time(account, LLAMA, RecipeSpec(), mesh, JOB.batch, replace(cluster, gpus_per_node=4), mfu=0.5)
    assert slow.seconds > 1.2 * quick.seconds  # the same calls, now between nodes
    alone = step_time(
        fsdp2.account(LLAMA, RecipeSpec(), MeshSpec(dp_shard=16), JOB.batch), LLAMA, RecipeSpec(), MeshSpec(dp_shard=16),
        JOB.batch, cluster,
    )  # fmt: skip
    assert alone.model_flops == pytest.approx(8 * quick.model_flops)
    assert alone.tokens == 8 * quick.tokens


@pytest.mark.parametrize("tp", [1, 2])
def test_columns_with_context_parallelism_are_their_points(tp: int):
    points = [
        (MeshSpec(cp=4, tp=tp), BatchSpec(seq_len=128)),
        (
            MeshSpec(dp_shard=8, dp_replicate=2, cp=4, tp=tp),
            BatchSpec(micro_batch_size=3, seq_len=4096, grad_accum_steps=2),
        ),
    ]
    columns = Columns(points)
    grid = fsdp2.account(LLAMA, RecipeSpec(), columns, columns)
    assert_is_its_points(grid, [fsdp2.account(LLAMA, RecipeSpec(), mesh, batch) for mesh, batch in points])


def test_keys_and_values_leave_the_node_if_tensor_and_context_parallelism_exceed_it():
    """Ranks that share a sequence are ``tp`` apart, so that tp=8 with cp=2, or tp=4 with cp=4, crosses nodes of eight GPUs."""
    cluster = ClusterSpec(gpu=gpu("h100-sxm-80gb"), gpus_per_node=8)
    here = links(cluster)
    for tp, cp, alone in ((1, 8, False), (4, 2, False), (8, 2, True), (4, 4, True)):
        mesh = MeshSpec(dp_shard=2, tp=tp, cp=cp)
        calls = [call for call in fsdp2.account(LLAMA, RecipeSpec(), mesh, JOB.batch).collectives if call.what.endswith(KEYS)]
        assert {int(call.group) for call in calls} == {cp}
        assert {bool(crosses(group_of(call, RecipeSpec(), mesh, here))) for call in calls} == {alone}


def test_ranks_that_share_a_sequence_share_its_operations():
    cluster = ClusterSpec(gpu=gpu("h100-sxm-80gb"), gpus_per_node=8)
    times = []
    for mesh in (MeshSpec(dp_shard=2, cp=4), MeshSpec(dp_shard=8)):
        account = fsdp2.account(LLAMA, RecipeSpec(), mesh, JOB.batch)
        times.append(step_time(account, LLAMA, RecipeSpec(), mesh, JOB.batch, cluster))
    shared, alone = times
    assert alone.model_flops == pytest.approx(4 * shared.model_flops)
    assert alone.tokens == 4 * shared.tokens


def test_ligers_loss_of_a_ranks_share_is_that_of_as_many_tokens():
    """Its labels are shifted before ranks share them."""
    fused, long = replace(JOB.recipe, loss="fused"), replace(JOB.batch, seq_len=2 * JOB.batch.seq_len)
    alone, shared = (
        replace(JOB, recipe=fused, mesh=MeshSpec(dp_shard=4)),
        replace(JOB, recipe=fused, batch=long, mesh=MeshSpec(dp_shard=2, cp=2)),
    )
    logits = [
        {line.reason: line.n_bytes for one in estimate(job).engine_moments for line in one.lines if line.kind is Kind.LOGITS}
        for job in (alone, shared)
    ]
    labels = {"labels, padded", "labels, shifted"}
    assert logits[1] == {reason: size for reason, size in logits[0].items() if reason not in labels}
    assert "logits of a chunk" in logits[1]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mesh": MeshSpec(cp=3)}, "seq_len"),
        ({"mesh": MeshSpec(cp=8, tp=8), "batch": BatchSpec(seq_len=4000)}, "seq_len / cp=8"),
        ({"mesh": MeshSpec(cp=2), "model": model("gemma-2-2b")}, "gemma2"),
        ({"mesh": MeshSpec(cp=2), "recipe": RecipeSpec(precision="fp32")}, "fp32"),
        ({"mesh": MeshSpec(cp=2), "model": model("open-llama-3b")}, "head_dim=100"),
        ({"mesh": MeshSpec(cp=2), "recipe": RecipeSpec(engine="ddp", zero_stage=0)}, "ddp"),
        ({"mesh": MeshSpec(cp=2), "recipe": RecipeSpec(attention="eager")}, "eager"),
        ({"mesh": MeshSpec(cp=2), "recipe": RecipeSpec(loss="chunked")}, "chunked"),
    ],
)  # fmt: skip
def test_unsupported_context_parallelism_is_refused_in_one_line(changes: dict[str, object], says: str):
    with pytest.raises(SpecError, match=says) as refused:
        replace(JOB, **changes)
    assert "cp=" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mesh": MeshSpec(tp=16)}, "num_key_value_heads"),
        ({"batch": BatchSpec(seq_len=1002)}, "seq_len"),
        ({"model": model("gemma-2-2b")}, "gemma2"),
        ({"recipe": RecipeSpec(engine="ddp", zero_stage=0)}, "ddp"),
        ({"recipe": RecipeSpec(attention="eager")}, "eager"),
        ({"recipe": RecipeSpec(loss="chunked")}, "chunked"),
        ({"recipe": RecipeSpec(sync_every_micro_batch=False)}, "sync_every_micro_batch"),
        ({"recipe": RecipeSpec(fsdp2=Fsdp2Options(reshard_after_forward=2))}, "reshard_after_forward"),
        ({"recipe": RecipeSpec(optimizer="muon")}, "muon"),
        ({"model": replace(LLAMA, adapter=AdapterSpec(rank=8))}, "adapters and fsdp2.sequence_parallel"),
        (
            {"model": replace(LLAMA, adapter=AdapterSpec(rank=8)), "recipe": replace(_WHOLE, recompute="full")},
            "adapters and recompute 'full'",
        ),
        ({"model": replace(LLAMA, adapter=AdapterSpec(rank=6)), "recipe": _WHOLE}, "adapters of rank 6"),
        ({"mesh": MeshSpec(tp=4, cp=2), "recipe": _WHOLE}, "sequence_parallel=false and cp=2"),
        ({"model": model("mistral-7b-v0.1")}, "sliding window"),
        ({"recipe": RecipeSpec(recompute="full", offload_activations=True)}, "offload_activations"),
    ],
)  # fmt: skip
def test_unsupported_tensor_parallelism_is_refused_in_one_line(changes: dict[str, object], says: str):
    with pytest.raises(SpecError, match=says) as refused:
        replace(JOB, **changes)
    assert "tp=" in str(refused.value)
    assert "\n" not in str(refused.value)
