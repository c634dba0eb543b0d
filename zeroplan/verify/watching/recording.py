"""What a watcher saw of a run: blocks of memory in program order, the parts of the run, the collectives. Data alone."""

import re
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from zeroplan.ledger import Beside, Kind, Phase

STILL_HELD = 2**62
"""When a block dies that outlives the recording."""

#: A Python number becomes a tensor by this operator, in host memory even where there is a GPU.
LIFTED = "aten.lift_fresh.default"


class Block:
    """One request for memory and, in time, its release. Moments are counted in requests and releases so far.

    ``stream`` is 0 for the default stream; others are numbered as they are first used. ``layer`` is the number of the layer that
    asked, where the module's name does not have it any more. ``pool`` is that of a CUDA graph, else 0.
    """

    __slots__ = ("born", "died", "kind", "layer", "module", "n_bytes", "operation", "pool", "recomputed", "span", "stream")

    def __init__(self, n_bytes: int, born: int, operation: str, module: str, span: int, stream: int = 0) -> None:
        self.n_bytes = n_bytes
        self.born = born
        self.died = STILL_HELD
        self.operation = operation
        self.module = module
        self.span = span
        self.stream = stream
        self.kind: Kind | None = None
        self.recomputed = False
        self.layer: int | None = None
        self.pool = 0

    def again(self, *, born: int, module: str) -> "Block":
        """Return a block like this one, asked for at another moment by another module."""
        other = Block(self.n_bytes, born, self.operation, module, self.span, self.stream)
        other.kind, other.recomputed, other.layer, other.pool = self.kind, self.recomputed, self.layer, self.pool
        return other


_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


@cache
def layer_named(module: str) -> int | None:
    """The number of the layer that a module is in, the first in its name; None outside all.

    >>> layer_named("transformer.h.3.ln_1"), layer_named("transformer.ln_f")
    (3, None)
    """
    found = _LAYER.search(module)
    return None if found is None else int(found[1])


def layer_of(block: Block) -> int | None:
    """The number of the layer that asked for a block; None outside all."""
    return layer_named(block.module) if block.layer is None else block.layer


class Span(NamedTuple):
    """A part of the run: which step (the first is 0; -1 before it), which phase, and the moment it began."""

    step: int
    phase: Phase | Beside
    start: int


class Call(NamedTuple):
    """One collective; ``n_bytes`` are those of the largest buffer, ``span`` the part of the run, ``moment`` when it was called."""

    operation: str
    dtype: str
    n_bytes: int
    group: int
    span: int
    moment: int = 0


class HostSeen(NamedTuple):
    """Host memory beside a GPU, for each part of the run.

    The most in it, what is there at the end, what the allocator of pinned memory has taken by then beyond its tensors, and the most
    that is taken in all, its free blocks among it. [bytes]
    """

    highest: tuple[int, ...]
    held: tuple[int, ...]
    pinned: tuple[int, ...]
    taken: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Recording:
    """A run: its blocks in the order of their requests, its parts, its collectives, and the last moment.

    ``host`` is host memory beside the GPU's, where that was watched. ``emptied`` has the moments at which the program gave the
    allocator's free memory back. ``let_go`` has the private pools that no CUDA graph kept any more, after which moment.
    ``workspaces`` has the moments of matrix products on streams beside the default one, the first of each thread and stream:
    cuBLAS takes a workspace there. None where a watcher did not look at streams.
    ``from_the_start``: what is gone when the first step begins was on the card as well.
    """

    blocks: list[Block]
    spans: list[Span]
    calls: list[Call]
    now: int
    host: HostSeen | None = None
    emptied: tuple[int, ...] = ()
    let_go: tuple[tuple[int, int], ...] = ()
    workspaces: frozenset[int] | None = None
    from_the_start: bool = False
