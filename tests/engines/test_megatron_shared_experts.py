"""Engine megatron: a shared expert with a gate, also beside the dispatch, against runs of Megatron-Core's own layers."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest

from tests.measured import megatron
from zeroplan import estimate, job
from zeroplan.comparison import compare_with_estimate
from zeroplan.engines.megatron.rank import rank_of
from zeroplan.measurement import Measurement
from zeroplan.spec.job import JobSpec

needs_megatron = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")


def qwen(*, overlap: bool = False, **said: object) -> JobSpec:
    """Return a job whose memory peaks in the layers: few of them, and a small vocabulary."""
    asked = {"engine": "megatron", "stage": 1, "attention": "eager", "micro_batch": 8, "seq_len": 256, "gpus": 4, **said}
    found = job(model="qwen1.5-moe-a2.7b", expert_parallel=2, **asked)
    model = found.model
    assert model.moe is not None
    own = replace(
        found.recipe.megatron, transformer_impl="local", moe_grouped_gemm=False, create_attention_mask_in_dataloader=False,
        moe_shared_expert_overlap=overlap,
    )  # fmt: skip
    small = replace(model, num_hidden_layers=2, moe=replace(model.moe, num_experts=8), vocab_size=2048)
    return replace(found, model=small, recipe=replace(found.recipe, megatron=own))


@needs_megatron
@pytest.mark.torch
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("said", [
    {}, {"recompute": "full"}, {"tensor_parallel": 2, "sequence_parallel": True},
    {"tensor_parallel": 2, "sequence_parallel": True, "recompute": "full"},
])  # fmt: skip
def test_the_peak_in_the_layers_is_that_of_a_run(*, overlap: bool, said: dict[str, object]) -> None:
    one = megatron.matrix.measured(qwen(overlap=overlap, **said), silent_after=300, rank=0)
    assert isinstance(one, Measurement), one
    beyond = [row for row in compare_with_estimate(one).beyond(0.001) if row.what in ("peak allocated", "held between steps")]
    assert not beyond, [f"{row.what} {row.error:+.3%}" for row in beyond]


def test_every_tensor_parallel_rank_has_the_whole_gate() -> None:
    halves, whole = (rank_of(0, qwen(tensor_parallel=ways, sequence_parallel=ways > 1)).elements for ways in (2, 1))
    model = qwen().model
    moe, hidden = model.moe, model.hidden_size
    assert moe is not None
    replicated = model.num_hidden_layers * (moe.num_experts + 1 + 2) * hidden + hidden  # routers, gates and norms
    assert 2 * halves - whole == replicated


def test_an_overlapped_shared_expert_keeps_its_gathered_input() -> None:
    split = {"tensor_parallel": 2, "sequence_parallel": True, "recompute": "none"}
    apart, beside = (dict(estimate(qwen(overlap=overlap, **split)).kept) for overlap in (False, True))
    assert sum(line.n_bytes for line in beside["moe"]) - sum(line.n_bytes for line in apart["moe"]) == 2 * 8 * 256 * 2048
