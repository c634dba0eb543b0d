"""Plans are started: the engine's own code takes the layout on fake tensors, and needs what was said."""

from dataclasses import replace

import pytest

from zeroplan import ClusterSpec, JobSpec, MeshSpec, ModelSpec
from zeroplan.catalog.gpu import gpu
from zeroplan.comparison import compare_with_estimate
from zeroplan.planner import Fixed, plan
from zeroplan.spec.batch import BatchSpec

pytestmark = pytest.mark.torch

MODEL = ModelSpec(
    family="llama", hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    head_dim=64, vocab_size=8192,
)  # fmt: skip


@pytest.mark.parametrize(
    ("room_mb", "fixed"),
    [
        (2_250, Fixed(engine="fsdp2", global_batch_size=64)),
        (1_850, Fixed(engine="fsdp2", global_batch_size=64, loss="full")),
        (2_050, Fixed(engine="ddp", global_batch_size=64)),
    ],
    ids=["fsdp2", "fsdp2, the whole loss", "ddp"],
)
def test_a_plan_starts_and_fits(room_mb: int, fixed: Fixed):
    pytest.importorskip("transformers")
    from tests.simulated import simulate

    card = gpu("h100")
    card = replace(card, memory_bytes=replace(card.memory_bytes, value=room_mb * 10**6))
    base = JobSpec(model=MODEL, cluster=ClusterSpec(gpu=card), mesh=MeshSpec(dp_shard=8), batch=BatchSpec(seq_len=512))
    answer = plan(base, fixed)
    assert answer.best is not None
    assert any(one.rule.name == "MEMORY" for one in answer.fallen), "the search has something to avoid"
    compared = compare_with_estimate(simulate(answer.best.layout.job, steps=3))
    assert abs(compared.peak.error) < 0.001, compared
    assert compared.peak.measured + answer.best.estimate.outside_band.expected_bytes <= room_mb * 10**6
