"""Streams, events and graphs of a GPU that is not there: they have names and order, and nothing waits.

The CPU module of torch remembers which stream was chosen, which is how a watcher tells streams apart.
"""

from collections.abc import Callable
from typing import Self

import torch

listeners: list[Callable[[str, object, object], None]] = []
"""Called with every word between streams: what it is, the stream that hears it (None for the current one), and what it is about."""


def _say(word: str, stream: object, other: object) -> None:
    for listener in listeners:
        listener(word, stream, other)


class Stream(torch.cpu.Stream):
    """A stream with CUDA's attributes."""

    stream_id = device_index = cuda_stream = priority = 0
    device_type = 1
    device = torch.device("cuda", 0)

    def __new__(cls, *_: object, **__: object) -> Self:
        """Leave out what a real stream is made of: a device and a priority."""
        return super().__new__(cls)

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    def record_event(self, event: "Event | None" = None) -> "Event":  # type: ignore[override]
        """Return the event, which has passed already."""
        event = Event() if event is None else event
        _say("record an event", self, event)
        return event

    def wait_stream(self, stream: object) -> None:
        """Nothing to wait for."""
        _say("wait for a stream", self, stream)

    def wait_event(self, event: object) -> None:
        """Nothing to wait for."""
        _say("wait for an event", self, event)

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Whether all work is done: always."""
        return True

    def is_capturing(self) -> bool:
        """Whether a graph is recorded: never."""
        return False


class Event(torch.cpu.Event):
    """An event that has passed."""

    def __new__(cls, *_: object, **__: object) -> Self:
        """Leave out what a real event is made of."""
        return super().__new__(cls)

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    def record(self, stream: object = None) -> None:
        """Nothing to record."""
        _say("record an event", stream, self)

    def wait(self, stream: object = None) -> None:
        """Nothing to wait for."""
        _say("wait for an event", stream, self)

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Whether it has passed: always."""
        return True

    def elapsed_time(self, _: object) -> float:
        """A millisecond, whatever lies between: time is not simulated."""
        return 1.0


class Graph:
    """A CUDA graph. Capturing runs the code once, so its memory is what the capture leaves; replaying does nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        """Take what a real one is made of, and use none of it."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


class Captured:
    """``torch.cuda.graph``: the code inside runs as it is."""

    def __init__(self, *_: object, **__: object) -> None:
        """Take the graph and its pool, and use neither."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to end."""
