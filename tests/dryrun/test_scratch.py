"""What flash attention's backward takes inside itself is part of a dry run's peak, as it is of an estimate's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.dryrun.running import dry_run
from tests.transformer.tiny_configs import tiny_config
from zeroplan.catalog.config import model_from_config
from zeroplan.spec.batch import BatchSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
ATTENTION = """
import torch
q, k, v = (torch.randn(2, 4, 1000, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
optimizer = torch.optim.SGD([q, k, v], lr=0.1)
for _ in range(9):
    torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_it_is_alive_beside_what_the_kernel_returns(tmp_path: Path):
    (tmp_path / "attention.py").write_text(ATTENTION)
    phases = dry_run("--", "attention.py", folder=tmp_path).answer["steps"][-1]["phases"]
    backward = next(phase for phase in phases if phase["phase"] == "backward")
    tensor = 2 * 2 * 4 * 1000 * 64
    scratch = 4 * 2 * 4 * 1024 * (64 + 1)
    rows = 4 * 2 * 4 * 1000
    assert backward["peak_bytes"] == pytest.approx(7 * tensor + rows + scratch, rel=0.001)  # the sum's gradient has no bytes


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize(("sequences", "length", "size"), [(1, 128, 32), (3, 200, 64), (2, 77, 80)])
def test_it_is_what_the_estimate_says(sequences: int, length: int, size: int, key_heads: int):
    from zeroplan.dryrun.scratch import SCRATCH
    from zeroplan.transformer.blocks import Compute
    from zeroplan.transformer.families.attend import flash_scratch
    from zeroplan.transformer.families.widths import quantities, widths

    said: Mapping[str, object] = tiny_config("llama") | {
        "num_attention_heads": 4, "num_key_value_heads": key_heads, "head_dim": size, "hidden_size": 4 * size,
    }  # fmt: skip
    batch = BatchSpec(micro_batch_size=sequences, seq_len=length)
    compute = Compute(element_bytes=2, autocast=False, attention="sdpa")
    x = widths(model_from_config(said), compute, batch)
    known = int(flash_scratch(grouped=x.key != x.query).value(quantities(x, 0)))
    query, key = (torch.empty(sequences, heads, length, size, dtype=torch.bfloat16) for heads in (4, key_heads))
    by_heads, by_tokens = SCRATCH.values()
    assert by_heads((None, query, key)) == known
    assert by_tokens((None, query.transpose(1, 2), key.transpose(1, 2), None, None, None, None)) == known


def test_packed_sequences_are_128_rows_apart():
    from zeroplan.dryrun.scratch import SCRATCH

    _, packed = SCRATCH.values()
    tokens, starts = torch.empty(300, 4, 64, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int32)
    assert packed((None, tokens, tokens, None, None, None, starts)) == 4 * (300 + 3 * 128) * 4 * (64 + 1)
