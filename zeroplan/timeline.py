"""Which moment of the step is the peak, and what does the caching allocator reserve around it?"""

from zeroplan.ledger import Band, Kind, Moment, bytes_by_kind
from zeroplan.numeric import Int, maximum

#: Kinds that an engine allocates on streams of their own: the caching allocator keeps one pool of blocks per stream.
_OWN_POOL = {Kind.GATHER: "gather", Kind.REDUCE: "reduce"}
#: FSDP2 makes the inputs of its reductions on the stream that computes, and what comes out, the shards, on one of their own
#: (torch 2.13, _fsdp_collectives.py, foreach_reduce).
_POOLS_OF: dict[str, dict[Kind, str]] = {"fsdp2": {Kind.GATHER: "gather", Kind.GRADIENTS: "reduce"}}


def pool_of(kind: Kind, engine: str) -> str:
    """The allocator's pool in which an engine has a kind: that of the stream which it allocates it on.

    >>> pool_of(Kind.GATHER, "fsdp2"), pool_of(Kind.PARAMETERS, "fsdp2")
    ('gather', 'compute')
    """
    return _POOLS_OF.get(engine, _OWN_POOL).get(kind, "compute")


def peak(moments: tuple[Moment, ...]) -> Moment:
    """Return the moment that decides whether the job fits; the earliest of equals. Totals must be ints, not columns.

    >>> from zeroplan.ledger import Line, Phase
    >>> quiet, loud = (Moment(name, Phase.STEP, (Line(Kind.TEMPORARY, size, ""),)) for name, size in (("quiet", 1), ("loud", 2)))
    >>> peak((quiet, loud)).name
    'loud'
    """
    totals = [moment.total_bytes for moment in moments]
    return moments[totals.index(max(totals))]


def reserved(moments: tuple[Moment, ...], *, engine: str = "") -> Band:
    """What ``torch.cuda.max_memory_reserved`` will say, as far as the moments tell. [bytes]

    Least: every freed block is used again, so the peak itself (nearly so with expandable segments). Expected: blocks are used
    again within a stream's pool but not across pools, so the sum of each pool's own maximum. Most: no block is used again for
    another kind, so the sum of each kind's own maximum.

    Leaves out fragmentation inside a kind. Source: torch 2.13, c10/cuda/CUDACachingAllocator.cpp (``BlockPool`` per stream).
    """
    by_kind: dict[Kind, Int] = {}
    by_pool: dict[str, Int] = {}
    largest: Int = 0
    for moment in moments:
        pools: dict[str, Int] = {}
        total: Int = 0
        kinds = bytes_by_kind(moment.lines)
        if Kind.ACTIVATION_GRADIENTS in kinds:  # of the sizes of activations, whose blocks they take
            kinds[Kind.ACTIVATIONS] = kinds.get(Kind.ACTIVATIONS, 0) + kinds.pop(Kind.ACTIVATION_GRADIENTS)
        for kind, n_bytes in kinds.items():
            by_kind[kind] = maximum(by_kind.get(kind, 0), n_bytes)
            pool = pool_of(kind, engine)
            pools[pool] = pools.get(pool, 0) + n_bytes
            total = total + n_bytes
        for pool, n_bytes in pools.items():
            by_pool[pool] = maximum(by_pool.get(pool, 0), n_bytes)
        largest = maximum(largest, total)
    return Band(largest, sum(by_pool.values(), start=0), sum(by_kind.values(), start=0))
