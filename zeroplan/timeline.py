"""Which moment of the step is the peak, and what does the caching allocator reserve around it?"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from zeroplan.engines.reserved_shares import Shares, pressed_of, shares_of
from zeroplan.ledger import Band, Kind, Moment, Phase, bytes_by_kind
from zeroplan.numeric import Bool, Int, maximum, minimum, where
from zeroplan.spec.hardware import AllocatorSettings
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.trace import Moments
from zeroplan.weights import ONE_POOL, Pools, in_pools, weigh

#: FSDP2 allocates the inputs of a reduce-scatter on the compute stream, and its outputs, the sharded gradients, on the reduce
#: stream (torch 2.13, _fsdp_collectives.py, foreach_reduce).
_OF_FSDP2: Pools = {Kind.GATHER: 1, Kind.GRADIENTS: 2}
#: FSDP1 casts and all-gathers on extra streams (one pool here), and reduces on another (2.13, _runtime_utils.py, _init_streams).
_OF_FSDP1: Pools = {Kind.GATHER: 1, Kind.UNSHARDED_PARAMETERS: 1, Kind.REDUCE: 2, Kind.GRADIENTS: 2}
#: DeepSpeed's stage 3 has one extra stream for all-gathers and one for reductions (0.19.8, partition_parameters.py, stage3.py).
_OF_STAGE_3: Pools = {Kind.GATHER: 1, Kind.REDUCE: 2}
#: DeepSpeed's stages 1 and 2 have a stream for reductions if ``overlap_comm`` is on (stage_1_and_2.py, reduction_stream).
_OVERLAPPED: Pools = {Kind.REDUCE: 2}


def own_pools(recipe: RecipeSpec) -> Pools:
    """The kinds that the engine allocates on another stream than the compute stream, with the number of their pool."""
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
    """Return the moment with the largest total; the earliest of equals. Totals must be ints, not columns.

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
    """The highest totals over a job's moments: of all memory, by stream and by kind. [bytes]"""

    peak: Int
    """The largest total, initialisation included."""
    streams: Int
    """The sum over streams of each stream's highest total in a step: the allocator reuses blocks only within a stream."""
    kinds: dict[Kind, Int]
    """The highest total of each kind in a step."""

    @property
    def apart(self) -> Int:
        """The memory of all kinds if no kind reused a block of another."""
        return sum(self.kinds.values(), start=0)

    def of(self, *kinds: Kind) -> Int:
        """The sum of the highest totals of these kinds."""
        return sum((self.kinds.get(kind, 0) for kind in kinds), start=0)


def sizes_of(moments: Sequence[Moment], recipe: RecipeSpec) -> Sizes:
    """Return the highest totals over the moments; ints or columns. [bytes]

    Streams and kinds of a first micro-batch count where it is the peak (:meth:`~zeroplan.weights.Highest.with_first`).
    """
    by_kind: defaultdict[Kind, list[Int]] = defaultdict(list)
    by_pool = list[tuple[Int, ...]]()
    own, totals = own_pools(recipe), list[Int]()
    first_counts = _first_is_highest(moments)
    for moment in moments:
        kinds = bytes_by_kind(moment.lines)
        totals.append(sum(kinds.values(), start=0))
        is_first = moment.phase is Phase.FIRST
        if moment.phase is Phase.INIT or (is_first and first_counts is False):
            continue
        if Kind.ACTIVATION_GRADIENTS in kinds:  # they reuse blocks of activations, which have the same sizes
            kinds[Kind.ACTIVATIONS] = kinds.get(Kind.ACTIVATIONS, 0) + kinds.pop(Kind.ACTIVATION_GRADIENTS)
        for kind, n_bytes in kinds.items():
            by_kind[kind].append(where(first_counts, n_bytes, 0) if is_first else n_bytes)
        pools = in_pools(weigh(moment.lines, own))
        by_pool.append(tuple(where(first_counts, n_bytes, 0) for n_bytes in pools) if is_first else pools)
    streams = sum((maximum(0, *found) for found in zip(*by_pool, strict=True)), start=0)
    return Sizes(maximum(0, *totals), streams, {kind: maximum(0, *found) for kind, found in by_kind.items()})


def _first_is_highest(moments: Sequence[Moment]) -> Bool:
    """Whether a moment of the first micro-batch is higher than all of a later step."""
    first = [moment.total_bytes for moment in moments if moment.phase is Phase.FIRST]
    if not first:
        return False
    later = (moment.total_bytes for moment in moments if moment.phase not in (Phase.INIT, Phase.FIRST))
    return maximum(0, *first) > maximum(0, *later)


