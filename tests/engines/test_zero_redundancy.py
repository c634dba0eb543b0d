"""The greedy partition: by hand, and against torch's own on real parameters."""

from __future__ import annotations

import pytest

from tests.causal_models import causal_model, tiny_spec
from zeroplan.engines.optimizers import LocalTensor
from zeroplan.engines.zero_redundancy import every_tensor, fullest_share, partition
from zeroplan.ledger import total_bytes
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.blocks import Compute

LLAMA = tiny_spec("llama", heads=4, kv_heads=2, head_dim=8, ffn=72, vocab=100, layers=3)
GPT2 = tiny_spec("gpt2", heads=4, kv_heads=4, head_dim=8, ffn=128, vocab=90, layers=3)


def test_the_largest_tensor_goes_first_to_the_emptiest_rank() -> None:
    # 7 | 5 | 4 -> the emptiest of 7, 5, 4 takes 3: 7 | 5 | 4+3 -> 5 takes 3: 7 | 5+3 | 4+3 -> the first of two equals takes 1
    tensors = tuple(LocalTensor((numel,)) for numel in (3, 7, 4, 3, 5, 1))
    shares = [[tensor.numel for tensor in share] for share in partition(tensors, 3)]
    assert shares == [[7, 1], [5, 3], [4, 3]]


def test_more_ranks_than_tensors_help_no_further() -> None:
    tensors = (LocalTensor((4,)), LocalTensor((9,)))
    assert partition(tensors, 2) == partition(tensors, 1000) == [[LocalTensor((9,))], [LocalTensor((4,))]]


def test_one_rank_updates_everything() -> None:
    share = fullest_share(LLAMA, "adamw", "foreach", 4, 1)
    assert share.rank == 0
    assert total_bytes(share.state) == 8 * sum(int(tensor.numel) for tensor in every_tensor(LLAMA))


def test_muon_and_adamw_hand_out_their_own_tensors() -> None:
    share = fullest_share(LLAMA, "muon", "forloop", 4, 2)
    momentum, others = (line.n_bytes for line in share.state)
    # AdamW: each rank takes one of the two tables of 100·32; of the seven norms of 32 the first rank takes four.
    assert others == 8 * (100 * 32 + 4 * 32)
    # Muon: 3 layers of gate, up, down (72·32), q, o (32·32), k, v (16·32), in descending order to two ranks in turn.
    assert momentum == 4 * (5 * 72 * 32 + 2 * 32 * 32 + 3 * 16 * 32)


@pytest.mark.torch
@pytest.mark.parametrize("spec", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 16, 50])
def test_every_rank_gets_what_torch_gives_it(spec: ModelSpec, ranks: int) -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed.optim import ZeroRedundancyOptimizer

    from tests.data_parallel import process_group

    with process_group(ranks):
        model = causal_model(spec, Compute(4, autocast=False, attention="sdpa"))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3)
        real = [[tuple(one.shape) for one in groups[0]["params"]] for groups in optimizer._partition_parameters()]
    ours = [[tensor.shape for tensor in share] for share in partition(every_tensor(spec), ranks)]
    assert ours == [shapes for shapes in real if shapes]
