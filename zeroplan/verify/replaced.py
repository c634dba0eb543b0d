"""Another function in an engine's or library's place, for as long as a run takes, or for good."""

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


def put(owner: object, **others: object) -> None:
    """Put others in place of an owner's, of those that it has, for the rest of the process."""
    for name, other in others.items():
        if hasattr(owner, name):
            setattr(owner, name, other)
