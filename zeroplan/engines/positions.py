"""The layers at which memory can peak: those where memory over the layers has a corner.

Between two corners every quantity (tensors saved so far, gradients made so far) is linear in the layer's index, so the largest
value is at a corner: the first two and the last two layers, and both ends of every stretch of equal layers. If kinds alternate,
layers at the same position of a period are linear among themselves, so the first and the last period suffice. These positions
give the exact maximum over all layers, at a cost that does not grow with their number.
"""

from functools import lru_cache
from typing import NamedTuple

from zeroplan.spec.model import PREDICTS, ModelSpec
from zeroplan.transformer.recomputed import order_by_recomputation


class Position(NamedTuple):
    """One layer: its index, its run, and the number of layers of each run before and after it."""

    layer: int
    name: str
    run: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    previous_run: int | None
    """Run of the layer below; None for the first layer."""
    next_run: int | None
    """Run of the layer above; None for the last layer."""
    is_corner: bool = True
    """Whether a maximum can lie here; False for a neighbour of a corner in :func:`walk`."""


@lru_cache(maxsize=256)
def walk(model: ModelSpec, first_recomputed: int | None = None, beyond: int = 0) -> tuple[Position, ...]:
    """Return the corners and their neighbours, first to last. A program runs through these instead of all layers.

    A layer's memory depends on the layer before it, so a program also runs the neighbours, and ignores their maxima. Where it
    depends on ``beyond`` layers more, so many layers beside each corner are corners, too.

    >>> tiny = ModelSpec(family="llama", hidden_size=8, intermediate_size=16, num_hidden_layers=9, num_attention_heads=2,
    ...                  num_key_value_heads=1, head_dim=4, vocab_size=10)
    >>> [(position.layer, position.is_corner) for position in walk(tiny)]
    [(0, True), (1, True), (2, False), (6, False), (7, True), (8, True)]
    """
    order = order_by_recomputation(model, first_recomputed)
    reach = range(-beyond, beyond + 1)
    found = {position.layer + step for position in corners(model, first_recomputed) for step in reach}
    near = {layer + step for layer in found for step in (-1 - beyond, *reach, 1 + beyond)}
    return tuple(_position(layer, order)._replace(is_corner=layer in found) for layer in sorted(near & set(range(len(order)))))


@lru_cache(maxsize=256)
def corners(model: ModelSpec, first_recomputed: int | None = None) -> tuple[Position, ...]:
    """Return the layers at which a quantity that is linear between them can be largest, first to last.

    If only the first blocks are recomputed, those and the others each have their own corners.
    The blocks of multi-token prediction have their own, too.

    >>> tiny = ModelSpec(family="llama", hidden_size=8, intermediate_size=16, num_hidden_layers=9, num_attention_heads=2,
    ...                  num_key_value_heads=1, head_dim=4, vocab_size=10)
    >>> [position.name for position in corners(tiny)]
    ['block 1 of 9', 'block 2 of 9', 'block 8 of 9', 'block 9 of 9']
    """
    order = order_by_recomputation(model, first_recomputed)
    cut = first_recomputed or len(order) - len(PREDICTS) * model.predictions
    ends = _ends(order[:cut]) | {cut + index for index in (_ends(order[cut:]) if order[cut:] else ())}
    return tuple(_position(index, order) for index in sorted(ends))


def _ends(order: tuple[int, ...]) -> set[int]:
    stretches = _stretches(order)
    ends = {0, 1, len(order) - 2, len(order) - 1}
    turn = len(set(order)) + 1  # so many stretches include one of each kind between whole stretches
    for start, stop in (*stretches[:turn], *stretches[-turn:]):
        ends |= {start, start + 1, stop - 2, stop - 1}  # the second layer from an end has neighbours of its own kind
    return {index for index in ends if 0 <= index < len(order)}


def _stretches(order: tuple[int, ...]) -> list[tuple[int, int]]:
    starts = [index for index, run in enumerate(order) if not index or order[index - 1] != run]
    return list(zip(starts, [*starts[1:], len(order)], strict=True))


def _position(index: int, order: tuple[int, ...]) -> Position:
    before, after = order[:index], order[index + 1 :]
    every = range(max(order) + 1)
    return Position(
        layer=index,
        name=f"block {index + 1} of {len(order)}",
        run=order[index],
        before=tuple(before.count(run) for run in every),
        after=tuple(after.count(run) for run in every),
        previous_run=before[-1] if before else None,
        next_run=after[0] if after else None,
    )
