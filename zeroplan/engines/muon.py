"""Muon's step over one matrix, request by request: Newton-Schulz iterations, and DTensor's collectives if ranks share the rows.

For every product DTensor gathers, exchanges or sums one of the factors. It chooses by its estimate of each collective's time.
The choice decides the step's memory and traffic. Source: torch 2.13, ``torch/optim/_muon.py``, ``_zeropower_via_newtonschulz``;
``torch/distributed/tensor/_ops/_matrix_ops.py``, ``_collective_utils.py`` (``redistribute_cost``) and ``placement_types.py``.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from zeroplan.numeric import Int, for_each_row, maximum

if TYPE_CHECKING:
    from zeroplan.engines.optimizers import LocalTensor

SOURCE = "torch 2.13, torch/optim/_muon.py, _zeropower_via_newtonschulz"
_ITERATIONS = 5  # ns_steps
_BF16 = 2
_GPUS_PER_NODE = 8
"""DTensor asks torch for the number of GPUs of the host. The engines do not know it; the choices seldom depend on it."""


class Deed(NamedTuple):
    """A request under a name, its release (0 bytes), or a collective with its largest buffer. [bytes]"""

    name: str
    n_bytes: int = 0
    sends: bool = False


def updated_by_muon(tensor: "LocalTensor") -> bool:
    """Whether Muon updates the tensor: a matrix of a block. AdamW updates all others."""
    return tensor.in_block and len(tensor.shape) == 2


def highest_of(tensors: Sequence["LocalTensor"], width: int) -> Int:
    """Return the larger of Muon's step on one matrix and AdamW's foreach step on all other tensors. [bytes]"""
    others: Int = 0
    for tensor in tensors:
        others = others + tensor.repeat * tensor.numel * (not updated_by_muon(tensor))
    return maximum(width * others, *(for_ranks(tensor, width, highest) for tensor in filter(updated_by_muon, tensors)))


def for_ranks(tensor: "LocalTensor", width: int, measure: Callable[[tuple[Deed, ...]], int]) -> Int:
    """Apply ``measure`` to the step of one matrix, for every number of ranks that share it and every size."""
    rows, columns = tensor.shape[0] if tensor.rows is None else tensor.rows, tensor.shape[1]

    def at(rows: int, columns: int, ranks: int) -> tuple[int]:
        return (measure(newton_schulz(rows, columns, ranks, width)),)

    return for_each_row(at, rows, columns, tensor.ranks)[0]


def step_of(tensor: "LocalTensor", width: int) -> tuple[Deed, ...]:
    """Return the requests of one matrix's step; ``width`` is in bytes per element."""
    rows = tensor.shape[0] if tensor.rows is None else tensor.rows
    return newton_schulz(int(rows), int(tensor.shape[1]), int(tensor.ranks), width)


def sent_by(deeds: tuple[Deed, ...], operation: str) -> list[int]:
    """Return the largest buffer of every call of one collective. [bytes]"""
    return [one.n_bytes for one in deeds if one.sends and one.name == operation]


def highest(deeds: tuple[Deed, ...]) -> int:
    """Return the peak of these requests. [bytes]

    >>> highest(newton_schulz(4, 8, ranks=1, width=4))  # update, two iterates, two Gram matrices
    320
    """
    most, held = 0, dict[str, int]()
    for one in deeds:
        if one.sends:
            continue
        if not one.n_bytes:
            held.pop(one.name, None)
        else:
            held[one.name] = one.n_bytes
            most = max(most, sum(held.values()))
    return most


@lru_cache(maxsize=4096)
def newton_schulz(rows: int, columns: int, ranks: int, width: int) -> tuple[Deed, ...]:
    """Return the first rank's requests, collectives and releases in Muon's step for one matrix; ``width`` in bytes per element."""
    return tuple(_Matrix(rows, columns, ranks).step(width))


