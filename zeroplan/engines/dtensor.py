"""How torch's DTensor multiplies sharded matrices: the placements that it chooses, the requests, and the collectives.

A matrix can be whole, sharded by rows or by columns, or a sum not yet reduced, along each dimension of the ranks' mesh. A product
accepts several combinations. DTensor estimates the time of the collectives that lead to each one, and chooses the fastest.
Source: torch 2.13, ``torch/distributed/tensor``: ``_sharding_prop.py``, ``_collective_utils.py``, ``_redistribute.py``,
``placement_types.py``, ``_ops/_matrix_ops.py``; ``torch/distributed/_functional_collectives.py``. Ranks are those of the first
one of each group, whose shards are the largest. Leaves out flattened meshes, over which DTensor joins two collectives.
"""

from collections.abc import Iterator
from enum import IntEnum
from functools import lru_cache
from itertools import product
from math import inf
from typing import Literal, NamedTuple

_BF16 = 2
_GPUS_PER_NODE = 8
"""DTensor asks torch for the number of GPUs of the host. The engines do not know it; the choices seldom depend on it."""


class Placement(IntEnum):
    """How the ranks along one dimension of the mesh hold a matrix. The sharded dimension is also an index."""

    ROWS = 0
    COLUMNS = 1
    WHOLE = 2
    SUM = 3


_SHARDED = (Placement.ROWS, Placement.COLUMNS)
Placements = tuple[Placement, ...]

#: Placements of a product and of its two factors along one dimension of the mesh, in DTensor's order. It also offers averages
#: instead of sums, which are never faster than the sums before them.
_WAYS = (
    (Placement.WHOLE, Placement.WHOLE, Placement.WHOLE), (Placement.SUM, Placement.COLUMNS, Placement.ROWS),
    (Placement.ROWS, Placement.ROWS, Placement.WHOLE), (Placement.COLUMNS, Placement.WHOLE, Placement.COLUMNS),
    (Placement.SUM, Placement.SUM, Placement.WHOLE), (Placement.SUM, Placement.WHOLE, Placement.SUM),
)  # fmt: skip


Order = Literal["rows first", "columns first", "with gaps"]


class Event(NamedTuple):
    """A request under a name, its release (0 bytes), or a collective with its largest buffer. [bytes]"""

    name: str
    n_bytes: int = 0
    sends: bool = False
    over_replicas: bool = False
    """Whether a collective is among replicas, not among the ranks that shard the parameters."""


