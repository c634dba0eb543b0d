"""Which moment of the step is the peak, and what does the caching allocator reserve around it?"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from zeroplan.engines.reserved_shares import Shares, pressed_of, shares_of
from zeroplan.ledger import Band, Kind, Moment, Phase, bytes_by_kind
from zeroplan.measurement import AllocatorSettings
from zeroplan.numeric import Int, maximum, minimum
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.trace import Moments
from zeroplan.weights import ONE_POOL, Pools

#: FSDP2 makes the inputs of its reductions on the stream that computes, and what comes out, the shards, on one of their own
#: (torch 2.13, _fsdp_collectives.py, foreach_reduce).
_OF_FSDP2: Pools = {Kind.GATHER: 1, Kind.GRADIENTS: 2}
#: FSDP1 casts and gathers on streams of their own, and reduces on another (torch 2.13, _runtime_utils.py, _init_streams).
_OF_FSDP1: Pools = {Kind.GATHER: 1, Kind.UNSHARDED_PARAMETERS: 1, Kind.REDUCE: 2, Kind.GRADIENTS: 2}
#: DeepSpeed's stage 3 gathers and reduces on streams of its own (0.19.8, partition_parameters.py, stage3.py).
_OF_STAGE_3: Pools = {Kind.GATHER: 1, Kind.REDUCE: 2}
#: Its other stages have one for reductions where ``overlap_comm`` is on (stage_1_and_2.py, reduction_stream).
_OVERLAPPED: Pools = {Kind.REDUCE: 2}


def own_pools(recipe: RecipeSpec) -> Pools:
    """The kinds that are not on the stream that computes, each with the number of its pool."""
    if recipe.engine == "fsdp1":
        return _OF_FSDP1
    if recipe.engine == "fsdp2":
        return _OF_FSDP2
    if recipe.engine != "deepspeed":
        return ONE_POOL
    if recipe.zero_stage == 3:
        return _OF_STAGE_3
    return _OVERLAPPED if recipe.zero_stage > 0 and recipe.deepspeed.overlap_comm else ONE_POOL


def peak(moments: Sequence[Moment]) -> Moment:
    """Return the moment that decides whether the job fits; the earliest of equals. Totals must be ints, not columns.

    >>> from zeroplan.ledger import Line, Phase
    >>> quiet, loud = (Moment(name, Phase.STEP, (Line(Kind.TEMPORARY, size, ""),)) for name, size in (("quiet", 1), ("loud", 2)))
    >>> peak((quiet, loud)).name
    'loud'
    """
    if isinstance(moments, Moments):
        return moments.peak()
    totals = [moment.total_bytes for moment in moments]
    return moments[totals.index(max(totals))]


class Sizes(NamedTuple):
    """What the moments of a job say of blocks. [bytes]"""

    peak: Int
    """The highest moment, initialisation included."""
    streams: Int
    """The sum of what each stream holds at most in a step: blocks are used again within a stream alone."""
    kinds: dict[Kind, Int]
    """What there is of each kind at most in a step."""

    @property
    def apart(self) -> Int:
        """What all kinds take where none uses a block of another."""
        return sum(self.kinds.values(), start=0)

    def of(self, *kinds: Kind) -> Int:
        """What there is of some kinds at most."""
        return sum((self.kinds.get(kind, 0) for kind in kinds), start=0)


def sizes_of(moments: Sequence[Moment], recipe: RecipeSpec) -> Sizes:
    """What the moments say of blocks; ints or columns. [bytes]"""
    by_kind: defaultdict[Kind, list[Int]] = defaultdict(list)
    by_pool: defaultdict[int, list[Int]] = defaultdict(list)
    own, totals = own_pools(recipe), list[Int]()
    for moment in moments:
        kinds = bytes_by_kind(moment.lines)
        totals.append(sum(kinds.values(), start=0))
        if moment.phase is Phase.INIT:
            continue
        if Kind.ACTIVATION_GRADIENTS in kinds:  # of the sizes of activations, whose blocks they take
            kinds[Kind.ACTIVATIONS] = kinds.get(Kind.ACTIVATIONS, 0) + kinds.pop(Kind.ACTIVATION_GRADIENTS)
        pools: dict[int, Int] = {}
        for kind, n_bytes in kinds.items():
            by_kind[kind].append(n_bytes)
            pool = own.get(kind, 0)
            pools[pool] = pools.get(pool, 0) + n_bytes
        for pool, n_bytes in pools.items():
            by_pool[pool].append(n_bytes)
    in_pools = sum((maximum(0, *found) for found in by_pool.values()), start=0)
    return Sizes(maximum(0, *totals), in_pools, {kind: maximum(0, *found) for kind, found in by_kind.items()})


def reserved(sizes: Sizes, recipe: RecipeSpec, settings: AllocatorSettings = "default") -> Band:
    """What ``torch.cuda.max_memory_reserved`` will say on a card that never runs out. [bytes]

    Never less than the peak. More by what the allocator cannot use again, for three reasons: a freed block is used by its own
    stream alone; a freed block of one size is in pieces, or too small, when a larger one is requested (buffers of collectives,
    whole gradients, logits, in the order in which they grow); and segments come in whole 2 or 20 MiB. The first follows from the
    moments (``Sizes.streams``), the others depend on the order of all requests, which the moments do not have. How far they went
    was measured: requests of real engines, replayed through a model of the allocator
    (:mod:`zeroplan.engines.reserved_shares`, which says how many of them lie in the band).

    Without a measurement (``engine="paper"``): from the peak, over the streams' sum, to no block being used for another kind.
    Source: torch 2.13, c10/cuda/CUDACachingAllocator.cpp (``BlockPool`` per stream, ``get_free_block``, ``should_split``).
    """
    shares = shares_of(recipe, settings)
    if shares is None:
        return Band(sizes.peak, maximum(sizes.peak, sizes.streams), maximum(sizes.peak, sizes.apart))
    return band_of(sizes, recipe, shares)


def band_of(sizes: Sizes, recipe: RecipeSpec, shares: Shares) -> Band:
    """The band of what is reserved, by some figures: at or above the peak, and with what is expected inside. [bytes]"""
    expected = expected_bytes(sizes.peak, sizes.streams, shares)
    middle, scale = measured_from(sizes, recipe)
    low, high = middle + scale * shares.low // 1000, middle + scale * shares.high // 1000
    return Band(maximum(sizes.peak, minimum(low, expected)), expected, maximum(high, expected))


def expected_bytes(peak_bytes: Int, streams_bytes: Int, shares: Shares | None) -> Int:
    """What is expected to be reserved: this many thousandths of the streams' sum, as in the middle of the measured jobs. [bytes]"""
    thousandths = 1000 if shares is None else shares.expected
    return maximum(peak_bytes, streams_bytes * thousandths // 1000)


def measured_from(sizes: Sizes, recipe: RecipeSpec) -> tuple[Int, Int]:
    """Where the band is measured from, and in which measure: the bytes of what comes and goes in large blocks.

    Flat buffers of collectives, gradients of whole weights and logits come in blocks of many sizes, and what different kinds
    take after each other (the kinds apart less the streams' sum) is used again in part. A tenth of the streams' sum represents
    all smaller blocks and for whole segments. DeepSpeed's stages 0 to 2 lay weights and gradients flat, and what is used again
    varies more: there it is measured from the middle between both sums, and in the streams' sum itself.
    """
    streams, apart = sizes.streams, sizes.apart
    if recipe.engine == "deepspeed" and recipe.zero_stage < 3:
        return (streams + apart) // 2, streams
    if recipe.engine == "deepspeed":
        return streams, sizes.of(Kind.UNSHARDED_GRADIENTS, Kind.TEMPORARY) + streams // 10
    buffers = sizes.of(Kind.REDUCE, Kind.UNSHARDED_GRADIENTS, Kind.LOGITS)
    return streams, buffers + apart - streams + streams // 10


def under_pressure(sizes: Sizes, recipe: RecipeSpec, settings: AllocatorSettings = "default") -> Band:
    """How much room the allocator needs on a full card, where it gives cached blocks back before it fails. [bytes]

    At least the peak. More by what it cannot give back, since a block in use lies in the same segment; the smallest room in
    which replayed jobs ran says how much more that is (:mod:`zeroplan.engines.reserved_shares`). Without a measurement from the
    peak to what is reserved at most.
    """
    pressed = pressed_of(recipe, settings)
    if pressed is None:
        return Band(sizes.peak, sizes.peak, reserved(sizes, recipe, settings).high_bytes)
    return Band(sizes.peak, sizes.peak * pressed.expected // 1000, sizes.peak * pressed.most // 1000)