class _Matrix(NamedTuple):
    """A matrix whose rows are sharded. Its iterate has the smaller of both sides as its rows."""

    rows: int
    columns: int
    ranks: int

    @property
    def here(self) -> int:
        """Rows of this rank."""
        return -(-self.rows // self.ranks)

    @property
    def share(self) -> int:
        """This rank's shard of an iterate. [bytes]"""
        return _BF16 * self.here * self.columns

    @property
    def order(self) -> int:
        """Rows, and columns, of the Gram matrix."""
        return min(self.rows, self.columns)

    @property
    def gram(self) -> int:
        """The whole Gram matrix. [bytes]"""
        return _BF16 * self.order**2

    def step(self, width: int) -> Iterator[Deed]:
        """Yield the update, then the iterations on its bf16 copy. A variable holds its tensor until the next assignment."""
        yield Deed("update", width * self.here * self.columns)
        yield Deed("result")
        yield Deed("iterate -1", 0 if width == _BF16 else self.share)
        if self.ranks > 1:
            yield Deed("all_reduce", _BF16, sends=True)
        by_rows = self.rows <= self.columns and self.ranks > 1
        for number in range(_ITERATIONS):
            exchanges = by_rows and self._exchanges
            summed = not by_rows or exchanges
            yield from self._gram(number, by_rows=by_rows, exchanges=exchanges)
            yield from self._polynomial(number, summed=summed)
            by_columns = by_rows and self._leaves_rows(summed=summed)
            yield from self._iterate(number, by_rows=by_rows, to_columns=by_columns, summed=summed)
            by_rows = by_rows and not by_columns
        last = _ITERATIONS - 1
        yield from (Deed(f"gram {last}"), Deed(f"polynomial {last}"), Deed("update"), Deed("result", self.share))
        yield Deed(f"iterate {last}")
        if self.rows <= self.columns and self.ranks > 1 and not by_rows:  # the weight takes it by rows
            yield from (*self._to_rows(), Deed("other"))

    def _gram(self, number: int, *, by_rows: bool, exchanges: bool) -> Iterator[Deed]:
        """Multiply by the transpose: DTensor all-gathers the transpose, or all-to-alls both factors from rows to columns."""
        padded = self.ranks * self.share
        if exchanges:
            yield from self._to_columns("columns")
            yield from (Deed("turned", self.share), *self._to_rows(), Deed("turned"))
        elif by_rows:
            yield from (Deed("turned", self.share), Deed("all_gather", padded, sends=True), Deed("gathered", padded))
            yield from (Deed("columns", padded), Deed("gathered"))
            if self.rows % self.ranks:
                yield from (Deed("other", _BF16 * self.rows * self.columns), Deed("columns"))
            yield Deed("turned")
        sharded = by_rows and not exchanges
        yield Deed(f"gram {number}", _BF16 * self.here * self.order if sharded else self.gram)
        yield from (Deed("other"), Deed("columns"), Deed(f"gram {number - 1}"))

    def _polynomial(self, number: int, *, summed: bool) -> Iterator[Deed]:
        """Multiply the Gram matrix by itself. One factor is all-reduced or all-gathered first."""
        if self.ranks > 1:
            yield from self._whole_gram(summed=summed)
        yield Deed(f"polynomial {number}", self.gram if summed else _BF16 * self.here * self.order)
        yield from (Deed("whole"), Deed(f"polynomial {number - 1}"))

    def _whole_gram(self, *, summed: bool) -> Iterator[Deed]:
        n_bytes = self.gram if summed else _BF16 * self.ranks * self.here * self.order
        yield from (Deed("all_reduce" if summed else "all_gather", n_bytes, sends=True), Deed("whole", n_bytes))

    def _iterate(self, number: int, *, by_rows: bool, to_columns: bool, summed: bool) -> Iterator[Deed]:
        """Multiply the polynomial by the iterate, which stays sharded by rows or by columns, or changes to columns."""
        if to_columns:
            yield from self._to_columns("columns")
        if by_rows and not to_columns:
            if summed:
                part = _BF16 * self.here * self.order
                if self.rows % self.ranks:
                    yield Deed("sent", self.ranks * part)
                yield from (Deed("reduce_scatter", self.ranks * part, sends=True), Deed("columns", part), Deed("sent"))
            padded = self.ranks * self.share
            yield from (Deed("all_gather", padded, sends=True), Deed("whole", padded))
        elif self.ranks > 1:
            yield from self._whole_gram(summed=summed)
        if to_columns:
            yield from self._to_columns("other")
        yield Deed(f"iterate {number}", self.share)
        yield from (Deed("other"), Deed("whole"), Deed("columns"), Deed(f"iterate {number - 1}"))

    def _to_columns(self, name: str) -> Iterator[Deed]:
        n_bytes = self._padded_share
        if n_bytes > self.share:
            yield Deed("padded", n_bytes)
        yield from (Deed("sent", n_bytes), Deed("all_to_all", n_bytes, sends=True), Deed(name, n_bytes))
        yield from (Deed("sent"), Deed("padded"))

    def _to_rows(self) -> Iterator[Deed]:
        n_bytes = self._padded_share
        yield from (Deed("all_to_all", n_bytes, sends=True), Deed("received", n_bytes), Deed("other", n_bytes))
        yield Deed("received")

    @property
    def _padded_share(self) -> int:
        """This rank's rows, with the columns padded to a multiple of the ranks. [bytes]"""
        return _BF16 * self.here * self.ranks * -(-self.columns // self.ranks)

    @property
    def _exchanges(self) -> bool:
        """Whether DTensor estimates two all-to-alls as faster than an all-gather, which needs at least as many rows as ranks."""
        gathered = self._time(self.ranks * self.share)
        return self.columns >= self.ranks and (self.rows < self.ranks or 2 * self._exchange < gathered)

    def _leaves_rows(self, *, summed: bool) -> bool:
        """Whether DTensor estimates that the next iterate is ready earlier if it is sharded by columns."""
        iterate, once = self._time(self._bytes), self._time(self.gram)
        stays = iterate + once * summed
        leaves = 2 * self._exchange + self._time(self.gram, passes=1 + summed)
        return self.columns >= self.ranks and (self.rows < self.ranks or leaves < stays)

    @property
    def _bytes(self) -> int:
        return _BF16 * self.rows * self.columns

    @property
    def _exchange(self) -> float:
        return self._time(self._bytes / self.ranks) + 1

    def _time(self, n_bytes: float, passes: int = 1) -> float:
        """Return DTensor's estimate of the time of a ring collective. [µs]"""
        bandwidth, latency = (87.7, 0.6) if self.ranks <= _GPUS_PER_NODE else (87.7 * 0.22, 2.7)
        hops = passes * (self.ranks - 1)
        return 6.6 + hops * latency + n_bytes / 2**30 * hops / self.ranks / bandwidth * 1e6
