"""The memory of one all-gather of DeepSpeed's ZeRO-3, from its call until the last of its parameters is used.

A single parameter is gathered in place; several are gathered flat and copied out on first use. With ZeRO++'s quantized weights
(qwZ), shards are gathered in 8 bits, dequantized to fp16, and cast to their dtype. Source: DeepSpeed 0.19.8,
``runtime/zero/partition_parameters.py``, ``_all_gather_sequential``, ``_all_gather_coalesced`` and the handles' ``wait``.
"""

from collections.abc import Hashable
from functools import lru_cache
from typing import NamedTuple

from zeroplan.engines.collecting import Memory
from zeroplan.engines.deepspeed.offload import offloads_parameters
from zeroplan.engines.precisions import widths
from zeroplan.errors import SpecError
from zeroplan.ledger import Kind
from zeroplan.numeric import Int, ceil_div
from zeroplan.spec.recipe import RecipeSpec

HALF, _SCALE = 2, 4
"""Bytes of an element that the quantizer reads and writes, and of a group's scale (``csrc/quantization/pt_binding.cpp``)."""
_IN_8_BITS = "weights in 8 bits and their scales"
_TARGET_GROUP, _LARGEST_GROUP = 8000, 16000
"""``CUDAQuantizer.target_group_size``, and the upper limit of a group."""


class Sharing(NamedTuple):
    """The properties of the ranks that a gather depends on; defaults for plain shards on the GPU."""

    ranks: int = 0
    copied: bool = False
    """Each shard is first copied to the GPU."""
    width: int = 0
    """Bytes of an element of a weight that is gathered in 8 bits; 0 without quantization."""
    half: bool = False
    """Weights are fp16, the quantizer's own dtype."""


class Piece(NamedTuple):
    """One rank's shard of a parameter to gather, and the number of ranks that gather it."""

    share: int
    ranks: int

    @property
    def whole(self) -> int:
        """The parameter with its padding. [elements]"""
        return self.share * self.ranks


def gather_in_8_bits(memory: Memory, key: Hashable, pieces: tuple[Piece, ...], sharing: Sharing, *, together: bool) -> int:
    """Quantize shards, flat or one by one, and gather them with their scales. Return the number of all ranks' scales.

    If not ``together``, variables hold one parameter's payload and scales until the next parameter's exist.

    >>> from zeroplan.engines.requests.log import Log
    >>> log, two = Log(), (Piece(4096, 8), Piece(8192, 8))
    >>> gather_in_8_bits(log, "gather", two, Sharing(8, width=2), together=True), [one.n_bytes for one in log.requests]
    (16, [98304, 24576, 24576, 12296, 64])
    """
    flat, scales = Piece(sum(piece.share for piece in pieces), pieces[0].ranks), 0
    for piece in (flat,) if together else pieces:
        share, groups = piece.share, groups_of(piece.share)
        memory.request(key, piece.whole, Kind.GATHER, _IN_8_BITS)
        memory.request("laid flat", sharing.width * share if together else 0, Kind.GATHER, _IN_8_BITS)
        if not sharing.half:
            memory.request("in fp16", HALF * share, Kind.GATHER, _IN_8_BITS)
            memory.release("laid flat")
        memory.request("quantized now", share + _SCALE * groups, Kind.GATHER, _IN_8_BITS)
        memory.release("laid flat", "in fp16", "quantized")
        memory.rename("quantized now", "quantized")
        memory.request(key, _SCALE * groups * piece.ranks, Kind.GATHER, _IN_8_BITS)
        scales += groups * piece.ranks
    memory.release("quantized")
    memory.call("all_gather", sum(piece.whole for piece in pieces), flat.ranks)
    memory.call("all_gather", _SCALE * scales, flat.ranks)
    return scales


@lru_cache(maxsize=4096)
def groups_of(share: int) -> int:
    """Return the number of groups, each with its scale, in which a shard is quantized (``CUDAQuantizer.quantize``).

    >>> groups_of(4096), groups_of(16_777_216 // 8)
    (1, 512)
    """
    groups = ceil_div(share, _TARGET_GROUP)
    while groups < share and share % (8 * groups):
        groups += 1
    if share % (8 * groups) or share / groups >= _LARGEST_GROUP or share <= groups:
        raise SpecError(
            f"zero_quantized_weights: DeepSpeed cannot split a rank's share of {share:,} elements into groups of a multiple of 8; "
            "use another number of ranks, or leave it out"
        )
    return groups


def refuse_quantized(recipe: RecipeSpec) -> None:
    """Raise SpecError for quantized weights that DeepSpeed refuses or that are not modelled."""
    options = recipe.deepspeed
    if not options.zero_quantized_weights:
        return
    if recipe.zero_stage != 3:
        raise SpecError(f"zero_quantized_weights needs ZeRO stage 3; leave it out at stage {recipe.zero_stage}")
    if options.offloads:
        raise SpecError("zero_quantized_weights with offload is not modelled; leave one of them out")


def sharing_of(recipe: RecipeSpec, n_ranks: Int) -> Sharing:
    """Return the properties of the ranks that a gather depends on. Raises SpecError for a column of ranks if it depends on them."""
    quantized, copied = recipe.deepspeed.zero_quantized_weights, offloads_parameters(recipe)
    if not quantized and not copied:
        return Sharing()
    ranks = n_ranks if isinstance(n_ranks, int) else int(n_ranks.min())
    if not isinstance(n_ranks, int) and ranks != n_ranks.max():
        raise SpecError(
            "gathers of quantized or offloaded parameters depend on the number of ranks; ask for one number after the other"
        )
    if not quantized or ranks == 1:
        return Sharing(ranks, copied)
    return Sharing(ranks, copied, widths(recipe.precision).compute, half=recipe.precision == "fp16-mixed")
