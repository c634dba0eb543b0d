"""Compares torchao's weights in four bits, as torchtune has them, with torchao's own tensors on a CPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
nf4_tensor = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")

from tests.workflow.watched import Watch  # noqa: E402
from zeroplan import estimate, job  # noqa: E402

pytestmark = pytest.mark.torch
SIDE = 1024


def measured() -> tuple[float, float]:
    """Return the bytes per weight at the highest moments of a product's forward and backward, with hardly any tokens."""
    weight = nf4_tensor.to_nf4(torch.randn(SIDE, SIDE, dtype=torch.bfloat16))
    given = torch.randn(1, SIDE, dtype=torch.bfloat16, requires_grad=True)
    with Watch() as watch:
        made = nf4_tensor.linear_nf4(given, weight)
        forward, watch.peak = watch.peak, watch.now
        made.sum().backward()
    return forward / SIDE**2, watch.peak / SIDE**2


def test_a_weight_is_written_out_of_four_bits_in_steps() -> None:
    forward, backward = measured()
    steps = 12 + 4 / 64 + 2
    assert forward <= steps <= forward + 0.02
    assert backward <= steps <= backward + 0.02


def highest_in_down_projections(quantize: str) -> int:
    asked = job(
        model="llama-3.1-8b", lora_rank=8, quantize=quantize, precision="bf16", engine="ddp", stage=0, seq_len=64
    )  # fmt: skip
    return max(int(one.total_bytes) for one in estimate(asked).engine_moments if "down" in one.name)


def test_a_block_holds_these_steps_at_its_highest_moment() -> None:
    widest = 4096 * 14336
    more = highest_in_down_projections("nf4-torchao") - highest_in_down_projections("nf4-double")
    assert 12 * widest <= more <= 12 * widest + widest // 16
