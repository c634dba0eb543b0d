"""Streams and events of a fake GPU: they have an identity, and no call waits.

torch's CPU module stores the current stream, from which a watcher reads the stream of a request.
"""

from collections.abc import Callable
from itertools import count
from typing import Self

import torch

from zeroplan.verify.fake_cuda import graphs

_STREAMS = 32
_made = count()

listeners: list[Callable[[str, object, object], None]] = []
"""Called at every synchronisation with its name, the waiting or recording stream (None: the current one), and the other side."""


def _notify(event: str, stream: object, other: object) -> None:
    for listener in listeners:
        listener(event, stream, other)


class Stream(torch.cpu.Stream):
    """A stream with CUDA's attributes."""

    stream_id = device_index = cuda_stream = priority = 0
    device_type = 1
    device = torch.device("cuda", 0)

    def __new__(cls, *_: object, **__: object) -> Self:
        """Ignore a real stream's arguments."""
        return super().__new__(cls)

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()
        self.place = next(_made) % _STREAMS
        """The number of the stream: torch reuses 32 of them in turn (``c10/cuda/CUDAStream.cpp``)."""

    def record_event(self, event: "Event | None" = None) -> "Event":  # type: ignore[override]
        """The event, which has already passed."""
        event = Event() if event is None else event
        _notify("record an event", self, event)
        return event

    def wait_stream(self, stream: object) -> None:
        """Notify the listeners; nothing waits."""
        _notify("wait for a stream", self, stream)

    def wait_event(self, event: object) -> None:
        """Notify the listeners; nothing waits."""
        _notify("wait for an event", self, event)

    def synchronize(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """True: all work is done."""
        return True

    def is_capturing(self) -> bool:
        """Whether a graph is being captured."""
        return graphs.is_capturing()


def default_stream() -> Stream:
    """The default stream, which is not among the streams that torch reuses."""
    stream = Stream()
    stream.place = -1
    return stream


class Event(torch.cpu.Event):
    """An event that has passed."""

    def __new__(cls, *_: object, **__: object) -> Self:
        """Ignore a real event's arguments."""
        return super().__new__(cls)

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    def record(self, stream: object = None) -> None:
        """Notify the listeners."""
        _notify("record an event", stream, self)

    def wait(self, stream: object = None) -> None:
        """Notify the listeners; nothing waits."""
        _notify("wait for an event", stream, self)

    def synchronize(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """True: it has passed."""
        return True

    def elapsed_time(self, _: object) -> float:
        """One millisecond: time is not simulated."""
        return 1.0
