"""DeepEP's events: no call waits, but listeners see the order of streams."""

from collections.abc import Callable
from typing import Self

import torch


class EventHandle:
    """An event on the current stream."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def current_stream_wait(self) -> None:
        """Make the current stream wait for the event."""
        self._event.wait()


class EventOverlap:
    """An event returned by a buffer's call; ``extra_tensors`` live as long as it."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[torch.Tensor, ...] | None = None) -> None:
        self.event, self.extra_tensors = event, extra_tensors
        self._releases = False
        self._afterwards: Callable[[], object] | None = None

    def current_stream_wait(self, release_handle: bool = False) -> None:  # noqa: FBT001, FBT002  DeepEP's own order
        """Make the current stream wait."""
        if self.event is None:
            raise AssertionError("the call that returned this event was not asynchronous")
        self.event.current_stream_wait()
        afterwards, self._afterwards = self._afterwards, None
        if afterwards is not None:
            afterwards()
        if release_handle:
            self.event = None

    def register_hook_after_wait(self, hook_after_wait: Callable[[], object]) -> None:
        """Call a function after the next wait."""
        self._afterwards = hook_after_wait

    def __call__(self, release_handle: bool = False) -> Self:  # noqa: FBT001, FBT002  DeepEP's own order
        """Set whether the event is dropped at the end of a ``with``."""
        self._releases = release_handle
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the event."""
        if self.event is not None:
            self.current_stream_wait(self._releases)
        self._releases = False
