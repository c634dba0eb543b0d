"""Muon's step over one matrix, request by request: Newton-Schulz iterations, and DTensor's collectives if ranks share the rows.

For every product DTensor gathers, exchanges or sums the factors (:mod:`zeroplan.engines.dtensor`). That decides the step's memory
and traffic. Replicas take part: DTensor also shares the work among them. Source: torch 2.13, ``torch/optim/_muon.py``,
``_zeropower_via_newtonschulz``.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from zeroplan.engines.dtensor import Event, Held, Matrix, Placement, Tape
from zeroplan.numeric import Int, added_up, for_each_row, maximum

if TYPE_CHECKING:
    from zeroplan.engines.optimizers import LocalTensor

SOURCE = "torch 2.13, torch/optim/_muon.py, _zeropower_via_newtonschulz"
_ITERATIONS = 5  # ns_steps
_BF16 = 2


def updated_by_muon(tensor: "LocalTensor") -> bool:
    """Whether Muon updates the tensor: a matrix of a block. AdamW updates all others."""
    return tensor.in_block and len(tensor.shape) == 2


def highest_of(tensors: Sequence["LocalTensor"], width: int) -> Int:
    """Return the larger of Muon's step on one matrix and AdamW's foreach step on all other tensors. [bytes]"""
    others = added_up(tensor.repeat * tensor.numel for tensor in tensors if not updated_by_muon(tensor))
    return maximum(width * others, *(for_ranks(tensor, width, highest) for tensor in filter(updated_by_muon, tensors)))


def for_ranks(tensor: "LocalTensor", width: int, measure: Callable[[tuple[Event, ...]], int]) -> Int:
    """Apply ``measure`` to the step of one matrix, for every number of ranks and replicas that share it and every size."""

    def at(rows: int, columns: int, ranks: int, replicas: int) -> tuple[int]:
        return (measure(newton_schulz(rows, columns, _mesh(replicas, ranks), width)),)

    return for_each_row(at, *_shape(tensor), tensor.ranks, tensor.replicas)[0]


def _shape(tensor: "LocalTensor") -> tuple[Int, Int]:
    return tensor.shape[0] if tensor.rows is None else tensor.rows, tensor.shape[1]


def _mesh(replicas: int, ranks: int) -> tuple[int, ...]:
    return (int(ranks),) if replicas == 1 else (int(replicas), int(ranks))


def step_of(tensor: "LocalTensor", width: int) -> tuple[Event, ...]:
    """Return the requests of one matrix's step; ``width`` is in bytes per element."""
    rows, columns = _shape(tensor)
    return newton_schulz(int(rows), int(columns), _mesh(int(tensor.replicas), int(tensor.ranks)), width)


def sent_by(events: tuple[Event, ...], operation: str, *, over_replicas: bool = False) -> list[int]:
    """Return the largest buffer of every call of one collective, among the ranks that shard the rows or among replicas. [bytes]"""
    return [one.n_bytes for one in events if one.sends and one.name == operation and one.over_replicas is over_replicas]


def highest(events: tuple[Event, ...]) -> int:
    """Return the peak of these requests. [bytes]

    >>> highest(newton_schulz(4, 8, (1,), width=4))  # update, two iterates, two Gram matrices
    320
    """
    most, held = 0, dict[str, int]()
    for one in events:
        if one.sends:
            continue
        if not one.n_bytes:
            held.pop(one.name, None)
        else:
            held[one.name] = one.n_bytes
            most = max(most, sum(held.values()))
    return most


@lru_cache(maxsize=4096)
def newton_schulz(rows: int, columns: int, mesh: tuple[int, ...], width: int) -> tuple[Event, ...]:
    """Return the first rank's requests, collectives and releases in Muon's step for one matrix; ``width`` in bytes per element.

    ``mesh``: the replicas, if there are several, and the ranks that shard the rows. A variable holds its tensor until the next
    assignment, as those of the previous iteration, and the previous matrix's result.
    """
    tape, places = Tape(), (*(Placement.WHOLE for _ in mesh[1:]), Placement.ROWS)
    weight = Matrix(rows, columns, mesh, places)
    n_bytes = width * weight.within(len(mesh))[0] * columns
    update = tape.make(n_bytes, "update")
    tape.drop("result")
    copy = update if width == _BF16 else tape.make(_BF16 * n_bytes // width)
    iterate = Held(weight, copy) if rows <= columns else Held(weight, copy).transposed
    if mesh[-1] > 1:
        tape.send("all_reduce", _BF16)
    gram, polynomial = None, None
    for number in range(_ITERATIONS):
        before = iterate, gram, polynomial
        gram = tape.multiply(iterate, iterate.transposed)
        tape.drop(*_names(before[1]))
        polynomial = tape.multiply(gram, gram, gram)
        tape.drop(*_names(before[2]))
        iterate = tape.multiply(iterate, polynomial, iterate, name="result" if number == _ITERATIONS - 1 else "")
        tape.drop(*[name for name in _names(before[0]) if name != update])
    tape.drop(*_names(gram, polynomial), update)
    result = iterate if rows <= columns else iterate.transposed
    tape.drop(*[name for name in _names(tape.move(result, places)) if name != result.name])
    return tuple(tape.events)


def _names(*several: Held | None) -> list[str]:
    return [one.name for one in several if one is not None]
