"""Losses of the last token of each sequence on Megatron-Core: their parameters, and what torch takes for them on a CPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.formulas import assert_explained
from tests.workflow.watched import Watch
from zeroplan import estimate
from zeroplan.engines.megatron.loss import kept_of_last_tokens, last_tokens_backward
from zeroplan.errors import SpecError
from zeroplan.ledger import Kind, total_bytes
from zeroplan.resolve import job
from zeroplan.spec.described import JobParts
from zeroplan.spec.job import JobSpec
from zeroplan.spec.recipe import MegatronOptions

SEQUENCES, TOKENS = 4, 256


def asked(task: str | None, **more: Any) -> JobSpec:
    said: dict[str, Any] = {
        "model": "qwen3-0.6b", "gpus": 4, "engine": "megatron", "stage": 1, "seq_len": TOKENS, "micro_batch": SEQUENCES,
        "gpu": "h100-sxm-80gb", "megatron": MegatronOptions(last_tokens=task), **more,
    }  # fmt: skip
    return job(**said)


@pytest.mark.parametrize("task", ["embedding", "reranker"])
@pytest.mark.parametrize(
    "more", [{}, {"tensor_parallel": 2, "sequence_parallel": True}, {"pipeline_parallel": 2, "grad_accum": 4}]
)
def test_lines_are_explained_and_an_embedding_has_no_head(task: str, more: dict[str, Any]):
    plain, found = (estimate(asked(one, model="qwen3-8b", **more)) for one in (None, task))
    assert_explained(found)
    weights = [sum(int(line.n_bytes) for line in one.states if line.kind is Kind.PARAMETERS) for one in (plain, found)]
    assert found.peak_bytes <= plain.peak_bytes
    if "pipeline_parallel" in more:  # its first rank is the fullest, and has no head
        return
    ways = more.get("tensor_parallel", 1)
    head = 2 * -(-151936 // (128 * ways)) * 128 * 4096
    assert weights[0] - weights[1] == (head if task == "embedding" else 0)
    at_loss = [next(int(moment.total_bytes) for moment in one.moments if moment.name == "loss") for one in (plain, found)]
    assert at_loss[1] < at_loss[0]


def test_what_torch_takes_for_embeddings_is_at_most_what_counts():
    """mcore-bridge normalises hidden states and copies them in the order of sequences; ms-swift reads the last tokens."""
    torch = pytest.importorskip("torch")
    spec = asked("embedding")
    parts = JobParts(spec.model, spec.recipe, spec.mesh, spec.batch)
    hidden = spec.model.hidden_size
    normal = torch.randn(TOKENS, SEQUENCES, hidden, dtype=torch.bfloat16, requires_grad=True)
    with Watch() as watch:
        output = torch.nn.functional.normalize(normal, p=2, dim=-1).transpose(0, 1).contiguous()
        forward, watch.peak = watch.peak, watch.now
        last = output[torch.arange(SEQUENCES), torch.full((SEQUENCES,), TOKENS - 1)]
        loss = (last @ last.T).sum()
        loss.backward()
    few = 64 * SEQUENCES * TOKENS
    assert forward <= total_bytes(tuple(kept_of_last_tokens(parts))) + few
    counted = total_bytes(tuple(last_tokens_backward(parts)))
    assert 0.6 * counted < watch.peak <= counted + few


def test_last_tokens_are_refused_beside_what_reads_all_tokens():
    with pytest.raises(SpecError, match="last_tokens 'embedding' and mtp_num_layers"):
        asked("embedding", megatron=MegatronOptions(last_tokens="embedding", mtp_num_layers=1))
