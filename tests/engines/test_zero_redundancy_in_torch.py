"""The greedy partition against torch's ZeroRedundancyOptimizer on real parameters."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: E402

from tests.causal_models import causal_model, tiny_spec  # noqa: E402  it needs torch
from tests.engines.data_parallel import process_group  # noqa: E402
from zeroplan.engines.ddp.zero_redundancy import every_tensor, partition  # noqa: E402
from zeroplan.spec.model import ModelSpec  # noqa: E402
from zeroplan.transformer.blocks import Compute  # noqa: E402

pytestmark = pytest.mark.torch

LLAMA = tiny_spec("llama", heads=4, kv_heads=2, head_dim=8, ffn=72, vocab=100, layers=3)
GPT2 = tiny_spec("gpt2", heads=4, kv_heads=4, head_dim=8, ffn=128, vocab=90, layers=3)


@pytest.mark.parametrize("spec", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 16, 50])
def test_every_rank_gets_what_torch_gives_it(spec: ModelSpec, ranks: int) -> None:
    with process_group(ranks):
        model = causal_model(spec, Compute(4, autocast=False, attention="sdpa"))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3)
        real = [[tuple(one.shape) for one in groups[0]["params"]] for groups in optimizer._partition_parameters()]
    ours = [[tensor.shape for tensor in share] for share in partition(every_tensor(spec), ranks)]
    assert ours == [shapes for shapes in real if shapes]
