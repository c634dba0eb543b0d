"""An HTTP connection that closes when idle. uvicorn itself waits for the first request for ever."""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

PATIENCE_S = 10.0
"""The time limit for receiving a request, from the start of the connection or the last answer. [s]"""


class TimedConnection(H11Protocol):
    """uvicorn's HTTP protocol, with a limit of ``PATIENCE_S`` to receive a request and for the client to read the answer.

    The computation of an answer has no limit.
    """

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Start the limit for a request."""
        super().connection_made(transport)
        self._wait()

    def on_response_complete(self) -> None:
        """Start the limit for the next request."""
        super().on_response_complete()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the limit."""
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(PATIENCE_S, self._close_idle)

    def _close_idle(self) -> None:
        computing = bool(self.cycle) and not self.cycle.response_complete  # no cycle before the first request
        if computing and not self.transport.get_write_buffer_size():
            self._wait()
        else:
            self.transport.abort()
