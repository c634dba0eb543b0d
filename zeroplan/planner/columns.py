"""The highest of the moments of many layouts at once."""

from collections.abc import Iterable

from zeroplan.ledger import Moment, Phase
from zeroplan.numeric import maximum
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.timeline import own_pools
from zeroplan.trace import Moments
from zeroplan.weights import EMPTY, Highest, in_pools, total, weigh


def highest(moments: Iterable[Moment], recipe: RecipeSpec) -> Highest:
    """The peak, and what each pool of the allocator holds at most. [bytes]

    >>> from zeroplan.ledger import Kind, Line, Phase
    >>> gather, hold = Line(Kind.GATHER, 3, ""), Line(Kind.PARAMETERS, 4, "")
    >>> found = highest((Moment("a", Phase.STEP, (gather,)), Moment("b", Phase.STEP, (hold,))), RecipeSpec(engine="fsdp2"))
    >>> found.peak_bytes, found.streams_bytes
    (4, 7)
    """
    own, found = own_pools(recipe), EMPTY
    if isinstance(moments, Moments):
        return moments.highest(own)
    for moment in moments:
        weight = weigh(moment.lines, own)
        if moment.phase is Phase.INIT:
            found = Highest(maximum(found.peak_bytes, total(weight)), found.pools)
        else:
            found = found.or_of(Highest(total(weight), in_pools(weight)))
    return found
