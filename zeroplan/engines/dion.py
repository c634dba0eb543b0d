"""The Muon of Microsoft's dion under FSDP2: all matrices of a shape are orthogonalised together, each whole on one rank.

Two all-to-alls per shape bring every rank some of the matrices, and their updates back. Up to three shapes are under way at a time.
The package compiles its functions; this module counts what they take without the compiler, which is a bound. Source: dion 0a059a4,
dion/megabatch_base.py, ``megabatch_orthogonalize_async``, dion/polar_express.py and dion/opt_utils.py, ``AsyncRuntime``.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from zeroplan.engines.muon import updated_by_muon
from zeroplan.numeric import Int, for_each_value

if TYPE_CHECKING:
    from zeroplan.engines.optimizers import LocalTensor

SOURCE = "dion 0a059a4, dion/megabatch_base.py, megabatch_orthogonalize_async"
_BF16 = 2


class Batch(NamedTuple):
    """All matrices of one shape: their number, and their rows and columns on all ranks together."""

    count: int
    rows: int
    columns: int

    def here(self, ranks: int, width: int) -> int:
        """Return this rank's rows in bf16, without those that momenta of ``width`` hold, with one of zeros as padding. [bytes]"""
        copies = self.count if width > _BF16 else 0
        return _BF16 * (copies + (self.count % ranks > 0)) * -(-self.rows // ranks) * self.columns

    def sent(self, ranks: int) -> int:
        """Return the buffer of an all-to-all; their number is padded to a multiple of the ranks. [bytes]"""
        return _BF16 * self._each(ranks) * ranks * -(-self.rows // ranks) * self.columns

    def orthogonalizing(self, ranks: int) -> int:
        """Return the most that the iterations take beside their input: iterates, and products of the shorter side. [bytes]"""
        iterate, gram = self.sent(ranks), _BF16 * self._each(ranks) * min(self.rows, self.columns) ** 2
        return max(iterate + 5 * gram, 4 * iterate + 2 * gram)

    def _each(self, ranks: int) -> int:
        return -(-self.count // ranks)


def batches(tensors: Sequence["LocalTensor"]) -> list[Batch]:
    """Return the matrices of the blocks by their shape, in the order of the model."""
    counts = dict[tuple[int, int], int]()
    for tensor in filter(updated_by_muon, tensors):
        shape = int(tensor.shape[0] if tensor.rows is None else tensor.rows), int(tensor.shape[1])
        counts[shape] = counts.get(shape, 0) + tensor.repeat
    return [Batch(count, *shape) for shape, count in counts.items()]


def ranks_of(tensors: Sequence["LocalTensor"]) -> Int:
    """Return the number of ranks that share the matrices."""
    return next((tensor.ranks for tensor in tensors if updated_by_muon(tensor)), 1)


def highest(tensors: Sequence["LocalTensor"], width: int) -> Int:
    """Return the temporaries of a step at their peak; ``width`` is in bytes per element of a weight. [bytes]"""
    found = batches(tensors)
    return for_each_value(lambda ranks: highest_of(found, ranks, width), ranks_of(tensors))


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
