"""ZeroRedundancyOptimizer's greedy partition, by hand."""

from __future__ import annotations

from tests.causal_models import tiny_spec
from zeroplan.engines.ddp.zero_redundancy import every_tensor, fullest_share, partition
from zeroplan.engines.optimizers import LocalTensor
from zeroplan.ledger import total_bytes

LLAMA = tiny_spec("llama", heads=4, kv_heads=2, head_dim=8, ffn=72, vocab=100, layers=3)


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


def test_muon_and_adamw_partition_their_tensors_separately() -> None:
    share = fullest_share(LLAMA, "muon", "forloop", 4, 2)
    momentum, others = (line.n_bytes for line in share.state)
    # AdamW: each rank takes one of the two tables of 100·32; of the seven norms of 32 the first rank takes four.
    assert others == 8 * (100 * 32 + 4 * 32)
    # Muon: 3 layers of gate, up, down (72·32), q, o (32·32), k, v (16·32), in descending order to two ranks in turn.
    assert momentum == 4 * (5 * 72 * 32 + 2 * 32 * 32 + 3 * 16 * 32)
