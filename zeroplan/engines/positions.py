"""Which layers a moment can fall on: where memory over the layers has a corner.

Between two corners every quantity (tensors saved so far, gradients made so far) is linear in the layer's index, so the largest
value lies at a corner: the first two and the last two layers, and both ends of every run of equal layers. Looking at these alone
gives the exact maximum over all layers, at a cost that does not grow with them.
"""

from functools import lru_cache
from typing import NamedTuple

from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.params import layout


class Position(NamedTuple):
    """One layer: its index, its run, and how many layers of each run stand before it and after it."""

    layer: int
    name: str
    run: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    previous_run: int | None
    """Run of the layer below; None for the first layer."""
    next_run: int | None
    """Run of the layer above; None for the last layer."""


@lru_cache(maxsize=256)
def corners(model: ModelSpec) -> tuple[Position, ...]:
    """Return the layers at which a quantity that is linear between them can be largest, first to last.

    >>> tiny = ModelSpec(family="llama", hidden_size=8, intermediate_size=16, num_hidden_layers=9, num_attention_heads=2,
    ...                  num_key_value_heads=1, head_dim=4, vocab_size=10)
    >>> [position.name for position in corners(tiny)]
    ['block 1 of 9', 'block 2 of 9', 'block 8 of 9', 'block 9 of 9']
    """
    counts = [run.layers for run in layout(model).runs]
    total = sum(counts)
    wanted = {0, 1, total - 2, total - 1}
    start = 0
    for count in counts:
        wanted |= {start, start + 1, start + count - 2, start + count - 1}
        start += count
    return tuple(_position(index, counts) for index in sorted(wanted) if 0 <= index < total)


def _position(index: int, counts: list[int]) -> Position:
    before = _overlap(counts, 0, index)
    after = _overlap(counts, index + 1, sum(counts))
    return Position(
        layer=index,
        name=f"block {index + 1} of {sum(counts)}",
        run=_run_of(index, counts),
        before=before,
        after=after,
        previous_run=None if index == 0 else _run_of(index - 1, counts),
        next_run=None if index == sum(counts) - 1 else _run_of(index + 1, counts),
    )


def _overlap(counts: list[int], start: int, stop: int) -> tuple[int, ...]:
    """Count the layers of each run that lie in ``start``..``stop``."""
    ends = [sum(counts[: run + 1]) for run in range(len(counts))]
    return tuple(max(0, min(end, stop) - max(end - count, start)) for end, count in zip(ends, counts, strict=True))


def _run_of(index: int, counts: list[int]) -> int:
    return next(run for run in range(len(counts)) if index < sum(counts[: run + 1]))
