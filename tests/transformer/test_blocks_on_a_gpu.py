"""Compares blocks whose attention CUDA or transformers runs operator by operator with fake tensors on a fake GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.causal_models import causal_model, tiny_spec
from tests.transformer.autograd_runs import saved_bytes
from tests.transformer.fake_blocks import BlockRun, block_run
from tests.transformer.moe_models import moe_spec
from zeroplan.comparison import cpu_bytes
from zeroplan.ledger import Line
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.activations import block_pass
from zeroplan.transformer.blocks import Compute
from zeroplan.transformer.families.tags import SCRATCH
from zeroplan.transformer.head import head_pass

pytestmark = pytest.mark.torch

RANDOM_STATE = 16
"""Bytes of the seed and the offset that CUDA's attention kernels save, which the account leaves out."""
FP32 = Compute(4, autocast=False, attention="sdpa")
BF16 = FP32._replace(element_bytes=2)
AUTOCAST = BF16._replace(autocast=True)
FP16 = BF16._replace(attention="eager", is_fp16=True)
#: As in test_activations; of the last the scores weigh more than the experts.
GPT_OSS = {
    "grouped heads": (2, 40, 4, 2, 16, 176, 104, 72),
    "one sequence": (1, 33, 6, 3, 8, 96, 136, 72),
    "one key/value head": (3, 24, 4, 1, 32, 136, 64, 120),
    "long": (1, 200, 8, 2, 16, 32, 64, 64),
}


def gpt_oss(shape: str) -> tuple[ModelSpec, BatchSpec]:
    sizes = GPT_OSS[shape]
    spec = replace(moe_spec("gpt_oss", sizes), sliding_window=16)
    return spec, BatchSpec(micro_batch_size=sizes[0], seq_len=sizes[1])


@pytest.mark.parametrize("family", ["gemma3_text", "phi3"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("batch", [(2, 200), (1, 64)])
def test_attention_of_grouped_heads_in_32_bits(family: str, batch: tuple[int, int], *, recompute: bool) -> None:
    spec = tiny_spec(family, heads=8, kv_heads=2, head_dim=16, ffn=176, vocab=104, hidden=72)
    size = BatchSpec(micro_batch_size=batch[0], seq_len=batch[1])
    assert predicted(spec, "dense", FP32, size, recompute=recompute) == block_run(spec, FP32, size, recompute=recompute)


@pytest.mark.parametrize("compute", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("shape", ["grouped heads", "one key/value head", "long"])
def test_gpt_oss(compute: Compute, shape: str, *, recompute: bool) -> None:
    spec, size = gpt_oss(shape)
    assert predicted(spec, "moe", compute, size, recompute=recompute) == block_run(spec, compute, size, recompute=recompute)


@pytest.mark.parametrize("compute", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("batch", [(2, 200), (1, 64)])
def test_mistral_beyond_its_window(compute: Compute, batch: tuple[int, int], *, recompute: bool) -> None:
    spec = tiny_spec("mistral", heads=8, kv_heads=2, head_dim=16, ffn=176, vocab=104, hidden=72, window=64)
    size = BatchSpec(micro_batch_size=batch[0], seq_len=batch[1])
    said = predicted(spec, "dense", compute, size, recompute=recompute)
    run = block_run(spec, compute, size, recompute=recompute)
    assert {measured - predicted for measured, predicted in zip(run, said, strict=True)} <= {0, RANDOM_STATE}


@pytest.mark.parametrize("hidden_act", [None, "gelu_fast"])
@pytest.mark.parametrize(("parallel", "recompute"), [(False, False), (False, True), (True, True)])
def test_gpt_neox_written_out(hidden_act: Literal["gelu_fast"] | None, *, parallel: bool, recompute: bool) -> None:
    plain = tiny_spec("gpt_neox", heads=4, kv_heads=4, head_dim=32, ffn=376, vocab=104)
    spec = replace(plain, hidden_act=hidden_act, parallel_residual=parallel)
    compute, size = BF16._replace(attention="eager"), BatchSpec(micro_batch_size=2, seq_len=64)
    assert predicted(spec, "dense", compute, size, recompute=recompute) == block_run(spec, compute, size, recompute=recompute)


@pytest.mark.parametrize("family", ["gpt_neox", "llama", "gemma2", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("recompute", [False, True])
def test_softmax_of_fp16_needs_no_copy_in_fp32(family: str, *, recompute: bool) -> None:
    shape, size = (2, 64, 8, 8, 16, 176, 104, 128), BatchSpec(micro_batch_size=2, seq_len=64)
    if family in ("qwen3_moe", "mixtral"):
        spec, kind = moe_spec(family, shape), "moe"
    else:
        spec, kind = tiny_spec(family, heads=8, kv_heads=8, head_dim=16, ffn=176, vocab=104), "dense"
    assert predicted(spec, kind, FP16, size, recompute=recompute) == block_run(spec, FP16, size, recompute=recompute)


@pytest.mark.parametrize("compute", [BF16, AUTOCAST], ids=["bf16", "autocast"])
@pytest.mark.parametrize("shape", ["grouped heads", "one sequence"])
def test_gpt_oss_saves_what_autograd_does(compute: Compute, shape: str) -> None:
    spec, size = gpt_oss(shape)
    one, two = (saved_bytes(spec, compute, size, layers=layers) for layers in (1, 2))
    block, head = block_pass(spec, "moe", compute, size), head_pass(spec, compute, size)
    casts = 2 if compute.autocast else 0
    assert two - one == cpu_bytes(block.saved, compute) + casts * block.cast_elements
    outside = cpu_bytes(head.saved + head.loss + head.shared[1:], compute) + casts * spec.vocab_size * spec.hidden_size
    assert one - (two - one) == outside + 4  # the sum of label weights


def test_gpt_oss_has_made_every_gradient_at_the_last_point() -> None:
    spec, size = gpt_oss("grouped heads")
    block = causal_model(spec, BF16).get_decoder().layers[0]
    elements = sum(parameter.numel() for parameter in block.parameters())
    assert block_pass(spec, "moe", BF16, size).points[-1].gradients == elements


def predicted(spec: ModelSpec, kind: str, compute: Compute, size: BatchSpec, *, recompute: bool) -> BlockRun:
    """Return the predicted bytes of a run, without the scratch of kernels."""
    block = block_pass(spec, kind, compute, size, recomputed=recompute)
    kept = bytes_of(block.checkpoint if recompute else block.saved)
    forward = block.forward_recompute if recompute else block.forward
    highest = max(bytes_of(point.lines) + compute.element_bytes * point.gradients for point in block.points)
    again = bytes_of(block.checkpoint_in_backward) if recompute else 0
    hidden = head_pass(spec, compute, size).hidden_bytes
    assert isinstance(hidden, int)
    return BlockRun(kept, kept + bytes_of(forward) - hidden, highest + again - kept - hidden)


def bytes_of(lines: tuple[Line, ...]) -> int:
    return sum(int(line.n_bytes) for line in lines if line.tag != SCRATCH)
