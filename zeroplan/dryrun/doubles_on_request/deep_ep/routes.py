"""To which rank and expert does each token go, and how many tokens come from other ranks?

Known choices are used unchanged. An assumed choice is even: every expert is chosen equally often, and a token's experts are on as
many ranks as possible. DeepEP sends a token once to each rank, so this is the largest number of tokens of an even choice.
"""

from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from zeroplan.dryrun import routing
from zeroplan.verify.fake_cuda.known_values import Sure, how_sure, known


class Ranks(NamedTuple):
    """This rank within a group, the group's size, and its number of nodes."""

    rank: int
    size: int
    nodes: int


class Layout(NamedTuple):
    """The numbers of tokens by destination, as real tensors, and how certain they are."""

    per_rank: torch.Tensor
    per_node: torch.Tensor
    per_expert: torch.Tensor
    in_rank: torch.Tensor
    chosen: torch.Tensor
    sure: Sure


def layout(topk_idx: torch.Tensor, experts: int, ranks: Ranks) -> Layout:
    """The destinations of this rank's tokens."""
    with unset_fake_temporarily():
        chosen, sure = _chosen(topk_idx, experts, ranks.size)
        goes = torch.zeros(len(chosen), experts + 1, dtype=torch.bool).scatter_(
            1, torch.where(chosen < 0, experts, chosen), value=True
        )
        goes = goes[:, :experts]
        in_rank = goes.reshape(len(chosen), ranks.size, -1).any(2)
        per_node = in_rank.reshape(len(chosen), ranks.nodes, -1).any(2).sum(0)
        if sure is not Sure.EXACT:
            choices = chosen.shape[1]
            per_node = torch.full((ranks.nodes,), -(-len(chosen) * min(choices, ranks.nodes) // ranks.nodes))
        return Layout(in_rank.sum(0), per_node, goes.sum(0), in_rank, chosen, sure)


def _chosen(topk_idx: torch.Tensor, experts: int, ranks: int) -> tuple[torch.Tensor, Sure]:
    values = known(topk_idx)
    if values is not None and how_sure(topk_idx) is Sure.EXACT:
        return values.long(), Sure.EXACT
    tokens, choices = topk_idx.shape
    places = torch.arange(tokens * choices).reshape(tokens, choices)
    local = experts // ranks
    return places % ranks * local + places // ranks % local, Sure.ASSUMED


def received(found: Layout, ranks: Ranks) -> torch.Tensor:
    """The experts of every received token, numbered within this rank; -1 for experts of other ranks.

    Every rank sends what this rank sends to itself, times the imbalance if the choice is assumed.
    """
    with unset_fake_temporarily():
        local = len(found.per_expert) // ranks.size
        mine = found.chosen[found.in_rank[:, ranks.rank]] - ranks.rank * local
        mine = torch.where((mine < 0) | (mine >= local), -1, mine)
        each = len(mine) * ranks.size
        count = min(routing.received(each, found.sure), len(found.chosen) * ranks.size)
        return mine[torch.arange(count) % max(len(mine), 1)]


def per_local_expert(arrived: torch.Tensor, local: int, alignment: int) -> list[int]:
    """The number of tokens for each of this rank's experts, rounded up to the alignment."""
    with unset_fake_temporarily():
        counts: list[int] = torch.bincount(arrived[arrived >= 0].flatten(), minlength=local).tolist()
    return [-(-count // alignment) * alignment for count in counts]
