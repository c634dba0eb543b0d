"""A model that ``torch.compile`` compiles as a whole: the estimate of ``ddp.compiled`` is a bound for what a dry run needs."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.combined import BY_NIGHT
from tests.dryrun.test_compiled_blocks import peak
from tests.dryrun.test_same_jobs import scripted
from zeroplan.resolve import job
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import DdpOptions

if TYPE_CHECKING:
    from pathlib import Path

    from zeroplan.spec.job import JobSpec

pytestmark = pytest.mark.torch
pytest.importorskip("transformers")


def compiled(*, gpus: int = 1, layers: int = 3, compiled: bool = True, **more: object) -> JobSpec:
    """Return a small job whose model is compiled as a whole, or not."""
    model = ModelSpec(
        family="qwen2", hidden_size=512, intermediate_size=1408, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=128, vocab_size=1000,
    )  # fmt: skip
    said = {"precision": "bf16", "recompute": "full", "seq_len": 256, "grad_accum": 2} | more
    return job(
        model=model, gpus=gpus, gpu="h100-sxm-80gb", engine="ddp", stage=0, optimizer_impl="foreach",
        ddp=DdpOptions(compiled=compiled), **said,
    )  # fmt: skip


def test_several_micro_batches_need_more_than_without_the_compiler(tmp_path: Path) -> None:
    """The gradients of a micro-batch exist beside those of the one before."""
    ran = scripted(compiled(), tmp_path).peak_bytes
    assert peak(compiled(compiled=False)) < ran <= peak(compiled())


def test_a_single_micro_batch_needs_no_more() -> None:
    assert peak(compiled(grad_accum=1)) == peak(compiled(compiled=False, grad_accum=1))


@BY_NIGHT
@pytest.mark.parametrize("seed", range(12))
def test_it_is_a_bound_for_random_jobs(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)  # noqa: S311  no secret
    known = compiled(
        gpus=dice.choice((1, 8)), layers=dice.choice((2, 4, 6)), precision=dice.choice(("bf16", "bf16-mixed", "fp32")),
        recompute=dice.choice(("none", "full")), seq_len=dice.choice((128, 256, 777)), grad_accum=dice.choice((1, 2, 3)),
    )  # fmt: skip
    beside = 8 * known.batch.micro_batch_size * known.batch.seq_len + 1000  # the script's token ids, and numbers
    assert scripted(known, tmp_path).peak_bytes <= peak(known) + beside
