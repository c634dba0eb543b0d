"""The parameters that each rank updates under torch's ``ZeroRedundancyOptimizer``.

It assigns whole tensors, the largest first, each to the rank with the fewest elements so far. So ranks are unequally full, and
more ranks than tensors save nothing.
"""

from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import zip_longest
from typing import NamedTuple

from zeroplan.engines.muon import updated_by_muon
from zeroplan.engines.optimizers import LocalTensor, state_lines, step_temporary_lines
from zeroplan.ledger import Line, total_bytes
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import Optimizer, OptimizerImpl
from zeroplan.transformer.parameters import Parameter
from zeroplan.transformer.params import trained_layout


class Share(NamedTuple):
    """The rank with most optimizer state, its states, and the largest memory of the optimizer's step."""

    rank: int
    """The rank that holds most between steps, the first of equals."""
    state: tuple[Line, ...]
    temporary: tuple[Line, ...]
    """Of the step: together with the states of ``rank`` they equal the states and temporaries of ``rank_in_step``."""
    rank_in_step: int
    """The rank with most memory in the step. The rank with the largest tensors need not be the one with most states."""


def partition(tensors: tuple[LocalTensor, ...], ranks: int) -> list[list[LocalTensor]]:
    """Assign whole tensors to ranks, the first rank first. Ranks without tensors are left out.

    Source: torch 2.13, distributed/optim/zero_redundancy_optimizer.py, ``_partition_parameters``: a stable sort by elements,
    largest first, then always the least loaded rank, the first among equals.

    >>> first, second = partition((LocalTensor((3,)), LocalTensor((4,)), LocalTensor((2,))), 2)
    >>> [tensor.numel for tensor in first], [tensor.numel for tensor in second]
    ([4], [3, 2])
    """
    shares = balanced([int(tensor.numel) for tensor in tensors], min(ranks, len(tensors)))
    return [[tensors[at] for at in share] for share in shares]


def balanced(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the indices that each rank gets: the largest first, always for the rank with the least, the first among equals."""
    loads, shares = [(0, rank) for rank in range(ranks)], list[list[int]]([] for _ in range(ranks))
    for at in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
        load, rank = heappop(loads)
        shares[rank].append(at)
        heappush(loads, (load + sizes[at], rank))
    return shares


@lru_cache(maxsize=4096)
def fullest_share(model: ModelSpec, optimizer: Optimizer, impl: OptimizerImpl, element_bytes: int, ranks: int) -> Share:
    """Return an upper bound over ranks: the most optimizer state, and the most states and temporaries in the step.

    Muon is a second optimizer beside AdamW, which updates all tensors except matrices of blocks. Each distributes its own
    tensors.
    """
    shares = _shares(every_tensor(model), optimizer, ranks)
    held = [sum(_state_bytes(optimizer, impl, element_bytes, tensor) for tensor in share) for share in shares]
    temporaries = [int(total_bytes(step_temporary_lines(optimizer, impl, share, element_bytes))) for share in shares]
    rank, states = held.index(max(held)), max(held)
    in_step = [here + there for here, there in zip(held, temporaries, strict=True)]
    busiest = rank if in_step[rank] == max(in_step) else in_step.index(max(in_step))
    temporary = step_temporary_lines(optimizer, impl, shares[busiest], element_bytes)
    if busiest != rank:
        temporary = tuple(_beside(line, in_step[busiest] - states) for line in temporary)
    return Share(rank, state_lines(optimizer, impl, shares[rank], element_bytes), temporary, busiest)


def tensors_of_fullest(
    model: ModelSpec, optimizer: Optimizer, impl: OptimizerImpl, element_bytes: int, ranks: int
) -> tuple[LocalTensor, ...]:  # fmt: skip
    """Return the tensors that the rank with most optimizer state updates."""
    return _shares(every_tensor(model), optimizer, ranks)[fullest_share(model, optimizer, impl, element_bytes, ranks).rank]


def _shares(tensors: tuple[LocalTensor, ...], optimizer: Optimizer, ranks: int) -> list[tuple[LocalTensor, ...]]:
    muon = tuple(tensor for tensor in tensors if optimizer == "muon" and updated_by_muon(tensor))
    others = tuple(tensor for tensor in tensors if optimizer != "muon" or not updated_by_muon(tensor))
    nothing: list[LocalTensor] = []
    pairs = zip_longest(partition(muon, ranks), partition(others, ranks), fillvalue=nothing)
    return [(*by_muon, *by_other) for by_muon, by_other in pairs]


def _beside(line: Line, n_bytes: int) -> Line:
    """Return temporaries that, with the states of the reported rank, equal the fullest rank's memory in the step."""
    reason = f"{line.reason}, on the rank that needs most then, beyond the states here"
    return line._replace(n_bytes=n_bytes, reason=reason, formula="1·U_z")


def every_tensor(model: ModelSpec) -> tuple[LocalTensor, ...]:
    """Return every trained parameter tensor, in the order of ``model.parameters()``."""
    whole = trained_layout(model)
    blocks = [LocalTensor(one.shape) for run in whole.runs for one in run.parameters * run.layers]
    return (*_outside(whole.embeddings), *blocks, *_outside(whole.tail))


def _outside(parameters: tuple[Parameter, ...]) -> list[LocalTensor]:
    return [LocalTensor(parameter.shape, in_block=False) for parameter in parameters]


@lru_cache(maxsize=1024)
def _state_bytes(optimizer: Optimizer, impl: OptimizerImpl, element_bytes: int, tensor: LocalTensor) -> int:
    return int(total_bytes(state_lines(optimizer, impl, (tensor,), element_bytes)))
