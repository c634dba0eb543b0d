"""Another function in an engine's or library's place, for as long as a run takes."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def replaced(owner: object, name: str, other: object) -> Iterator[None]:
    """Let ``owner.name`` be another inside."""
    original = getattr(owner, name)
    setattr(owner, name, other)
    try:
        yield
    finally:
        setattr(owner, name, original)
