"""One forward and backward pass of a module, cut into its parts: what is alive when, and whose is it? Data alone.

Each block of the module, what is before the first and what is after the last are told apart by who asks for memory; a block's
input belongs to it and not to the block that made it.
"""

from typing import NamedTuple

import torch

from zeroplan.spec.recipe import Kernels, Recompute


class Manner(NamedTuple):
    """How a module is executed."""

    element_bytes: int
    autocast: bool
    kernels: Kernels
    recompute: Recompute

    @property
    def dtype(self) -> torch.dtype:
        """In which its weights are: those of autocast stay in 32 bits."""
        return torch.float32 if self.autocast or self.element_bytes == 4 else torch.bfloat16


class Piece(NamedTuple):
    """One tensor, or several alike, that are kept: by which part of the block, made by which operator. [bytes]"""

    reason: str
    n_bytes: int


class Instant(NamedTuple):
    """A request for memory in a backward, and what is alive then.

    ``saved`` of what the part keeps from its forward, ``working`` everything else [bytes]; ``gradients`` elements of weight
    gradients made so far, ``current`` of them just now; ``casts`` elements of live weight casts; ``flash`` heads, head size and
    key/value heads of a flash kernel at work.
    """

    name: str
    saved: int
    working: int
    gradients: int
    current: int
    casts: int
    flash: tuple[int, int, int] | None = None


class HandedOn(NamedTuple):
    """A weight's gradient as it is handed on, its operator done, and what is alive then as in :class:`Instant`. [bytes]"""

    name: str
    saved: int
    working: int


class Called(NamedTuple):
    """A module that runs forward: whether it holds the blocks, and whether gradients flow to what it returns and what it takes."""

    name: str
    holds_blocks: bool
    after_blocks: bool
    follows: bool
    noticed: bool
    shares: bool
    """A weight of its own is another module's too, which has been called before."""


class Operations(NamedTuple):
    """Of one forward: in matrix multiplications, and in attention's kernels, without what a causal one skips. [FLOPs]"""

    matrices: int = 0
    attention: int = 0


class BlockAnatomy(NamedTuple):
    """One block. [bytes, and elements of casts]"""

    input_bytes: int
    kept: tuple[Piece, ...]
    forward: tuple[int, ...]
    """What is alive at each request of its forward, beyond what was kept before it."""
    backward: tuple[Instant, ...]
    handed: tuple[HandedOn, ...]
    cast_elements: int
    operations: Operations

    @property
    def kept_bytes(self) -> int:
        """All that it keeps."""
        return sum(piece.n_bytes for piece in self.kept)


class Anatomy(NamedTuple):
    """A whole pass."""

    blocks: tuple[BlockAnatomy, ...]
    shared: tuple[Piece, ...]
    """Alive from before the first block to the end, the batch among it."""
    beside: tuple[Piece, ...]
    """Alive while the blocks run forward, gone before the backward."""
    first_input_bytes: int
    """The first block's input, where it is held through the forward though the block does not keep it."""
    loss: tuple[int, ...]
    """What is alive at each request after the last block and before the backward, beyond what the blocks keep."""
    output_bytes: int
    """Of what the module returns: what is given back when the training loop lets go of it."""
    head: tuple[Instant, ...]
    head_handed: tuple[HandedOn, ...]
    last: tuple[int, ...]
    """What is alive at each request of the backward before the first block, beyond what is shared."""
    last_handed: tuple[HandedOn, ...]
    cast: frozenset[str]
    """Parameters that autocast copied."""
    called: tuple[Called, ...]
    """Every module in the order in which they are called, the first time."""
    tail: frozenset[str]
    """Parameters outside the blocks whose gradients are handed on before the blocks' backward begins."""
    operations: Operations
    """Of what is outside the blocks."""
