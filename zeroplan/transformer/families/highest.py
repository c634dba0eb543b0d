"""Which moments of a tape can be the highest for some batch: those at which no other has at least as much of everything."""

from functools import lru_cache
from itertools import chain

from zeroplan.expr import Monomial, Size
from zeroplan.ledger import OffGpu
from zeroplan.transformer.families.tape import Alive

#: What is never more than what: a token's numbers are at least as many as its heads, its heads at least one; keys are at most as
#: wide as queries; a norm's weight has a token's width; a share of the sequence is no more than all of it.
_AT_MOST: dict[Monomial, tuple[Monomial, ...]] = {
    ("T",): (("T", "h"), ("T", "q"), ("T", "f")),
    ("T", "a"): (("T", "q"), ("T", "h"), ("T", "f")),
    ("T", "k/d"): (("T", "k"), ("T", "q"), ("T", "h")),
    ("T", "k"): (("T", "q"),),
    ("h",): (("T", "h"),),
    ("d",): (("T", "q"),),
    ("T/p",): (("T/p", "h"), ("T", "h")),
    ("T/p", "h"): (("T", "h"),),
}
#: Values are as wide as keys and attention's output as queries, but for latent attention.
_AS_WIDE = {"v": "k", "c": "q"}

Amounts = dict[Monomial, int]


def highest(
    moments: list[Alive], *, wide: bool, autocast: bool, scratch_apart: bool = False, latent: bool = False
) -> tuple[Alive, ...]:  # fmt: skip
    """Leave out moments at which no more is alive than at another, whatever the batch.

    ``scratch_apart``: nor without what kernels take inside themselves on CUDA alone, where several do at different moments.

    ``latent``: values and attention's output have widths of their own.
    """
    widths = 4 if wide else 2, 4 if wide or autocast else 2
    amounts = [_amounts(moment, widths, scratch_apart=scratch_apart, latent=latent) for moment in moments]
    kept = _first_of_equals(amounts)
    for at in reversed(kept.copy()):
        if any(other != at and _covers(amounts[other], amounts[at]) for other in kept):
            kept.remove(at)
    return tuple(moments[at] for at in kept)


def _first_of_equals(amounts: list[Amounts]) -> list[int]:
    """Of moments that are alike, as those of every turn of a ring, the first."""
    first: dict[frozenset[tuple[Monomial, int]], int] = {}
    for at, one in enumerate(amounts):
        first.setdefault(frozenset(one.items()), at)
    return list(first.values())


def _amounts(moment: Alive, widths: tuple[int, int], *, scratch_apart: bool, latent: bool) -> Amounts:
    amounts: Amounts = {}
    for store in moment.stores:
        _count(amounts, store.size, widths, ("S",) if scratch_apart and store.tag.off_gpu is OffGpu.NO_TENSOR else (), latent)
    for mark, sizes in (("W", moment.gradients), ("G", moment.current), ("C", moment.casts)):
        for size in sizes:
            _count(amounts, size, widths, (mark,), latent)
    return amounts


def _count(amounts: Amounts, size: Size, widths: tuple[int, int], mark: Monomial, latent: bool) -> None:  # noqa: FBT001  as below
    for key, times in _marked(size, widths, mark, latent):
        amounts[key] = amounts.get(key, 0) + times


@lru_cache(maxsize=4096)
def _marked(size: Size, widths: tuple[int, int], mark: Monomial, latent: bool) -> tuple[tuple[Monomial, int], ...]:  # noqa: FBT001
    """What a size is of, each with its mark and in one order: the sizes of a tape are few."""
    as_wide = {} if latent else _AS_WIDE
    return tuple(
        (mark + tuple(sorted(as_wide.get(symbol, symbol) for symbol in monomial)), times)
        for monomial, times in size.multiplied_out(dict(zip("er", widths, strict=True))).items()
    )


def _covers(first: Amounts, second: Amounts) -> bool:
    """Whether ``first`` is at least ``second``; what it lacks of one amount it may have too much of a larger one."""
    lacks = False
    for key in chain(second, first):  # most pairs differ among the first of these, and there are many
        if first.get(key, 0) < second.get(key, 0):
            if key not in _AT_MOST:  # nothing larger stands for it
                return False
            lacks = True
    surplus = {key: first.get(key, 0) - second.get(key, 0) for key in {**first, **second}} if lacks else {}
    for key, more in sorted(surplus.items(), key=lambda pair: len(pair[0])):
        lacking = -more
        for larger in _AT_MOST.get(key, ()) if lacking > 0 else ():
            paid = max(0, min(lacking, surplus.get(larger, 0)))
            if paid:
                surplus[larger] -= paid
                lacking -= paid
        if lacking > 0:
            return False
    return True