def reserved(sizes: Sizes, recipe: RecipeSpec, settings: AllocatorSettings = "default") -> Band:
    """Return the range of ``torch.cuda.max_memory_reserved`` on a GPU with enough memory. [bytes]

    It is never below the peak. It exceeds the peak by cached memory that the allocator cannot reuse, for three reasons. A freed
    block serves only its own stream. A freed block is split or too small when a larger one is requested (collective buffers, whole
    gradients, logits). Segments are whole multiples of 2 or 20 MiB. The first follows from the moments (``Sizes.streams``). The
    others depend on the order of all requests, which moments do not contain. Their size was measured: requests of real engines,
    replayed through a model of the allocator (:mod:`zeroplan.engines.reserved_shares`, with the number of jobs inside the range).

    Without a measurement (``engine="paper"``): from the peak, over the streams' sum, to the sum without any reuse between kinds.
    Source: torch 2.13, c10/cuda/CUDACachingAllocator.cpp (``BlockPool`` per stream, ``get_free_block``, ``should_split``).
    """
    shares = shares_of(recipe, settings)
    if shares is None:
        return Band(sizes.peak, maximum(sizes.peak, sizes.streams), maximum(sizes.peak, sizes.apart))
    return band_of(sizes, recipe, shares)


def band_of(sizes: Sizes, recipe: RecipeSpec, shares: Shares) -> Band:
    """Return the range of reserved memory from measured shares: never below the peak, with the expected value inside. [bytes]"""
    expected = expected_bytes(sizes.peak, sizes.streams, shares)
    middle, scale = measured_from(sizes, recipe)
    low, high = middle + scale * shares.low // 1000, middle + scale * shares.high // 1000
    return Band(maximum(sizes.peak, minimum(low, expected)), expected, maximum(high, expected))


def expected_bytes(peak_bytes: Int, streams_bytes: Int, shares: Shares | None) -> Int:
    """The expected reserved memory: the streams' sum times the median ratio of the measured jobs, at least the peak. [bytes]"""
    thousandths = 1000 if shares is None else shares.expected
    return maximum(peak_bytes, streams_bytes * thousandths // 1000)


def measured_from(sizes: Sizes, recipe: RecipeSpec) -> tuple[Int, Int]:
    """The middle of the range of reserved memory, and the scale of its width: the bytes in large blocks that come and go. [bytes]

    Flat collective buffers, gradients of whole weights and logits have blocks of many sizes. Memory that different kinds use one
    after the other (``apart`` minus ``streams``) is reused in part. A tenth of the streams' sum stands for smaller blocks and for
    rounding to whole segments. DeepSpeed's stages 0 to 2 flatten weights and gradients, and reuse varies more: there the middle is
    between both sums, and the scale is the streams' sum. A rank of Megatron-Core's pipelines has neither logits nor buffers beside
    the states, but its layers' tensors have many sizes: there the scale has all that comes and goes, and the tenth.
    """
    streams, apart = sizes.streams, sizes.apart
    if recipe.engine == "megatron":
        return streams, sizes.of(Kind.ACTIVATIONS, Kind.LOGITS, Kind.TEMPORARY, Kind.OPTIMIZER_TEMPORARY) + streams // 10
    if recipe.engine == "deepspeed" and recipe.zero_stage < 3:
        return (streams + apart) // 2, streams
    if recipe.engine == "deepspeed":
        return streams, sizes.of(Kind.UNSHARDED_GRADIENTS, Kind.TEMPORARY) + streams // 10
    buffers = sizes.of(Kind.REDUCE, Kind.UNSHARDED_GRADIENTS, Kind.LOGITS)
    return streams, buffers + apart - streams + streams // 10


def under_pressure(sizes: Sizes, recipe: RecipeSpec, settings: AllocatorSettings = "default") -> Band:
    """The room that the allocator needs on a full GPU, where it frees cached blocks before it fails. [bytes]

    The lowest value is the peak. The others add cached memory that cannot be freed because its segment has a block in use. The
    smallest room in which replayed jobs ran gives that excess (:mod:`zeroplan.engines.reserved_shares`). Without a measurement, the
    range ends at the highest reserved memory.
    """
    pressed = pressed_of(recipe, settings)
    if pressed is None:
        return Band(sizes.peak, sizes.peak, reserved(sizes, recipe, settings).high_bytes)
    return Band(sizes.peak, sizes.peak * pressed.expected // 1000, sizes.peak * pressed.most // 1000)
