"""Which rank and expert each token goes to, and what comes from other ranks.

Experts that a script has chosen for certain are taken as they are. Where the choice is an assumed one, every expert is chosen as
often as any other, and the experts of one token lie on as many ranks as they can. DeepEP sends a token once to each rank, so that
is the most that an even choice sends.
"""

from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from zeroplan.dryrun import routing
from zeroplan.verify.fake_cuda.known_values import Sure, how_sure, known


class Ranks(NamedTuple):
    """This rank within a group, its size, and how many nodes it spans."""

    rank: int
    size: int
    nodes: int


class Layout(NamedTuple):
    """How many tokens go where, as real numbers, and how sure that is."""

    per_rank: torch.Tensor
    per_node: torch.Tensor
    per_expert: torch.Tensor
    in_rank: torch.Tensor
    chosen: torch.Tensor
    sure: Sure


def layout(topk_idx: torch.Tensor, experts: int, ranks: Ranks) -> Layout:
    """Where the tokens of this rank go."""
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
    """The experts of every token that arrives, as numbers among this rank's own; -1 for those elsewhere.

    Every rank sends what this one sends itself, times the imbalance where the choice is an assumed one.
    """
    with unset_fake_temporarily():
        local = len(found.per_expert) // ranks.size
        mine = found.chosen[found.in_rank[:, ranks.rank]] - ranks.rank * local
        mine = torch.where((mine < 0) | (mine >= local), -1, mine)
        each = len(mine) * ranks.size
        count = min(routing.received(each, found.sure), len(found.chosen) * ranks.size)
        return mine[torch.arange(count) % max(len(mine), 1)]


def per_local_expert(arrived: torch.Tensor, local: int, alignment: int) -> list[int]:
    """How many tokens each of this rank's experts gets, filled up to whole units."""
    with unset_fake_temporarily():
        counts: list[int] = torch.bincount(arrived[arrived >= 0].flatten(), minlength=local).tolist()
    return [-(-count // alignment) * alignment for count in counts]
