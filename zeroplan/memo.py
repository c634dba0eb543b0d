"""A cache that lives as long as one question.

A search asks about thousands of layouts, most of which share blocks, stages and passes. Inside :func:`remembering`, functions
that call :func:`recalled` compute each of them once. Outside of it nothing is cached.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar, cast

from zeroplan.numeric import Int

Made = TypeVar("Made")
Key = TypeVar("Key", bound=Hashable)

_known: ContextVar[dict[Hashable, object] | None] = ContextVar("known", default=None)


@contextmanager
def remembering() -> Iterator[None]:
    """Cache results until the outermost such block ends."""
    if _known.get() is not None:
        yield
        return
    token = _known.set({})
    try:
        yield
    finally:
        _known.reset(token)


def recalled(key: Callable[[], Hashable], make: Callable[[], Made]) -> Made:
    """Return the cached value of a key, or compute and cache it. Outside :func:`remembering` it computes without a key.

    >>> with remembering():
    ...     one, again, other = (recalled(lambda key=key: key, list) for key in ("one", "one", "other"))
    >>> one is again, one is other
    (True, False)
    """
    known = _known.get()
    if known is None:
        return make()
    named = key()
    if named not in known:
        known[named] = make()
    return cast("Made", known[named])


def as_key(value: Int) -> Hashable:
    """Return a number as part of a key; a column by its content.

    >>> as_key(3)
    3
    """
    return value if isinstance(value, int) else (value.shape, value.tobytes())


class Computed(dict[Key, Made]):
    """Values that are computed from their keys when code first reads them.

    >>> squares = Computed(lambda number: number * number)
    >>> squares[3], dict(squares)
    (9, {3: 9})
    """

    def __init__(self, make: Callable[[Key], Made]) -> None:
        """``make`` returns the value of a key."""
        super().__init__()
        self._make = make

    def __missing__(self, key: Key) -> Made:
        """Compute and keep a value."""
        made = self[key] = self._make(key)
        return made
