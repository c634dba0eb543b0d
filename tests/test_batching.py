"""Checks packs and micro-batches under a token budget against lists made by TRL's and verl's own code."""

import pytest

from zeroplan.resolve.batching import balanced, budgeted, packed

#: Lengths, the size of a pack, and the packs of TRL 1.16's ``_pack_bfd`` (run with pyarrow 26).
OF_TRL = (
    ([65, 262, 121, 508, 461], 512, [448, 461, 508]), ([21, 49, 350, 31, 64], 16, [16, 16, 16, 16, 16]),
    ([23, 4, 24, 2, 32], 16, [6, 16, 16, 16]), ([74, 145, 36, 92, 25], 512, [372]),
)  # fmt: skip
#: Each rank's lengths, the budget, and the tokens of the micro-batches of verl 0.9.1's ``rearrange_micro_batches``.
OF_VERL = (
    ([[249, 496, 802, 216, 211, 132, 599, 195], [85, 375, 269, 280, 1308, 168, 779, 264]], 9308, [2900, 3528]),
    ([[283, 221, 217, 225, 638, 470, 357, 1928], [250, 968, 524, 1905, 577, 1150, 2547, 470]], 2647,
     [695, 855, 861, 1905, 1924, 1928, 2015, 2547]),
    ([[504, 216, 1279, 222, 2272, 228, 227, 424], [496, 814, 672, 551, 583, 166, 448, 972]], 2272,
     [1501, 1523, 1563, 1599, 1616, 2272]),
    ([[207, 1278, 1894, 1084, 118, 949, 4096, 791], [843, 86, 704, 1132, 188, 551, 222, 365]], 12096, [4091, 10417]),
)  # fmt: skip


@pytest.mark.parametrize(("lengths", "size", "packs"), OF_TRL)
def test_packs_are_those_of_trl(lengths: list[int], size: int, packs: list[int]) -> None:
    assert sorted(packed(lengths, size)) == packs


def test_a_thousand_sequences_are_packed_at_a_time() -> None:
    """``datasets.map`` passes batches of 1,000 sequences, so the last pack of each batch stays partly empty."""
    assert packed([1] * 1500, 4096) == [1000, 500]


@pytest.mark.parametrize(("each_rank", "budget", "tokens"), OF_VERL)
def test_micro_batches_under_a_budget_are_those_of_verl(each_rank: list[list[int]], budget: int, tokens: list[int]) -> None:
    assert sorted(budgeted(each_rank, budget)) == tokens


def test_no_micro_batch_is_beyond_its_budget_and_none_is_lost() -> None:
    lengths = [[(31 * at + 7 * rank) % 900 + 1 for at in range(16)] for rank in range(4)]
    for budget in (901, 1500, 4000, 20_000):
        made = budgeted(lengths, budget)
        assert max(made) <= budget
        assert sum(made) == sum(map(sum, lengths))
    assert sorted(at for part in balanced(lengths[0], 3) for at in part) == list(range(16))
