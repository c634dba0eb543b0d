"""What activation offload keeps in host memory, per rank: the same for every engine."""

from collections.abc import Iterable
from typing import NamedTuple

from zeroplan.engines.account import Account
from zeroplan.engines.pinned import beyond, beyond_symbol, rounding
from zeroplan.ledger import Kind, Line
from zeroplan.numeric import Int
from zeroplan.transformer.blocks import BlockPass
from zeroplan.transformer.offloaded import SAVED_ON_CPU

#: What a reader is told.
NOTE = "inputs of blocks are in pinned host memory from their forward to their backward"
_REASON = "inputs of all blocks, from their forward to their backward"


class Away(NamedTuple):
    """Lines of what is in host memory, and what pinned memory takes beyond them. [bytes]"""

    lines: tuple[Line, ...]
    beyond_bytes: Int


NOTHING = Away((), 0)


def away(blocks: Iterable[tuple[BlockPass, int]]) -> Away:
    """What so many layers of each kind have in host memory when the forward ends; each tensor is pinned by itself."""
    n_bytes: Int = 0
    rounded: Int = 0
    formula = ""
    for block, layers in blocks:
        for line in block.away:
            n_bytes, rounded = n_bytes + layers * line.n_bytes, rounded + layers * rounding(line.n_bytes)
            formula = f"L·{line.formula}"  # a block's input is of one size in all of them
    return Away((Line(Kind.ACTIVATIONS, n_bytes, _REASON, formula, SAVED_ON_CPU),), rounded) if formula else NOTHING


def with_activations_away(answer: Account, blocks: Iterable[tuple[BlockPass, int]]) -> Account:
    """The account of an engine that has nothing else in host memory."""
    there = away(blocks)
    return answer._replace(
        host=(*there.lines, beyond(there.beyond_bytes)),
        symbols=(*answer.symbols, beyond_symbol(there.beyond_bytes)),
        notes=(*answer.notes, NOTE),
    )
