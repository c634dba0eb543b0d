"""Selects the moments of a tape where memory can peak for some batch: those that no other moment exceeds in every amount."""

from itertools import chain
from typing import NamedTuple

from zeroplan.expr import Monomial, Size
from zeroplan.ledger import OffGpu
from zeroplan.transformer.families.tape import Alive

#: Amounts, each with larger or equal ones. A model has at least as many features as heads, and at least one head. Keys are at
#: most as wide as queries. A norm's weight has a token's width. The rotary part of a head is part of the head. Each (token,
#: expert) pair has vectors. A share of the sequence is at most the sequence.
_AT_MOST: dict[Monomial, tuple[Monomial, ...]] = {
    ("T",): (("T", "h"), ("T", "q"), ("T", "f")),
    ("T", "a"): (("T", "q"), ("T", "h"), ("T", "f")),
    ("T", "k/d"): (("T", "k"), ("T", "q"), ("T", "h")),
    ("T", "k"): (("T", "q"),),
    ("T", "t"): (("T", "h", "t"), ("T", "m", "t")),
    ("T", "o"): (("T", "a", "o"), ("T", "q")),
    ("T", "a", "o"): (("T", "q"),),
    ("T", "o/2"): (("T", "o"), ("T", "a", "o"), ("T", "q")),
    ("T", "a", "o/2"): (("T", "a", "o"), ("T", "q")),
    ("h",): (("T", "h"),),
    ("d",): (("T", "q"),),
    ("T/p",): (("T/p", "h"), ("T", "h")),
    ("T/p", "h"): (("T", "h"),),
}
#: Values are as wide as keys, and attention's output as wide as queries, except under latent attention.
_AS_WIDE = {"v": "k", "c": "q"}

Amounts = dict[Monomial, int]


def highest(moments: list[Alive], *, wide: bool, autocast: bool, latent: bool = False) -> tuple[Alive, ...]:
    """Return the moments that no other covers, whatever the batch, with and without the workspace inside CUDA's kernels.

    Runs on other tensors than CUDA's have no such workspace, and another moment may be their highest. ``latent``: values and
    attention's output have widths of their own.
    """
    counting = Counting((4 if wide else 2, 4 if wide or autocast else 2), {} if latent else _AS_WIDE, {})
    amounts = [_amounts(moment, counting) for moment in moments]
    kept = _first_of_equals(amounts)
    strict = _strict(amounts)
    for at in reversed(kept.copy()):
        if _is_covered(at, kept, amounts, strict):
            kept.remove(at)
    return tuple([moments[at] for at in kept])


def _strict(amounts: list[Amounts]) -> list[tuple[int, int]]:
    """Return of each moment which amounts it has that no larger amount makes up for, as bits, and their sum."""
    bits: dict[Monomial, int] = {}
    found = []
    for one in amounts:
        positive = [key for key, times in one.items() if times > 0 and key not in _AT_MOST]
        mask = sum(bits.setdefault(key, 1 << len(bits)) for key in positive)
        found.append((mask, sum(times for key, times in one.items() if key not in _AT_MOST)))
    return found


def _is_covered(at: int, kept: list[int], amounts: list[Amounts], strict: list[tuple[int, int]]) -> bool:
    mask, total = strict[at]
    for other in kept:
        has, sums_to = strict[other]
        if mask & ~has or sums_to < total or other == at:  # most pairs: it lacks an amount that nothing makes up for
            continue
        if _covers(amounts[other], amounts[at]):
            return True
    return False


class Counting(NamedTuple):
    """How to count sizes: the bytes of e and r, symbols of equal value, and a cache."""

    widths: tuple[int, int]
    alike: dict[str, str]
    known: dict[tuple[str, Monomial], tuple[tuple[Monomial, int], ...]]
    """Counted amounts, by the text of a size and its mark."""


def _first_of_equals(amounts: list[Amounts]) -> list[int]:
    """Return the first of equal moments, such as those of a ring's steps."""
    first: dict[frozenset[tuple[Monomial, int]], int] = {}
    for at, one in enumerate(amounts):
        first.setdefault(frozenset(one.items()), at)
    return list(first.values())


def _amounts(moment: Alive, counting: Counting) -> Amounts:
    amounts: Amounts = {}
    marked: list[tuple[Size, Monomial]] = [
        (store.size, ("S",) if store.tag.off_gpu is OffGpu.NO_TENSOR else ()) for store in moment.stores
    ]
    for mark, sizes in (("W", moment.gradients), ("G", moment.current), ("C", moment.casts)):
        marked += [(size, (mark,)) for size in sizes]
    for size, mark_of in marked:
        found = counting.known.get((size.text, mark_of))
        if found is None:
            found = counting.known[size.text, mark_of] = _counted(size, counting, mark_of)
        for key, times in found:
            amounts[key] = amounts.get(key, 0) + times
    return amounts


def _counted(size: Size, counting: Counting, mark: Monomial) -> tuple[tuple[Monomial, int], ...]:
    """Return the amounts of a size, each with its mark, symbols sorted."""
    return tuple(
        (mark + tuple(sorted(counting.alike.get(symbol, symbol) for symbol in monomial)), times)
        for monomial, times in size.multiplied_out(dict(zip("er", counting.widths, strict=True))).items()
    )


def _covers(first: Amounts, second: Amounts) -> bool:
    """Whether ``first`` is at least ``second``. A surplus of a larger amount offsets a deficit of a smaller one."""
    lacks = False
    for key in chain(second, first):  # the common case: a difference among the first of many
        if first.get(key, 0) < second.get(key, 0):
            if key not in _AT_MOST:  # no larger amount can make up for it
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
