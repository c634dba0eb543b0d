"""The Muon of Microsoft's dion under FSDP2: all matrices of a shape are orthogonalised together, each whole on one rank.

Two all-to-alls per shape bring every rank some of the matrices, and their updates back. Up to three shapes are under way at a time.
The package compiles its functions; this module counts what they take without the compiler, which is a bound. Source: dion 0a059a4,
dion/megabatch_base.py, ``megabatch_orthogonalize_async``, dion/polar_express.py and dion/opt_utils.py, ``AsyncRuntime``.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from zeroplan.engines.muon import updated_by_muon
from zeroplan.engines.shampoo import at_every_point
from zeroplan.numeric import Int

if TYPE_CHECKING:
    from zeroplan.engines.optimizers import LocalTensor

SOURCE = "dion 0a059a4, dion/megabatch_base.py, megabatch_orthogonalize_async"
_BF16 = 2


class Batch(NamedTuple):
    """All matrices of one shape: their number, and their rows and columns on all ranks together."""

    number: int
    rows: int
    columns: int

    def here(self, ranks: int, width: int) -> int:
        """Return this rank's rows in bf16, without those that momenta of ``width`` hold, with one of zeros as padding. [bytes]"""
        copies = self.number if width > _BF16 else 0
        return _BF16 * (copies + (self.number % ranks > 0)) * -(-self.rows // ranks) * self.columns

    def sent(self, ranks: int) -> int:
        """Return the buffer of an all-to-all; their number is padded to a multiple of the ranks. [bytes]"""
        return _BF16 * self._each(ranks) * ranks * -(-self.rows // ranks) * self.columns

    def orthogonalizing(self, ranks: int) -> int:
        """Return the most that the iterations take beside their input: iterates, and products of the shorter side. [bytes]"""
        iterate, gram = self.sent(ranks), _BF16 * self._each(ranks) * min(self.rows, self.columns) ** 2
        return max(iterate + 5 * gram, 4 * iterate + 2 * gram)

    def _each(self, ranks: int) -> int:
        return -(-self.number // ranks)


def batches(tensors: Sequence["LocalTensor"]) -> list[Batch]:
    """Return the matrices of the blocks by their shape, in the order of the model."""
    matrices = _whole(tensors)
    return _batches([(int(one.shape[0]), int(one.shape[1])) for one in matrices], [one.repeat for one in matrices])


def _whole(tensors: Sequence["LocalTensor"]) -> list["LocalTensor"]:
    """Return the matrices of the blocks: their rows and columns on all ranks together, then the ranks."""
    return [
        one._replace(shape=(one.shape[0] if one.rows is None else one.rows, one.shape[1], one.ranks))
        for one in filter(updated_by_muon, tensors)
    ]


def _batches(shapes: Iterable[tuple[int, int]], repeats: Iterable[int]) -> list[Batch]:
    numbers = dict[tuple[int, int], int]()
    for shape, repeat in zip(shapes, repeats, strict=True):
        numbers[shape] = numbers.get(shape, 0) + repeat
    return [Batch(number, *shape) for shape, number in numbers.items()]


def highest(tensors: Sequence["LocalTensor"], width: int) -> Int:
    """Return the temporaries of a step at their peak; ``width`` is in bytes per element of a weight. [bytes]"""
    matrices = _whole(tensors)
    repeats = [one.repeat for one in matrices]

    def at(shapes: tuple[tuple[int, ...], ...]) -> int:
        return highest_of(_batches([(rows, columns) for rows, columns, _ in shapes], repeats), shapes[0][2], width)

    return at_every_point(at, matrices) if matrices else 0


def highest_of(found: Sequence[Batch], ranks: int, width: int) -> int:
    """Return the same for these batches on this many ranks. [bytes]

    While a batch is orthogonalised, or has its updates back, its neighbours wait for an all-to-all. A batch keeps its bf16
    copies, both buffers of the first all-to-all, the iterate, and both buffers of the second. A single rank gathers instead.
    """
    most, nothing = 0, Batch(0, 1, 1)
    for before, one, after in zip([nothing, *found], [*found, nothing], [*found[1:], nothing, nothing], strict=True):
        old, new = before.here(ranks, width), one.here(ranks, width)
        if ranks == 1:
            waiting, held, back = old + 2 * before.sent(1), new + one.sent(1), new + 2 * one.sent(1)
        else:
            waiting = old + 5 * before.sent(ranks) + after.here(ranks, width) + 2 * after.sent(ranks)
            held, back = new + 3 * one.sent(ranks), new + 5 * one.sent(ranks)
        most = max(most, waiting + held + one.orthogonalizing(ranks), waiting + before.sent(ranks) + back)
    return most
