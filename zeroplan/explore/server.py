"""The page on the loopback: what it may be asked, by whom, and how much of it at a time.

Nothing leaves this machine, and nothing of another site gets in: requests must name this host and come from this page. No state
is kept; every answer follows from its address.
"""

import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from functools import lru_cache
from importlib.resources import files
from typing import Annotated

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse

from zeroplan.errors import ZeroplanError
from zeroplan.explore.answers import answer_payload, changes_payload, controls_payload

_Scope = MutableMapping[str, object]
_Receive = Callable[[], Awaitable[MutableMapping[str, object]]]
_Send = Callable[[MutableMapping[str, object]], Awaitable[None]]
_App = Callable[[_Scope, _Receive, _Send], Awaitable[None]]

LONGEST_QUERY = 2000
"""Bytes of an address behind the question mark."""
_PER_SECOND, _AT_ONCE = 1000.0, 2000.0
_PAGE = {"/": ("index.html", "text/html"), "/page.js": ("page.js", "text/javascript"), "/page.css": ("page.css", "text/css")}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
}  # fmt: skip
_Text = Annotated[str, Query(max_length=200)]


def explore_app() -> _App:
    """The application, with its guards around it."""
    app = FastAPI(title="zeroplan", docs_url=None, redoc_url=None, openapi_url="/openapi.json")
    for path, (name, media_type) in _PAGE.items():
        app.add_api_route(path, _file(name, media_type), methods=["GET"], include_in_schema=False)
    app.add_api_route("/api/controls", _controls, methods=["GET"])
    app.add_api_route("/api/answer", _answer, methods=["GET"], responses=_REFUSED)
    app.add_api_route("/api/changes", _changes, methods=["GET"], responses=_REFUSED)
    return Guarded(app)


_REFUSED: dict[int | str, dict[str, object]] = {
    422: {"description": "What is described is no job; `error` says why in one line."}
}


def _file(name: str, media_type: str) -> Callable[[], Response]:
    content = (files("zeroplan.explore") / "page" / name).read_bytes()
    return lambda: Response(content, media_type=media_type)


async def _controls() -> Response:
    return _json(controls_payload())


async def _answer(request: Request, model: _Text = "", gpus: _Text = "") -> Response:  # noqa: ARG001  named for the schema; all are in the query
    return _answered("answer", request)


async def _changes(request: Request, model: _Text = "", gpus: _Text = "") -> Response:  # noqa: ARG001  as above
    return _answered("changes", request)


def _answered(what: str, request: Request) -> Response:
    try:
        return Response(_said(what, tuple(sorted(request.query_params.items()))), media_type=_JSON)
    except ZeroplanError as error:
        return JSONResponse({"error": str(error)}, status_code=422)


@lru_cache(maxsize=512)
def _said(what: str, said: tuple[tuple[str, str], ...]) -> bytes:
    """An answer as it goes out; the same question, as when somebody moves a slider to and fro, is answered once."""
    return _text(_ANSWERS[what](dict(said)))


_ANSWERS = {"answer": answer_payload, "changes": changes_payload}
_JSON = "application/json"


def _json(data: dict[str, object]) -> Response:
    return Response(_text(data), media_type=_JSON)


def _text(data: dict[str, object]) -> bytes:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()


class Guarded:
    """Lets in what this page asks on this machine, so much of it per second, and says of every answer how it may be used."""

    def __init__(self, app: _App, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._app, self._clock = app, clock
        self._left, self._at = _AT_ONCE, clock()

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refused = self._refusal(scope)

        async def with_headers(message: MutableMapping[str, object]) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *own]  # type: ignore[misc]  # a list of pairs
            await send(message)

        if refused is None:
            await self._app(scope, receive, with_headers)
        else:
            code, why = refused
            await JSONResponse({"error": why}, status_code=code)(scope, receive, with_headers)

    def _refusal(self, scope: _Scope) -> tuple[int, str] | None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}  # type: ignore[attr-defined]
        host = headers.get("host", "")
        if _name_of(host) not in _LOOPBACK:
            return 421, "this page answers under 127.0.0.1 and localhost alone"
        origin = headers.get("origin")
        if (origin is not None and origin != f"http://{host}") or headers.get("sec-fetch-site") == "cross-site":
            return 403, "this page answers itself alone"
        if len(scope.get("query_string", b"")) > LONGEST_QUERY:  # type: ignore[arg-type]  # bytes
            return 414, f"the address is longer than {LONGEST_QUERY} bytes"
        if int(headers.get("content-length", "0") or 0) > 0 or "transfer-encoding" in headers:
            return 413, "a question has no body"
        return None if self._has_room() else (429, "too many questions at once; wait a moment")

    def _has_room(self) -> bool:
        now = self._clock()
        self._left = min(_AT_ONCE, self._left + (now - self._at) * _PER_SECOND)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def _name_of(host: str) -> str:
    """A host without its port."""
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host
