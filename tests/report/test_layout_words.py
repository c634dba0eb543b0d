"""The description of a layout names the ranks that share a micro-batch."""

from __future__ import annotations

import pytest

from zeroplan.report.layout import layout_words
from zeroplan.resolve import job


@pytest.mark.parametrize(
    ("split", "per"),
    [({}, "GPU"), ({"tensor_parallel": 2}, "2 GPUs"), ({"tensor_parallel": 2, "context_parallel": 2}, "4 GPUs"),
     ({"pipeline_parallel": 4, "stage": 2, "grad_accum": 4}, "4 GPUs")],
)  # fmt: skip
def test_sequences_are_of_those_that_share_them(split: dict, per: str) -> None:
    one = job(model="llama-3.1-8b", gpus=8, micro_batch=2, **split)
    assert layout_words(one).endswith(f"2 x {one.batch.grad_accum_steps} sequences per {per}")
