"""Data classes for the recording of a run: blocks of memory in program order, the parts of the run, the collectives."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from zeroplan.ledger import Beside, Kind, Phase
from zeroplan.script_trace import live_bytes

STILL_HELD = 2**62
"""``died`` of a block that outlives the recording."""

#: The operator that makes a tensor of a Python number, in host memory even with a GPU.
LIFTED = "aten.lift_fresh.default"


class Block:
    """One request for memory and its release. Moments count requests and releases.

    ``stream`` is 0 for the default stream; others are numbered in order of first use. ``layer`` is the layer's number if the
    module's name no longer contains it. ``pool`` is the memory pool of a CUDA graph, else 0.
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
        """A block like this one, requested at another moment by another module."""
        other = Block(self.n_bytes, born, self.operation, module, self.span, self.stream)
        other.kind, other.recomputed, other.layer, other.pool = self.kind, self.recomputed, self.layer, self.pool
        return other


_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


@cache
def layer_named(module: str) -> int | None:
    """The layer number of a module, which is the first number in its name; None outside all layers.

    >>> layer_named("transformer.h.3.ln_1"), layer_named("transformer.ln_f")
    (3, None)
    """
    found = _LAYER.search(module)
    return None if found is None else int(found[1])


def layer_of(block: Block) -> int | None:
    """The number of the layer that requested a block; None outside all layers."""
    return layer_named(block.module) if block.layer is None else block.layer


def live(blocks: Sequence[Block], now: int) -> list[int]:
    """Bytes alive before the first request and after every moment up to ``now``. [bytes]"""
    return live_bytes(now, *([getattr(block, name) for block in blocks] for name in ("n_bytes", "born", "died")))


class Span(NamedTuple):
    """A part of the run: its step (the first is 0; -1 before it), its phase, and the moment it began."""

    step: int
    phase: Phase | Beside
    start: int


class Call(NamedTuple):
    """One collective; ``n_bytes`` is its largest buffer, ``span`` the part of the run, ``moment`` when it was called."""

    operation: str
    dtype: str
    n_bytes: int
    group: int
    span: int
    moment: int = 0


class HostSeen(NamedTuple):
    """Host memory beside a GPU, for each part of the run. [bytes]

    ``highest`` is the peak, ``held`` the bytes at the end, ``pinned`` the bytes that the pinned allocator then holds beyond its
    tensors. ``taken`` is the peak of all host memory, free pinned blocks included.
    """

    highest: tuple[int, ...]
    held: tuple[int, ...]
    pinned: tuple[int, ...]
    taken: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Recording:
    """A run: its blocks in the order of their requests, its parts, its collectives, and the last moment.

    ``host`` is host memory beside the GPU's, if it was watched. ``emptied`` lists the moments of ``torch.cuda.empty_cache``.
    ``let_go`` has private pools that no CUDA graph uses after a moment. ``workspaces`` has the moments of the first matrix product
    of each thread on each stream beside the default one, where cuBLAS allocates a workspace; None if streams were not watched.
    With ``from_the_start``, blocks freed before the first step count as well.
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

    @property
    def last_step(self) -> int:
        """The number of the last optimizer step."""
        return max(span.step for span in self.spans if span.phase is Phase.STEP)
