"""Compiled blocks and a compiled loss: the estimate is what torch's own compiler needs, or slightly more.

What the forward keeps is exact, but for the random generator's state and integers of eight bytes: the script's loop holds the token
ids until the backward ends (``torch.randint``, 8 T), and the model the positions of one sequence until it returns, or with
recomputation until the last block's backward (8 s). In a block's backward the estimate is a bound, since inductor's order depends
on the sizes.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.combined import BY_NIGHT
from tests.dryrun.test_same_jobs import scripted
from zeroplan import estimate
from zeroplan.engines.device import workspace_line
from zeroplan.resolve import job
from zeroplan.spec.model import ModelSpec

if TYPE_CHECKING:
    from pathlib import Path

    from zeroplan.spec.job import JobSpec

pytestmark = pytest.mark.torch
pytest.importorskip("transformers")

PARTS = ("compiled-blocks", "compiled-loss", "compiled-blocks,compiled-loss")


def drawn(seed: int) -> JobSpec:
    """Return the job that a seed draws."""
    dice = random.Random(seed)  # noqa: S311  no secret
    heads, width = dice.choice((8, 16, 32)), dice.choice((64, 128))
    hidden, family = heads * width, dice.choice(("llama", "mistral", "qwen2", "qwen3"))
    model = ModelSpec(
        family=family, hidden_size=hidden, attention_bias=family == "qwen2",
        intermediate_size=int(hidden * dice.choice((2.75, 3, 3.5))),
        num_hidden_layers=dice.choice((2, 3, 4)), num_attention_heads=heads, num_key_value_heads=heads // dice.choice((1, 2, 4)),
        head_dim=width, vocab_size=dice.choice((1000, 8000, 32000)), tie_word_embeddings=dice.random() < 0.3,
    )  # fmt: skip
    return job(
        model=model, gpus=8, gpu="h100-sxm-80gb", engine="fsdp2", stage=dice.choice((2, 3)), optimizer="adamw",
        optimizer_impl="foreach", precision=dice.choice(("bf16-mixed", "bf16")), micro_batch=dice.choice((1, 2, 3)),
        recompute=dice.choice(("none", "selective", "full")), seq_len=dice.choice((512, 777, 1024, 2048, 4096)),
        fused_kernels=dice.choice(PARTS),
    )  # fmt: skip


def peak(known: JobSpec) -> int:
    """Return the estimate's peak without the cuBLAS workspace, which a dry run has not. [bytes]"""
    return estimate(known).peak_bytes - int(workspace_line(known.cluster.gpu).n_bytes)


def assert_near(known: JobSpec, folder: Path, *, most: float) -> None:
    """Assert that the estimate is the dry run's peak, or above it by at most a share of it."""
    ran, tokens = scripted(known, folder).peak_bytes, known.batch.micro_batch_size * known.batch.seq_len
    assert ran - 8 * tokens - 1000 < peak(known) < (1 + most) * ran


def test_compiled_blocks_and_a_compiled_loss(tmp_path: Path) -> None:
    model = ModelSpec(
        family="llama", hidden_size=256, intermediate_size=768, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=1000,
    )  # fmt: skip
    known = job(
        model=model, gpus=8, gpu="h100-sxm-80gb", engine="fsdp2", stage=3, optimizer_impl="foreach", seq_len=1024,
        fused_kernels="compiled-blocks,compiled-loss",
    )  # fmt: skip
    assert_near(known, tmp_path, most=0.03)
    plain = replace(known, recipe=replace(known.recipe, fused_kernels=None))
    assert peak(known) < 0.7 * peak(plain)


@BY_NIGHT
@pytest.mark.parametrize("seed", range(24))
def test_random_jobs(tmp_path: Path, seed: int) -> None:
    assert_near(drawn(seed), tmp_path, most=0.06)
