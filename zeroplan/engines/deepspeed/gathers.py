"""The memory of one all-gather of DeepSpeed's ZeRO-3, from its call until the last of its parameters is used.

A single parameter is gathered in place; several are gathered flat and copied out on first use. With ZeRO++'s quantized weights
(qwZ), shards are gathered in 8 bits, dequantized to fp16, and cast to their dtype. Source: DeepSpeed 0.19.8,
``runtime/zero/partition_parameters.py``, ``_all_gather_sequential``, ``_all_gather_coalesced`` and the handles' ``wait``.
"""

from functools import lru_cache
from typing import NamedTuple

from zeroplan.engines.deepspeed.offload import offloads_parameters
from zeroplan.engines.precisions import widths
from zeroplan.errors import SpecError
from zeroplan.numeric import Int, ceil_div
from zeroplan.spec.recipe import RecipeSpec

_HALF, _SCALE = 2, 4
"""Bytes of an element that the quantizer reads and writes, and of a group's scale (``csrc/quantization/pt_binding.cpp``)."""
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
    """A parameter to gather: its elements, one rank's shard of them, and the number of ranks that gather it."""

    numel: int
    share: int
    ranks: int


class GatherMemory(NamedTuple):
    """The memory changes of an all-gather, in order; negative ones free memory. [elements of a weight]"""

    requested: tuple[int, ...]
    """Changes when the gather is called."""
    arrived: tuple[int, ...] = ()
    """Changes when the module first waits for one of its parameters."""
    done: int = 0
    """Change after the last of its parameters has been waited for."""
    scales: int = 0
    """fp32 scales of all ranks that are gathered with it."""


@lru_cache(maxsize=4096)
def gather_memory(pieces: tuple[Piece, ...], sharing: Sharing, *, one_by_one: bool) -> GatherMemory:
    """Return the memory of the all-gather of these parameters; ``one_by_one``: each is gathered by itself. [elements]

    >>> two = (Piece(80, 10, 8), Piece(160, 20, 8))
    >>> gather_memory(two, Sharing(), one_by_one=False)
    GatherMemory(requested=(240,), arrived=(240,), done=-240, scales=0)
    """
    if sharing.width:
        return _quantized_one_by_one(pieces, sharing) if one_by_one else _quantized_flat(pieces, sharing)
    numel = sum(piece.numel for piece in pieces)
    one_by_one = one_by_one or (sharing.copied and sharing.ranks == 1)  # a single rank's copies are the parameters themselves
    copies = [ceil_div(piece.numel, sharing.ranks) for piece in pieces] if sharing.copied and sharing.ranks > 1 else [0]
    copied = max(copies) if one_by_one else sum(copies)
    requested = (numel, copied, -copied) if copied else (numel,)
    return GatherMemory(requested) if one_by_one else GatherMemory(requested, (numel,), -numel)


def _quantized_one_by_one(pieces: tuple[Piece, ...], sharing: Sharing) -> GatherMemory:
    """Return the changes if variables hold one parameter's payload and scales until the next parameter's exist."""
    requested, arrived, held, scales, before = list[int](), list[int](), 0, 0, 0
    for piece in pieces:
        groups = groups_of(piece.share)
        copy, made = 0 if sharing.half else _HALF * piece.share, piece.share + _SCALE * groups
        payload, beside = piece.share * piece.ranks, _SCALE * groups * piece.ranks
        requested += [payload, copy, made, -copy, -before, beside]
        arrived += _restored(piece.numel, sharing)
        before, held, scales = made, held + payload + beside, scales + groups * piece.ranks
    return _in_elements([*requested, -before], arrived, -held, scales, sharing.width)


def _quantized_flat(pieces: tuple[Piece, ...], sharing: Sharing) -> GatherMemory:
    share, ranks = sum(piece.share for piece in pieces), pieces[0].ranks
    groups = groups_of(share)
    laid_flat, made = sharing.width * share, share + _SCALE * groups
    payload, beside = share * ranks, _SCALE * groups * ranks
    requested = [payload, laid_flat]
    requested += [made, -laid_flat] if sharing.half else [_HALF * share, -laid_flat, made, -_HALF * share]
    requested += [beside, -made]
    arrived = [_HALF * payload]
    for piece in pieces:
        arrived += _restored(piece.numel, sharing)
    return _in_elements(requested, arrived, -payload - beside - _HALF * payload, groups * ranks, sharing.width)


def _restored(numel: int, sharing: Sharing) -> list[int]:
    """Return the sizes of a parameter in fp16, and cast to its own dtype."""
    return [_HALF * numel] if sharing.half else [_HALF * numel, sharing.width * numel, -_HALF * numel]


def _in_elements(requested: list[int], arrived: list[int], done: int, scales: int, width: int) -> GatherMemory:
    """Convert bytes, which are multiples of eight or fp32 scales, to elements."""
    return GatherMemory(tuple(one // width for one in requested), tuple(one // width for one in arrived), done // width, scales)


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
