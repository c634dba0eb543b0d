"""Memory that a library takes from the card beside torch's allocator. The process of a dry run has one script."""

from collections.abc import Sequence

from zeroplan.script_run import OutsideBuffer

_held: list[OutsideBuffer] = []
_most: list[OutsideBuffer] = []
"""What was held when it was the most."""


def take(parts: Sequence[OutsideBuffer]) -> None:
    """Note that a library takes memory."""
    _held.extend(parts)
    if _total(_held) > _total(_most):
        _most[:] = _held


def give_back(parts: Sequence[OutsideBuffer]) -> None:
    """Note that a library gives back what it took."""
    for part in parts:
        _held.remove(part)


def most() -> tuple[OutsideBuffer, ...]:
    """What libraries held when they held the most. [bytes]"""
    return tuple(_most)


def _total(parts: Sequence[OutsideBuffer]) -> int:
    return sum(part.expected_bytes for part in parts)
