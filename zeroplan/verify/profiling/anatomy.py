"""Describes one forward and backward pass of a module: which memory is alive when, and which block owns it. Only data classes.

The module that requests memory owns it: a block, the part before the first, or the part after the last. A block's input belongs
to the block that reads it.
"""

from typing import NamedTuple

import torch

from zeroplan.spec.hardware import Kernels
from zeroplan.spec.recipe import Recompute


class Manner(NamedTuple):
    """The way a module is executed: bytes per element, autocast, kernels, recomputation.

    ``casts_inputs``: each block's fp32 inputs are cast, as FSDP2 does in mixed precision.
    """

    element_bytes: int
    autocast: bool
    kernels: Kernels
    recompute: Recompute
    casts_inputs: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its weights; under autocast they stay in 32 bits."""
        return torch.float32 if self.autocast or self.element_bytes == 4 else torch.bfloat16


class Piece(NamedTuple):
    """Kept tensors with one reason: the part of the block and the operator that made them. [bytes]"""

    reason: str
    n_bytes: int


class Instant(NamedTuple):
    """One request in a backward pass, and the memory alive then.

    ``saved`` are the block's saved activations, ``working`` everything else [bytes]. ``gradients`` counts the elements of weight
    gradients so far, ``current`` the elements that autograd has not yet passed on, ``casts`` the elements of live weight casts.
    ``flash`` has heads, head size, key/value heads and queries of a running flash kernel.
    """

    name: str
    saved: int
    working: int
    gradients: int
    current: int
    casts: int
    flash: tuple[int, int, int, int] | None = None


class GradientReady(NamedTuple):
    """The moment when autograd passes on a weight's gradient, with the memory alive then as in :class:`Instant`. [bytes]"""

    name: str
    saved: int
    working: int


class Called(NamedTuple):
    """A module in the forward: whether it contains the blocks, and whether gradients flow through its output and its input."""

    name: str
    holds_blocks: bool
    after_blocks: bool
    follows: bool
    noticed: bool
    shares: bool
    """Whether one of its weights also belongs to a module called earlier."""


class Operations(NamedTuple):
    """Operations of one forward, in matrix products and in attention; causal kernels skip the masked half. [FLOPs]"""

    matrices: int = 0
    attention: int = 0


class BlockAnatomy(NamedTuple):
    """The parts of one block. [bytes; elements of casts]"""

    input_bytes: int
    kept: tuple[Piece, ...]
    forward: tuple[int, ...]
    """Bytes alive at each request of its forward, beyond those kept before it."""
    backward: tuple[Instant, ...]
    handed: tuple[GradientReady, ...]
    cast_elements: int
    operations: Operations

    @property
    def kept_bytes(self) -> int:
        """All bytes that the block keeps. [bytes]"""
        return sum(piece.n_bytes for piece in self.kept)


class Anatomy(NamedTuple):
    """The parts of a whole pass."""

    names: tuple[str, ...]
    """The blocks' names, each with a dot at the end."""
    blocks: tuple[BlockAnatomy, ...]
    shared: tuple[Piece, ...]
    """Alive from before the first block to the end, the batch included."""
    beside: tuple[Piece, ...]
    """Alive during the blocks' forward, freed before the backward."""
    first_input_bytes: int
    """The first block's input, if the caller holds it through the forward and the block does not. [bytes]"""
    loss: tuple[int, ...]
    """Bytes alive at each request between the last block and the backward, beyond those the blocks keep."""
    output_bytes: int
    """The part of the module's output that is freed when the training loop drops it. [bytes]"""
    head: tuple[Instant, ...]
    head_handed: tuple[GradientReady, ...]
    last: tuple[int, ...]
    """Bytes alive at each request of the backward before the first block, beyond the shared ones."""
    last_handed: tuple[GradientReady, ...]
    cast: frozenset[str]
    """Parameters that autocast copied."""
    called: tuple[Called, ...]
    """Every module in the order of its first call."""
    tail: frozenset[str]
    """Parameters outside the blocks whose gradients are ready before the blocks' backward begins."""
    operations: Operations
    """Operations outside the blocks."""
