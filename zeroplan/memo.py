"""What one question works out many times over, kept until it is answered.

A search asks about thousands of layouts, most of which share blocks, stages and passes. Inside :func:`remembering` functions that
call :func:`recalled` work each of them out once. Outside of it nothing is kept.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar, cast

from zeroplan.numeric import Int

Made = TypeVar("Made")

_known: ContextVar[dict[Hashable, object] | None] = ContextVar("known", default=None)


@contextmanager
def remembering() -> Iterator[None]:
    """Keep what is worked out, until the outermost such block ends."""
    if _known.get() is not None:
        yield
        return
    token = _known.set({})
    try:
        yield
    finally:
        _known.reset(token)


def recalled(key: Callable[[], Hashable], make: Callable[[], Made]) -> Made:
    """What has been made under a key, or is now; without a question that is being answered it is made without asking for a key.

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
    """A number as a part of a key; of a column what is in it.

    >>> as_key(3)
    3
    """
    return value if isinstance(value, int) else (value.shape, value.tobytes())
