"""What a block's program branches on, and the kernel that its attention goes through."""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

from zeroplan.ledger import Module
from zeroplan.spec.adapter import Quantize
from zeroplan.spec.family import HEAD_NORMS, Activation
from zeroplan.spec.recipe import Attention, Kernels, Recompute
from zeroplan.spec.releases import NOW, Release
from zeroplan.transformer.families.attend import (
    Attend,
    HeadSize,
    capped_eager,
    eager,
    efficient,
    flash,
    in_32_bits,
    of_a_release,
    of_one_tensor,
    with_mask,
    with_sinks,
)
from zeroplan.transformer.families.operators import NormAs
from zeroplan.transformer.families.tape import Tape, Value

Chunks = Literal["none", "one", "several"]
"""In how many chunks linear attention goes through a sequence; none where attention is another."""


class Program(NamedTuple):
    """A family's block, and the source of what it is."""

    block: "Callable[[Tape, Value, Block], Value]"
    source: str
    norm: NormAs | None = None
    """How its RMSNorms are written; None: they are LayerNorms."""


class Training(NamedTuple):
    """What of a block is trained, where that is not all of it, or where its input is not followed."""

    weights: Literal["adapted", "frozen", "trained"]
    """Frozen, in the compute dtype, with adapters; frozen, as wide as trained ones; all of them trained."""
    tracked: bool
    """Autograd follows the block's input."""
    keeps_inputs: bool = False
    """Frozen linear layers save their inputs."""
    layers: tuple[str, ...] = ()
    """Linear layers that have adapters."""
    quantize: Quantize = "none"

    @property
    def wide_residual(self) -> bool:
        """Under autocast norms and embeddings are fp32, and what they make: peft prepares a quantised model so."""
        return self.quantize != "none" or self.weights != "adapted"

    def adapts(self, module: Module) -> bool:
        """Whether a linear layer has an adapter."""
        return module.rpartition(".")[2] in self.layers


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
    activation: Activation = "silu"
    """The MLP's activation function."""
    output_bias: bool = False
    """The projection of attention's output has a bias, where a family may have it apart from the others."""
    mlp_bias: bool = False
    dispatched: bool = False
    """Experts are on several ranks."""
    ring: int = 1
    """Context-parallel ranks, which share the sequence."""
    head_size: HeadSize = "small"
    """The wider of a head's queries and values."""
    routed: bool = False
    """It has experts, where not all layers of a family do."""
    compressed: bool = False
    """Latent attention makes its queries by two matrices."""
    casts_inputs: bool = False
    """What it is given is cast to the compute dtype first."""
    one_size: bool = False
    """Latent attention's values are as wide as its queries."""
    alone: bool = False
    """There is no block below, of which BLOOM's would hold something."""
    training: Training | None = None
    """None: all of it is trained."""
    sharded: bool = False
    """Matrices, and between them the sequence, are split over ranks."""
    recompute: Recompute = "none"
    """Where it shares matrices or sequences with other ranks, or is not trained as a whole."""
    chunks: Chunks = "none"
    release: Release = NOW
    """What the release of transformers does otherwise."""

    @property
    def head_norms(self) -> bool:
        """Queries and keys are normalised over each head."""
        return self.family in HEAD_NORMS

    @property
    def attend(self) -> Attend:
        """Which kernel ``scaled_dot_product_attention`` takes (on CUDA: torch 2.13, sdp_utils.cpp), or attention written out."""
        if self.ring > 1:
            from zeroplan.transformer.families.ring import ring_attention  # noqa: PLC0415  others need not wait for it

            return partial(ring_attention, ranks=self.ring, size=self.head_size)
        if self.attention == "eager":
            return {"gemma2": capped_eager, "gpt_oss": with_sinks, "gpt2": of_one_tensor}.get(self.family, eager)
        if self.attention == "flash":
            return partial(flash, size=self.head_size)
        if self.masked:
            return partial(with_mask, size=self.head_size)
        if self.release == NOW:
            return self._by_kernel(grouped=self.grouped)
        return partial(
            of_a_release, release=self.release, kernel=self._by_kernel(grouped=self.grouped and not self.release.repeats_keys)
        )

    def _by_kernel(self, *, grouped: bool) -> Attend:
        if self.wide and self.kernels == "cuda":
            return in_32_bits if grouped else partial(efficient, size=self.head_size)
        return partial(flash, size=self.head_size)
