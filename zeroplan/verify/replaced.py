"""Replaces functions of engines and libraries, for a block of code or for the rest of the process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: object, name: str, other: object) -> Iterator[None]:
    """Replace ``owner.name`` by another object inside the block."""
    original = getattr(owner, name)
    setattr(owner, name, other)
    try:
        yield
    finally:
        setattr(owner, name, original)


def put(owner: object, **others: object) -> None:
    """Replace attributes of an owner for the rest of the process; attributes that it lacks are skipped."""
    for name, other in others.items():
        if hasattr(owner, name):
            setattr(owner, name, other)


def always(answer: object) -> Callable[..., Any]:
    """A function that returns one answer, whatever its arguments."""
    return lambda *_, **__: answer
