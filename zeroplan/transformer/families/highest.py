"""Selects the moments of a tape where memory can peak for some batch: those that no other moment exceeds in every amount."""

from typing import NamedTuple

from zeroplan.expr import Monomial, Size
from zeroplan.ledger import OffGpu
from zeroplan.transformer.families.tape import Alive, Store

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
    amounts = _amounts_of(moments, counting)
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
        mask = sum([bits.setdefault(key, 1 << len(bits)) for key in positive])
        found.append((mask, sum([times for key, times in one.items() if key not in _AT_MOST])))
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

    def add(self, amounts: Amounts, size: Size, mark: Monomial, times: int = 1) -> None:
        """Add the amounts of a size, so many times."""
        found = self.known.get((size.text, mark))
        if found is None:
            found = self.known[size.text, mark] = _counted(size, self, mark)
        for key, each in found:
            amounts[key] = (amounts[key] if key in amounts else 0) + times * each  # noqa: SIM401  most of a first estimate's calls


def _first_of_equals(amounts: list[Amounts]) -> list[int]:
    """Return the first of equal moments, such as those of a ring's steps."""
    first: dict[frozenset[tuple[Monomial, int]], int] = {}
    for at, one in enumerate(amounts):
        first.setdefault(frozenset(one.items()), at)
    return list(first.values())


def _amounts_of(moments: list[Alive], counting: Counting) -> list[Amounts]:
    """Return the amounts of each moment, which shares most of its tensors with the moment before."""
    found, before, held = list[Amounts](), tuple[Store, ...](), Amounts()
    known: dict[tuple[tuple[int, ...], ...], Amounts] = {}
    for moment in moments:
        held = _amounts_of_stores(moment.stores, before, held, counting)
        before, beside = moment.stores, (moment.gradients, moment.current, moment.casts)
        same = tuple([tuple(map(id, sizes)) for sizes in beside])
        if same not in known:
            known[same] = _amounts_of_weights(beside, counting)
        found.append(held | known[same])
    return found


def _amounts_of_weights(beside: tuple[tuple[Size, ...], ...], counting: Counting) -> Amounts:
    """Return the amounts of gradients so far, of those being made, and of casts, each with its mark."""
    amounts: Amounts = {}
    for mark, sizes in zip("WGC", beside, strict=True):
        for size in sizes:
            counting.add(amounts, size, (mark,))
    return amounts


def _amounts_of_stores(stores: tuple[Store, ...], before: tuple[Store, ...], held: Amounts, counting: Counting) -> Amounts:
    """Return the amounts of tensors, given those of others."""
    now, then = frozenset(stores), frozenset(before)
    if len(now) < len(stores) or len(then) < len(before):  # some count twice
        then, before, held = frozenset(), (), {}
    amounts = held.copy()
    for store in before:
        if store not in now:
            counting.add(amounts, store.size, _mark_of(store), -1)
    for store in stores:
        if store not in then:
            counting.add(amounts, store.size, _mark_of(store))
    return {key: times for key, times in amounts.items() if times}


def _mark_of(store: Store) -> Monomial:
    return ("S",) if store.tag.off_gpu is OffGpu.NO_TENSOR else ()


def _counted(size: Size, counting: Counting, mark: Monomial) -> tuple[tuple[Monomial, int], ...]:
    """Return the amounts of a size, each with its mark, symbols sorted."""
    return tuple(
        (mark + tuple(sorted(counting.alike.get(symbol, symbol) for symbol in monomial)), times)
        for monomial, times in size.multiplied_out(dict(zip("er", counting.widths, strict=True))).items()
    )


def _covers(first: Amounts, second: Amounts) -> bool:
    """Whether ``first`` is at least ``second``. A surplus of a larger amount offsets a deficit of a smaller one."""
    differing = [key for key, _ in first.items() ^ second.items()]  # few
    lacks = {key for key in differing if first.get(key, 0) < second.get(key, 0)}
    if not lacks <= _AT_MOST.keys():  # no larger amount can make up for it
        return False
    if not lacks:
        return True
    surplus = {key: first.get(key, 0) - second.get(key, 0) for key in {**first, **second}}
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
