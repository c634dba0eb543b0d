"""How far is a search? It reports to whoever listens, such as a command on a terminal; without a listener nothing happens."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

_Item = TypeVar("_Item")

Listener = Callable[[int, int], None]
"""Gets how many structures a search has evaluated, and of how many."""

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def progress_reported_to(listener: Listener) -> Iterator[None]:
    """Report the searches within this block to a listener."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def counted(items: Sequence[_Item]) -> Iterator[_Item]:
    """Yield the items, and report before each how many are done.

    >>> seen = []
    >>> with progress_reported_to(lambda done, of: seen.append((done, of))):
    ...     found = list(counted("ab"))
    >>> found, seen
    (['a', 'b'], [(0, 2), (1, 2)])
    """
    listener = _listener.get()
    for done, item in enumerate(items):
        if listener is not None:
            listener(done, len(items))
        yield item
