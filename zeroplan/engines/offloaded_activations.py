"""The host memory of activation offload, per rank. It is the same for every engine."""

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
    """Return the note on offloaded activations."""
    what = _SAVED if recompute == "none" else "inputs of blocks"
    return f"{what}, {'is' if recompute == 'none' else 'are'} in pinned host memory from their forward to their backward"


class OffloadedActivations(NamedTuple):
    """The offloaded tensors as lines, and the extra bytes of their pinned blocks. [bytes]"""

    lines: tuple[Line, ...]
    beyond_bytes: Int
    symbols: tuple[Symbol, ...] = ()
    """The symbols in the formulas of the lines."""


NOTHING = OffloadedActivations((), 0)


def offloaded_activations(recompute: Recompute, blocks: Iterable[tuple[str, BlockPass, int]]) -> OffloadedActivations:
    """Return the host memory of this many layers of each kind at the end of the forward. Each tensor is pinned separately."""
    n_bytes: Int = 0
    rounded: Int = 0
    layers_of, each, formula = dict[str, int](), dict[str, Int](), ""
    for kind, block, layers in blocks:
        layers_of[kind], each[kind] = layers_of.get(kind, 0) + layers, total_bytes(block.on_host)
        for line in block.on_host:
            n_bytes, rounded = n_bytes + layers * line.n_bytes, rounded + layers * rounding(line.n_bytes)
            formula = f"L·{line.formula}"  # in all kinds of blocks a block's input has the same size
    if not formula:
        return NOTHING
    if recompute != "none":
        return OffloadedActivations((Line(Kind.ACTIVATIONS, n_bytes, _REASON, formula, SAVED_ON_CPU),), rounded)
    formula = blocks_sum("H", tuple(layers_of.values()), tuple(layers_of))
    symbols = [Symbol(f"H_{kind}", size, f"bytes one {kind} block has in host memory") for kind, size in each.items()]
    return OffloadedActivations((Line(Kind.ACTIVATIONS, n_bytes, _SAVED, formula, SAVED_ON_CPU),), rounded, tuple(symbols))


def with_offloaded_activations(answer: Account, recompute: Recompute, blocks: Iterable[tuple[str, BlockPass, int]]) -> Account:
    """Add offloaded activations to the account of an engine that offloads nothing else."""
    offloaded = offloaded_activations(recompute, blocks)
    return answer._replace(
        host=(*answer.host, *offloaded.lines, beyond(offloaded.beyond_bytes)),
        symbols=(*answer.symbols, *offloaded.symbols, beyond_symbol(offloaded.beyond_bytes)),
        notes=(*answer.notes, note(recompute)),
    )
