"""How much GPU memory do a script's libraries allocate outside torch's allocator? One script per process."""

from collections.abc import Sequence

from zeroplan.script_run import OutsideBuffer

_held: list[OutsideBuffer] = []
_most: list[OutsideBuffer] = []
"""The buffers at their highest total."""


def take(parts: Sequence[OutsideBuffer]) -> None:
    """Note buffers that a library allocates."""
    _held.extend(parts)
    if _total(_held) > _total(_most):
        _most[:] = _held


def give_back(parts: Sequence[OutsideBuffer]) -> None:
    """Note buffers that a library frees."""
    for part in parts:
        _held.remove(part)


def most() -> tuple[OutsideBuffer, ...]:
    """The buffers at their highest total."""
    return tuple(_most)


def _total(parts: Sequence[OutsideBuffer]) -> int:
    return sum(part.expected_bytes for part in parts)
