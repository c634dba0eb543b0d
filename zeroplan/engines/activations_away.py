"""What activation offload keeps in host memory, per rank: the same for every engine."""

from collections.abc import Iterable
from typing import NamedTuple

from zeroplan.engines.account import Account, Symbol
from zeroplan.engines.formulas import blocks_sum
from zeroplan.engines.pinned import beyond, beyond_symbol, rounding
from zeroplan.ledger import Kind, Line, total_bytes
from zeroplan.numeric import Int
from zeroplan.spec.recipe import Recompute
from zeroplan.transformer.blocks import BlockPass
from zeroplan.transformer.offloaded import SAVED_ON_CPU

_REASON = "inputs of all blocks, from their forward to their backward"
_SAVED = "all that blocks save, each tensor as often as it is saved and views of weights among them"


def note(recompute: Recompute) -> str:
    """The note on offloaded activations."""
    what = _SAVED if recompute == "none" else "inputs of blocks"
    return f"{what}, {'is' if recompute == 'none' else 'are'} in pinned host memory from their forward to their backward"


class Away(NamedTuple):
    """Lines of what is in host memory, and what pinned memory takes beyond them. [bytes]"""

    lines: tuple[Line, ...]
    beyond_bytes: Int
    symbols: tuple[Symbol, ...] = ()
    """What the formulas of the lines count."""


NOTHING = Away((), 0)


def away(recompute: Recompute, blocks: Iterable[tuple[str, BlockPass, int]]) -> Away:
    """What this many layers of each kind have in host memory when the forward ends; each tensor is pinned by itself."""
    n_bytes: Int = 0
    rounded: Int = 0
    layers_of, each, formula = dict[str, int](), dict[str, Int](), ""
    for kind, block, layers in blocks:
        layers_of[kind], each[kind] = layers_of.get(kind, 0) + layers, total_bytes(block.away)
        for line in block.away:
            n_bytes, rounded = n_bytes + layers * line.n_bytes, rounded + layers * rounding(line.n_bytes)
            formula = f"L·{line.formula}"  # a block's input is of one size in all of them
    if not formula:
        return NOTHING
    if recompute != "none":
        return Away((Line(Kind.ACTIVATIONS, n_bytes, _REASON, formula, SAVED_ON_CPU),), rounded)
    formula = blocks_sum("H", tuple(layers_of.values()), tuple(layers_of))
    symbols = [Symbol(f"H_{kind}", size, f"bytes one {kind} block has in host memory") for kind, size in each.items()]
    return Away((Line(Kind.ACTIVATIONS, n_bytes, _SAVED, formula, SAVED_ON_CPU),), rounded, tuple(symbols))


def with_activations_away(answer: Account, recompute: Recompute, blocks: Iterable[tuple[str, BlockPass, int]]) -> Account:
    """The account of an engine that moves nothing else to host memory itself."""
    there = away(recompute, blocks)
    return answer._replace(
        host=(*answer.host, *there.lines, beyond(there.beyond_bytes)),
        symbols=(*answer.symbols, *there.symbols, beyond_symbol(there.beyond_bytes)),
        notes=(*answer.notes, note(recompute)),
    )
