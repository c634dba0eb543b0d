"""The highest moments of many layouts at once."""

from collections.abc import Iterable

from zeroplan.ledger import Moment
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.timeline import own_pools
from zeroplan.trace import Entry, Moments, entry_of, highest_of
from zeroplan.weights import Highest


def highest(moments: Iterable[Moment], recipe: RecipeSpec) -> Highest:
    """Return the peak, and the highest total of each pool of the allocator. [bytes]

    >>> from zeroplan.ledger import Kind, Line, Phase
    >>> gather, hold = Line(Kind.GATHER, 3, ""), Line(Kind.PARAMETERS, 4, "")
    >>> found = highest((Moment("a", Phase.STEP, (gather,)), Moment("b", Phase.STEP, (hold,))), RecipeSpec(engine="fsdp2"))
    >>> found.peak_bytes, found.streams_bytes
    (4, 7)
    """
    return highest_of(entries_of(moments), own_pools(recipe))


def entries_of(moments: Iterable[Moment]) -> tuple[Entry, ...]:
    """Return the recorded entries of moments, or entries made from them."""
    return moments.entries if isinstance(moments, Moments) else tuple(map(entry_of, moments))
