"""The blocks that each DDP rank updates under Distributed Shampoo, as ``DDPDistributedConfig`` shares them among the ranks.

Ranks receive the largest blocks first, each the rank with the fewest bytes so far. A step's all-gather sends what every rank adds
to its blocks, in fp32. Source: distributed_shampoo f606606, ``distribute_buffer_sizes`` (utils/shampoo_utils.py) and
``_construct_distributed_buffers`` (distributor/shampoo_ddp_distributor.py).
"""

from functools import lru_cache
from math import prod
from typing import NamedTuple

from zeroplan.engines import shampoo
from zeroplan.engines.ddp.zero_redundancy import balanced
from zeroplan.engines.formulas import sized
from zeroplan.ledger import Collective, Kind, Line, Phase
from zeroplan.numeric import Int, for_each_value, round_up, where

SOURCE = "distributed_shampoo f606606, distributor/shampoo_ddp_distributor.py"
_ALIGNED = 64  # AlignedMemoryCostModel, alignment_bytes


class Share(NamedTuple):
    """The blocks of one rank: elements, those of their factors and of every different triangle, and a step's temporaries."""

    elements: int
    triangles: int
    indices: int
    temporaries: int
    """[bytes]"""

    def states(self, width: int) -> int:
        """Return what this rank keeps, apart from the all-gather's buffer. [bytes]"""
        return 2 * width * self.elements + 2 * shampoo.FP32 * self.triangles + shampoo.PAIR * self.indices


def lines(shapes: tuple[shampoo.Shape, ...], width: int, longest: int, ranks: int) -> tuple[Line, Line, Line, Line, Line]:
    """Return the states of the rank with most of them, the all-gather's buffer, and last the temporaries of a step. [bytes]

    The temporaries include what another rank needs beyond the states of the first in the step.
    """
    shares = _shares(shapes, width, longest, ranks)
    fullest = max(shares, key=lambda one: one.states(width))
    in_step = max(one.states(width) + one.temporaries for one in shares) - fullest.states(width)
    state = Kind.OPTIMIZER_STATE
    return (
        sized(state, 2 * width, fullest.elements, shampoo.FILTERED, shampoo.SOURCE, "U"),
        sized(state, 8, fullest.triangles, shampoo.TRIANGLES.format(longest), shampoo.SOURCE, "U_y"),
        sized(state, 8, fullest.indices, shampoo.PAIRS, shampoo.INDICES, "U_x"),
        Line(state, buffer_bytes(shapes, longest, ranks), "directions of all blocks for the all-gather, fp32", "1·U_b", SOURCE),
        Line(
            Kind.OPTIMIZER_TEMPORARY,
            in_step,
            "step of the rank that needs most then, beyond the states here",
            "1·U_z",
            shampoo.STEP,
        ),
    )


@lru_cache(maxsize=1024)
def assigned(shapes: tuple[shampoo.Shape, ...], longest: int, ranks: int) -> tuple[tuple[shampoo.Shape, ...], ...]:
    """Return the blocks of each rank, in the order of the model.

    >>> assigned(((4, 8), (8,), (5, 8)), 8, 2)
    (((5, 8),), ((4, 8), (8,)))
    """
    blocks = [block for shape in shapes for block in shampoo.blocks_of(shape, longest)]
    return tuple(tuple(blocks[at] for at in sorted(each)) for each in balanced(list(map(_sent, blocks)), ranks))


def buffer_bytes(shapes: tuple[shampoo.Shape, ...], longest: int, ranks: int) -> int:
    """Return the size of the all-gather's buffer: every rank's part is as long as the longest. [bytes]"""
    return ranks * max(sum(map(_sent, each)) for each in assigned(shapes, longest, ranks))


def all_gather(shapes: tuple[shampoo.Shape, ...], longest: int, ranks: Int) -> Collective:
    """Return the all-gather of a step."""
    n_bytes = for_each_value(lambda n: buffer_bytes(shapes, longest, n), ranks)
    sent, moved = n_bytes // ranks * (ranks - 1), where(ranks > 1, n_bytes // shampoo.FP32, 0)
    return Collective(
        "all_gather", "directions of all blocks", "optimizer step", ranks, 1, n_bytes, sent, moved, SOURCE,
        phase=Phase.STEP,
    )  # fmt: skip


def _sent(block: shampoo.Shape) -> int:
    return round_up(shampoo.FP32 * prod(block), _ALIGNED)


@lru_cache(maxsize=1024)
def _shares(shapes: tuple[shampoo.Shape, ...], width: int, longest: int, ranks: int) -> tuple[Share, ...]:
    return tuple(
        Share(
            sum(map(prod, mine)),
            sum(map(shampoo.triangles_of, mine)),
            sum(map(shampoo.triangle, {side for block in mine for side in block})),
            shampoo.highest_of(shampoo.in_order([mine], [1]), width),
        )
        for mine in assigned(shapes, longest, ranks)
    )
