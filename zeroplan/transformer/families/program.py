"""What a block's program branches on, and the kernel that its attention goes through."""

from functools import partial
from typing import NamedTuple

from zeroplan.spec.recipe import Attention, Kernels
from zeroplan.transformer.families.attend import (
    Attend,
    capped_eager,
    eager,
    efficient,
    flash,
    in_32_bits_grouped,
    with_mask,
    with_sinks,
)
from zeroplan.transformer.families.ring import ring_attention


class Block(NamedTuple):
    """The structure of one block: with the same, a program allocates the same."""

    family: str
    wide: bool
    """The compute dtype is fp32."""
    autocast: bool
    attention: Attention
    masked: bool
    """``scaled_dot_product_attention`` is given a mask."""
    grouped: bool
    """Several query heads share a key/value head."""
    one_key: bool
    """There is a single key/value head."""
    attention_bias: bool
    kernels: Kernels
    parallel: bool = True
    """Attention and MLP read the same input, where a family may have it so."""
    fast_gelu: bool = False
    """GELU is ``gelu_fast``, written out in single operators."""
    again: bool = False
    """What is saved is recomputed, which blocks whose experts are on several ranks tell apart."""
    dispatched: bool = False
    """Experts are on several ranks."""
    ring: int = 1
    """Context-parallel ranks, which share the sequence."""
    alone: bool = False
    """There is no block below, of which BLOOM's would hold something."""

    @property
    def head_norms(self) -> bool:
        """Queries and keys are normalised over each head, in the one program that may have it so."""
        return self.family == "gemma3_text"

    @property
    def attend(self) -> Attend:
        """Which kernel ``scaled_dot_product_attention`` takes (on CUDA: torch 2.13, sdp_utils.cpp), or attention written out."""
        if self.ring > 1:
            return partial(ring_attention, ranks=self.ring)
        if self.attention == "eager":
            return {"gemma2": capped_eager, "gpt_oss": with_sinks}.get(self.family, eager)
        if self.attention == "flash":
            return flash
        if self.masked:
            return with_mask
        if self.wide and self.kernels == "cuda":
            return in_32_bits_grouped if self.grouped else efficient
        return flash
