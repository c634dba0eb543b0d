"""Compares blocks with peft's adapters with what autograd saves for them, to the byte."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zeroplan.spec.adapter import AdapterSpec
from zeroplan.spec.family import modelled

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft", reason="peft is not installed, and builds the adapters that are measured here")
pytestmark = pytest.mark.torch

from tests.causal_models import adapted_model, tiny_spec  # noqa: E402
from tests.combined import combined  # noqa: E402
from tests.transformer.autograd_runs import saved_bytes  # noqa: E402
from zeroplan.ledger import total_bytes  # noqa: E402
from zeroplan.spec.batch import BatchSpec  # noqa: E402
from zeroplan.transformer.activations import block_pass  # noqa: E402
from zeroplan.transformer.blocks import Compute  # noqa: E402
from zeroplan.transformer.head import head_pass  # noqa: E402
from zeroplan.transformer.params import layout, trained_count  # noqa: E402

BATCH = BatchSpec(micro_batch_size=2, seq_len=32)
PRECISIONS = {
    "bf16": Compute(2, autocast=False, attention="sdpa", kernels="cpu"),
    "fp32": Compute(4, autocast=False, attention="sdpa", kernels="cpu"),
    "autocast": Compute(2, autocast=True, attention="sdpa", kernels="cpu"),
}
TARGETS = ("all-linear", "q_proj,v_proj", "gate_proj,down_proj")
LABEL_WEIGHTS = 4
"""Bytes of their sum, which the account of the loss leaves out."""


@pytest.mark.parametrize(
    ("family", "precision", "targets"), combined(modelled("adapters everywhere"), tuple(PRECISIONS), TARGETS)
)
def test_what_an_adapted_model_saves_is_what_autograd_saves(family: str, precision: str, targets: str):
    bare = tiny_spec(family, heads=4, kv_heads=2, head_dim=16, ffn=176, vocab=96)
    spec, compute = replace(bare, adapter=AdapterSpec(rank=4, targets=targets)), PRECISIONS[precision]
    first, other = (block_pass(spec, kind, compute, BATCH) for kind in ("first", "dense"))
    head = head_pass(spec, compute, BATCH)
    casts = 2 * (first.cast_elements + 2 * other.cast_elements) if compute.autocast else 0
    outside = total_bytes((*head.shared[1:], *head.saved, *head.loss)) + LABEL_WEIGHTS
    expected = total_bytes(first.saved) + 2 * total_bytes(other.saved) + casts + outside
    assert saved_bytes(spec, compute, BATCH, layers=3) == expected


@pytest.mark.parametrize("family", modelled("adapters everywhere"))
def test_parameters_stand_as_peft_has_them(family: str):
    bare = tiny_spec(family, heads=4, kv_heads=2, head_dim=16, ffn=176, vocab=96)
    spec = replace(bare, adapter=AdapterSpec(rank=4, targets="attention,down_proj"))
    module = adapted_model(spec, PRECISIONS["bf16"]).get_base_model()
    tree = layout(spec)
    expected = [*tree.embeddings, *(one for run in tree.runs for one in run.parameters * run.layers), *tree.tail]
    found = list(module.named_parameters())
    assert [(one.shape, not one.frozen) for one in expected] == [(tuple(p.shape), p.requires_grad) for _, p in found]
    assert all(name.endswith(one.name) for one, (name, _) in zip(expected, found, strict=True))
    assert trained_count(spec) == sum(p.numel() for p in module.parameters() if p.requires_grad)
