"""Compares sliding windows, global layers and attention biases of Gemma, Phi-3 and Mistral with real modules on a CPU."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.causal_models import tiny_spec
from tests.transformer.autograd_runs import saved_bytes, step_timeline
from zeroplan.comparison import cpu_bytes
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.activations import block_pass
from zeroplan.transformer.blocks import Compute
from zeroplan.transformer.head import head_pass

pytestmark = pytest.mark.torch

WIDTHS = {"bf16": (2, False), "fp32": (4, False), "autocast": (2, True)}
PRECISIONS = {name: Compute(*widths, attention="sdpa", kernels="cpu") for name, widths in WIDTHS.items()}
#: Rows that a CUDA kernel pads and a CPU's does not come in multiples of 16 and 32.
BATCHES = (BatchSpec(micro_batch_size=2, seq_len=64), BatchSpec(micro_batch_size=1, seq_len=96))


def windowed(family: str, *, kv_heads: int = 2, layers: int = 2) -> ModelSpec:
    return tiny_spec(family, heads=4, kv_heads=kv_heads, head_dim=16, ffn=176, vocab=104, hidden=72, layers=layers, window=32)


@pytest.mark.parametrize("family", ["gemma3_text", "phi3", "mistral"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("batch", BATCHES)
def test_saved_tensors_of_windowed_layers(family: str, kv_heads: int, precision: str, batch: BatchSpec) -> None:
    spec, compute = windowed(family, kv_heads=kv_heads), PRECISIONS[precision]
    one, two = (saved_bytes(spec, compute, batch, layers=layers) for layers in (1, 2))
    block = block_pass(spec, "local", compute, batch)
    casts = 2 * block.cast_elements if compute.autocast else 0
    assert two - one == cpu_bytes(block.saved, compute) + casts


@pytest.mark.parametrize("family", ["gemma3_text", "phi3"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_windowed_layers_peak_where_they_say(family: str, precision: str) -> None:
    spec, compute, batch = windowed(family), PRECISIONS[precision], BatchSpec(micro_batch_size=2, seq_len=128)
    timeline, block, head = step_timeline(spec, compute, batch), block_pass(spec, "local", compute, batch), None
    head = head_pass(spec, compute, batch)
    assert isinstance(head.hidden_bytes, int)
    measured = timeline.peak_bytes("forward 1", "forward 1 end") - timeline.live_bytes("forward 1") + head.hidden_bytes
    assert cpu_bytes(block.saved + block.forward, compute) == pytest.approx(measured, rel=4e-3)
    at_start = cpu_bytes(block.saved, compute) + head.hidden_bytes
    back = timeline.peak_bytes("backward 1", "backward 1 end") - timeline.live_bytes("backward 1") + at_start
    width = compute.element_bytes
    highest = max(cpu_bytes(point.lines, compute) + width * point.gradients for point in block.points)
    assert highest == pytest.approx(back, rel=5e-4)


def test_gemma_with_global_layers_has_tables_for_both_kinds() -> None:
    compute, batch = PRECISIONS["bf16"], BatchSpec(micro_batch_size=2, seq_len=64)
    spec = windowed("gemma3_text", layers=6)
    whole = saved_bytes(spec, compute, batch, layers=6)
    kept = 5 * cpu_bytes(block_pass(spec, "local", compute, batch).saved, compute)
    kept += cpu_bytes(block_pass(spec, "global", compute, batch).saved, compute)
    head = head_pass(spec, compute, batch)
    tables = cpu_bytes(head.shared[1:], compute)
    scale_and_label_sum = 2 + 4
    assert whole == kept + cpu_bytes(head.saved + head.loss, compute) + tables + scale_and_label_sum


@pytest.mark.parametrize("family", ["gemma3_text", "gemma2"])
def test_attention_biases_save_nothing(family: str) -> None:
    compute, batch = PRECISIONS["bf16"], BATCHES[0]
    plain = tiny_spec(family, heads=4, kv_heads=2, head_dim=16, ffn=176, vocab=104, hidden=72)
    biased = dataclasses.replace(plain, attention_bias=True)
    without, with_bias = (block_pass(spec, "global", compute, batch) for spec in (plain, biased))
    assert cpu_bytes(without.saved, compute) == cpu_bytes(with_bias.saved, compute)
    assert with_bias.points[-1].gradients - without.points[-1].gradients == 64 + 2 * 32 + 72
