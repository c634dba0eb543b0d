"""The server closes connections that send nothing, send half a request, or read no answer. It waits for long computations."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import ExitStack, suppress
from typing import NamedTuple

import pytest

pytest.importorskip("uvicorn")

import uvicorn

from zeroplan.cli.explore import _listening
from zeroplan.explore import connection

PATIENCE_S, FOREVER_S = 0.5, 60.0
_Send = Callable[[MutableMapping[str, object]], Awaitable[None]]
WHOLE, HALF = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", b"GET / HTTP/1.1\r\nHost: "


async def answers(scope: MutableMapping[str, object], _receive: object, send: _Send) -> None:
    """After a while, to ``/slow``; to ``/large`` more than the kernel takes for somebody who does not read."""
    await asyncio.sleep(4 * PATIENCE_S if scope["path"] == "/slow" else 0)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(64 if scope["path"] == "/large" else 1):
        await send(
            {"type": "http.response.body", "body": b"x" * 2**20 if scope["path"] == "/large" else b"x", "more_body": True}
        )
    await send({"type": "http.response.body", "body": b"", "more_body": False})


class Served(NamedTuple):
    """The client's end of a connection, and the server."""

    socket: socket.socket
    server: uvicorn.Server

    def until_left(self) -> None:
        """Wait until the server has no connection."""
        until = time.monotonic() + FOREVER_S
        while self.server.server_state.connections and time.monotonic() < until:
            time.sleep(0.01)


Serve = Callable[[bytes], Served]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Send something first and then start to serve with short timeouts, so that no test depends on timing."""
    monkeypatch.setattr(connection, "PATIENCE_S", PATIENCE_S)
    with ExitStack() as stack:

        def begin(sent: bytes) -> Served:
            listening = stack.enter_context(_listening(0))
            sender = stack.enter_context(socket.create_connection(listening.getsockname(), timeout=FOREVER_S))
            sender.sendall(sent)
            config = uvicorn.Config(
                answers, log_level="warning", lifespan="off", http=connection.TimedConnection, timeout_keep_alive=600
            )
            server = uvicorn.Server(config)
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
            thread.start()
            stack.callback(thread.join, timeout=FOREVER_S)
            stack.callback(setattr, server, "should_exit", True)
            return Served(sender, server)

        yield begin


def read_to_the_end(sender: socket.socket) -> bytes:
    """Return the bytes that arrive until the other side closes in any way."""
    parts: list[bytes] = []
    with suppress(ConnectionError):
        while part := sender.recv(2**20):
            parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("sent", [b"", HALF, WHOLE, WHOLE + HALF], ids=["nothing", "half", "whole", "whole and half"])
def test_who_sends_no_request_is_left(serve: Serve, sent: bytes):
    assert read_to_the_end(serve(sent).socket).startswith(b"HTTP/1.1 200" if WHOLE in sent else b"")


def test_who_sends_a_sign_now_and_then_is_left(serve: Serve):
    sender, until = serve(HALF).socket, time.monotonic() + FOREVER_S
    with suppress(ConnectionError):
        while time.monotonic() < until:
            sender.sendall(b"x")
            time.sleep(PATIENCE_S / 4)
    assert time.monotonic() < until


def test_who_takes_no_answer_is_left(serve: Serve):
    served = serve(WHOLE.replace(b"/ ", b"/large "))
    assert served.socket.recv(1) == b"H"
    served.until_left()
    assert len(read_to_the_end(served.socket)) < 64 * 2**20


def test_who_waits_for_an_answer_gets_it(serve: Serve):
    assert read_to_the_end(serve(WHOLE.replace(b"/ ", b"/slow ")).socket).startswith(b"HTTP/1.1 200")