class Matrix(NamedTuple):
    """A bf16 matrix, the mesh's sizes with the outermost dimension first, and the placement along each dimension."""

    rows: int
    columns: int
    mesh: tuple[int, ...]
    places: Placements

    @property
    def transposed(self) -> "Matrix":
        """The transpose."""
        places = tuple(Placement(1 - one) if one in _SHARDED else one for one in self.places)
        return Matrix(self.columns, self.rows, self.mesh, places)

    @property
    def shards(self) -> int:
        """The number of shards."""
        count = 1
        for ranks, place in zip(self.mesh, self.places, strict=True):
            count *= ranks if place in _SHARDED else 1
        return count

    def within(self, dims: int) -> list[int]:
        """Return rows and columns after the shards along the mesh's first ``dims`` dimensions."""
        shape = [self.rows, self.columns]
        for ranks, place in zip(self.mesh[:dims], self.places[:dims], strict=True):
            if place in _SHARDED:
                shape[place] = -(-shape[place] // ranks)
        return shape

    def can_be(self, places: Placements) -> bool:
        """Whether no rank's shard would be empty."""
        least = [1, 1]
        for ranks, place in zip(self.mesh, places, strict=True):
            if place in _SHARDED:
                least[place] *= ranks
        return self.rows >= least[0] and self.columns >= least[1]


class Held(NamedTuple):
    """This rank's part of a matrix: the name of its memory, and how the memory is ordered."""

    matrix: Matrix
    name: str
    order: Order = "rows first"

    @property
    def transposed(self) -> "Held":
        """The transpose, a view."""
        return Held(self.matrix.transposed, self.name, "rows first" if self.order == "columns first" else "columns first")


@lru_cache(maxsize=4096)
def chosen(factors: tuple[Matrix, ...]) -> tuple[Placements, ...]:
    """Return the placements of the result and of each factor. With three factors, the result is ``first + second @ third``."""
    are_sharded = any(place in _SHARDED for one in factors for place in one.places)
    ways = [one for one in _WAYS if are_sharded or not set(one).intersection(_SHARDED)]
    best, best_time, stays = None, inf, None
    for combined in product(ways, repeat=len(factors[0].mesh)):
        made, *wanted = zip(*combined, strict=True)
        wanted = [made, *wanted] if len(factors) == 3 else wanted
        pairs = list(zip(factors, wanted, strict=True))
        if not all(one.can_be(places) for one, places in pairs):
            continue
        time = sum(_time(one, places) for one, places in pairs)
        if time == 0 and all(one.places == places for one, places in pairs):
            stays = (made, *wanted)
        if best is None or time < best_time:
            best, best_time = (made, *wanted), time
    assert best is not None  # noqa: S101  whole matrices always can be multiplied
    return stays or best


def _time(matrix: Matrix, places: Placements) -> float:
    """Return DTensor's estimate of the time to change a matrix's placements. [µs]"""
    if matrix.places == places or set(matrix.places) == {Placement.WHOLE}:
        return 0.0
    gib, total = _BF16 * matrix.rows * matrix.columns / matrix.shards / 1024 / 1024 / 1024, 0.0
    for dim, before, after in _changes(matrix, places):
        if before in _SHARDED and after is Placement.SUM:
            return inf
        ranks = matrix.mesh[dim]
        gib = gib * ranks if before in _SHARDED and after is Placement.WHOLE else gib
        if before is not Placement.WHOLE:
            passes = 2 if (before, after) == (Placement.SUM, Placement.WHOLE) else 1
            total += _ring(matrix.mesh, dim, gib, passes) + (before in _SHARDED and after in _SHARDED)
        gib = gib / ranks if before not in _SHARDED and after in _SHARDED else gib
    return total


def _ring(mesh: tuple[int, ...], dim: int, gib: float, passes: int) -> float:
    """Return DTensor's estimate of the time of a ring collective along one dimension of the mesh. [µs]"""
    neighbours = 1
    for ranks in mesh[dim:]:
        neighbours *= ranks
    bandwidth, latency = (87.7, 0.6) if neighbours <= _GPUS_PER_NODE else (87.7 * 0.22, 2.7)
    hops = passes * (mesh[dim] - 1)
    return 6.6 + hops * latency + (gib * hops / mesh[dim]) / bandwidth * 1e6


def _changes(matrix: Matrix, places: Placements) -> Iterator[tuple[int, Placement, Placement]]:
    """Yield the dimension of the mesh, the placement before and after of every step to the wanted placements.

    A shard of a shard is made whole first, if the outer shards change.
    """
    now = list(matrix.places)
    if matrix.shards > 1 and len(now) > 1:
        for dim in reversed(range(len(now))):
            wanted = places[dim]
            if wanted in _SHARDED:
                outside = [[place is wanted for place in one[:dim]] for one in (now, places)]
                wanted = wanted if outside[0] == outside[1] else Placement.WHOLE
            if now[dim] is not wanted:
                yield dim, now[dim], wanted
                now[dim] = wanted
    for dim, wanted in enumerate(places):
        if now[dim] is not wanted:
            yield dim, now[dim], wanted


class Tape:
    """The requests, releases and collectives of one rank, in order."""

    def __init__(self) -> None:
        """Start without any."""
        self.events: list[Event] = []
        self._count = 0

    def make(self, n_bytes: int, name: str = "") -> str:
        """Request memory, and return its name. [bytes]"""
        self._count += not name
        name = name or f"part {self._count}"
        self.events.append(Event(name, n_bytes))
        return name

    def drop(self, *names: str) -> None:
        """Release memory."""
        self.events += [Event(name) for name in names]

    def send(self, operation: str, n_bytes: int, *, over_replicas: bool = False) -> None:
        """Run a collective along one dimension of the mesh."""
        self.events.append(Event(operation, n_bytes, sends=True, over_replicas=over_replicas))

    def multiply(self, *factors: Held, name: str = "") -> Held:
        """Multiply two matrices, or add the first to the product of the two others. Moved factors live until the product does."""
        made, *wanted = chosen(tuple([one.matrix for one in factors]))
        moved = [self.move(one, places) for one, places in zip(factors, wanted, strict=True)]
        whole = Matrix(factors[-2].matrix.rows, factors[-1].matrix.columns, factors[0].matrix.mesh, made)
        product_ = Held(whole, self.make(_bytes(whole.within(len(made))), name))
        self.drop(*[one.name for one, given in zip(moved, factors, strict=True) if one.name != given.name])
        return product_

    def move(self, given: Held, places: Placements) -> Held:
        """Change a matrix's placements, step by step. Each step's result lives until the next one does."""
        at, shape = given, given.matrix.within(len(places))
        logical = [given.matrix.within(dim) for dim in range(len(places))]
        for dim, before, after in _changes(given.matrix, places):
            ranks = given.matrix.mesh[dim]
            if ranks == 1:
                continue
            step = _Step(self, at, shape, logical[dim], ranks, over_replicas=dim < len(places) - 1)
            made, shape = step.run(before, after)
            if at.name != given.name:
                self.drop(at.name)
            at = made
        return at._replace(matrix=given.matrix._replace(places=places))


class _Step(NamedTuple):
    """One change of a matrix's placement along one dimension of the mesh."""

    tape: Tape
    given: Held
    shape: list[int]
    """This rank's rows and columns."""
    logical: list[int]
    """Rows and columns that the ranks along this dimension share."""
    ranks: int
    over_replicas: bool

    def run(self, before: Placement, after: Placement) -> tuple[Held, list[int]]:
        """Record the step; return the result with this rank's rows and columns."""
        if before is Placement.WHOLE:
            return self._cut(after)
        if before is Placement.SUM:
            return self._sum() if after is Placement.WHOLE else self._scatter(after)
        return self._gather(before) if after is Placement.WHOLE else self._exchange(before, after)

    def _cut(self, after: Placement) -> tuple[Held, list[int]]:
        """Copy this rank's shard of a whole matrix, or divide the matrix by the number of ranks, which makes it a sum."""
        shape = list(self.shape)
        if after in _SHARDED:
            shape[after] = -(-shape[after] // self.ranks)
        order: Order = "columns first" if self.given.order == "columns first" else "rows first"
        return self.given._replace(name=self.tape.make(_bytes(shape)), order=order), shape

    def _sum(self) -> tuple[Held, list[int]]:
        n_bytes = _bytes(self.shape)
        self.tape.send("all_reduce", n_bytes, over_replicas=self.over_replicas)
        return Held(self.given.matrix, self.tape.make(n_bytes)), self.shape

    def _scatter(self, after: Placement) -> tuple[Held, list[int]]:
        """Reduce-scatter. Columns, and rows that the ranks do not divide, are copied into another order or padded first."""
        size = self.shape[after]
        part = list(self.shape)
        part[after] = -(-size // self.ranks)
        short = self.ranks - size // part[after]  # ranks whose shard is padded
        held = []
        if short:
            held += [self.tape.make(_bytes(part)) for _ in range(self.ranks if after is Placement.COLUMNS else short)]
            held.append(self.tape.make(self.ranks * _bytes(part)))
        else:
            held += self._in_order()
        if after is Placement.COLUMNS:
            held.append(self.tape.make(self.ranks * _bytes(part)))
        self.tape.send("reduce_scatter", self.ranks * _bytes(part), over_replicas=self.over_replicas)
        made = self.tape.make(_bytes(part))
        self.tape.drop(*held)
        return Held(self.given.matrix, made), part

    def _gather(self, before: Placement) -> tuple[Held, list[int]]:
        """All-gather. Columns are joined in a copy; a padded matrix is cut to its size, columns in another copy."""
        copied = self._in_order()
        shape, padded = list(self.shape), self.ranks * _bytes(self.shape)
        shape[before] = self.logical[before]
        self.tape.send("all_gather", padded, over_replicas=self.over_replicas)
        made = self.tape.make(padded)
        if before is Placement.COLUMNS:
            made = self._instead_of(made, padded)
            if _bytes(shape) < padded:
                made = self._instead_of(made, _bytes(shape))
        self.tape.drop(*copied)
        return Held(self.given.matrix, made), shape

    def _exchange(self, before: Placement, after: Placement) -> tuple[Held, list[int]]:
        """All-to-all from rows to columns or back. What it cuts is padded to a multiple of the ranks."""
        part = -(-self.logical[after] // self.ranks)
        cut = list(self.shape)
        cut[after] = part * self.ranks
        n_bytes = _bytes(cut)
        held = [self.tape.make(n_bytes)] if cut != self.shape else self._in_order()
        sent = [self.tape.make(n_bytes)] if after is Placement.COLUMNS else []
        self.tape.send("all_to_all", n_bytes, over_replicas=self.over_replicas)
        made = self.tape.make(n_bytes)
        if before is Placement.COLUMNS:
            made = self._instead_of(made, n_bytes)
        self.tape.drop(*sent, *held)
        shape = list(self.shape)
        shape[before], shape[after] = self.logical[before], part
        has_gaps = before is Placement.COLUMNS and self.logical[before] % self.ranks
        return Held(self.given.matrix, made, "with gaps" if has_gaps else "rows first"), shape

    def _in_order(self) -> list[str]:
        """Copy the matrix if its memory has another order than by rows."""
        return [] if self.given.order == "rows first" else [self.tape.make(_bytes(self.shape))]

    def _instead_of(self, name: str, n_bytes: int) -> str:
        made = self.tape.make(n_bytes)
        self.tape.drop(name)
        return made


def _bytes(shape: list[int]) -> int:
    return _BF16 * shape[0] * shape[1]
