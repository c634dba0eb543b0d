"""Streams and events of a GPU that is not there: they have names and order, and nothing waits.

The CPU module of torch remembers which stream was chosen, which is how a watcher tells streams apart.
"""

from collections.abc import Callable
from itertools import count
from typing import Self

import torch

from zeroplan.verify.fake_cuda import graphs

_STREAMS = 32
_made = count()

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
        self.place = next(_made) % _STREAMS
        """Which of the device's streams it is: torch hands them out in turn, for ever (``c10/cuda/CUDAStream.cpp``)."""

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
        """Whether a graph is recorded."""
        return graphs.is_capturing()


def default_stream() -> Stream:
    """Return the stream that is none of those torch hands out."""
    stream = Stream()
    stream.place = -1
    return stream


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
