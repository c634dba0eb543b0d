"""A connection to the page that is closed when nobody uses it: uvicorn itself waits for ever for a first request."""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

PATIENCE_S = 10.0
"""How long a request may take to arrive whole, counted from the connection's beginning or the last answer. [s]"""


class Impatient(H11Protocol):
    """uvicorn's reader of HTTP, which waits ``PATIENCE_S`` for each request, and as long for its answer to be read.

    What is computed for a request may take its time.
    """

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._wait()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing any more."""
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(PATIENCE_S, self._lose_patience)

    def _lose_patience(self) -> None:
        computing = bool(self.cycle) and not self.cycle.response_complete  # no cycle before the first request
        if computing and not self.transport.get_write_buffer_size():
            self._wait()
        else:
            self.transport.abort()
