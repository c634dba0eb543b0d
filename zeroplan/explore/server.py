"""Serves the page on the loopback interface, and limits the source, size and rate of requests.

The server sends nothing to other machines, and other websites cannot use it: requests must name this host and come from this
page. It has no state; an answer depends only on the request's address.
"""

import threading
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from functools import lru_cache
from importlib.resources import files

from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

from zeroplan.errors import ZeroplanError
from zeroplan.explore.answers import MESSAGE, controls_payload, text_of
from zeroplan.explore.controls import controls
from zeroplan.explore.downloads import PICTURES, picture_of, report_of
from zeroplan.explore.opened import LARGEST_BYTES, Opening
from zeroplan.explore.planning import ASKED, planned_payload
from zeroplan.explore.questions import ANSWERS, Said, answered, once

_Scope = MutableMapping[str, object]
_Receive = Callable[[], Awaitable[MutableMapping[str, object]]]
_Send = Callable[[MutableMapping[str, object]], Awaitable[None]]
_Question = Callable[[Request], Awaitable[Response]]
_App = Callable[[_Scope, _Receive, _Send], Awaitable[None]]

LONGEST_QUERY = 8000
"""The largest query string, which may contain a config.json. [bytes]"""
_LONGEST_HEADERS = 8000
_PER_SECOND, _AT_ONCE = 1000.0, 2000.0
_PLANS_PER_SECOND, _PLANS_AT_ONCE, _TURN_S = 2.0, 20.0, 10.0
_PAGE = {"/": ("index.html", "text/html"), "/page.js": ("page.js", "text/javascript"), "/page.css": ("page.css", "text/css")}
_FILES = "/api/opened"
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
}  # fmt: skip


def explore_app(run: bytes | None = None) -> _App:
    """Return the guarded application; ``run``: the page of a saved dry run, served as ``/run``."""
    app = FastAPI(title="zeroplan", docs_url=None, redoc_url=None, openapi_url="/openapi.json")
    for path, (name, media_type) in _PAGE.items():
        app.add_api_route(path, _file(name, media_type), methods=["GET"], include_in_schema=False)
    if run is not None:
        page = Response(run, media_type="text/html")
        app.add_api_route("/run", lambda: page, methods=["GET"], include_in_schema=False)
    app.add_api_route("/api/controls", _controls, methods=["GET"], responses=_GUARDED)
    plan = Planning(
        planned_payload
    ).__call__  # a method, since older releases do not see that an object is awaitable when called
    questions: dict[str, _Question] = {**{name: _question(name) for name in ANSWERS}, "plan": plan}
    for name, question in questions.items():
        app.add_api_route(
            f"/api/{name}", question, methods=["GET"], name=name, responses=_REFUSED, openapi_extra=_parameters_of(name)
        )
    for name, (handed_out, media_type) in {"report": (_report, "text/html"), "picture": (_picture, "image/svg+xml")}.items():
        file: dict[int | str, dict[str, object]] = {200: {"content": {media_type: {"schema": {"type": "string"}}}}}
        app.add_api_route(
            f"/api/{name}", handed_out, methods=["GET"], name=name, response_class=Response, responses={**_REFUSED, **file},
            openapi_extra=_parameters_of(name),
        )  # fmt: skip
    app.add_api_route(
        _FILES, Opening().__call__, methods=["POST"], name="opened", responses=_REFUSED, openapi_extra=_of_a_file()
    )
    return Guarded(app)


_GUARDED: dict[int | str, dict[str, object]] = {
    403: {"description": "Another site asks."},
    413: {"description": "The question has a body."},
    414: {"description": "The address is too long."},
    421: {"description": "The request names another host."},
    431: {"description": "The headers are too long."},
    429: {"description": "Too many questions at once; `error` has one line about it."},
}
_REFUSED: dict[int | str, dict[str, object]] = {
    **_GUARDED,
    422: {"description": "The description is not a valid job; `error` has the reason in one line."},
}


def _parameters_of(question: str) -> dict[str, object]:
    """Return the OpenAPI parameters of a request: the controls, and further fields for plans and pictures."""
    said = [(control.name, control.label, control.choices) for control in controls() if control.name not in ("model", "set")]
    said += [("model", "Model", ()), ("set", "Options of the engine", ())]
    said += [(name, label, ()) for name, (label, _) in ASKED.items()] if question == "plan" else []
    said += [(MESSAGE, "torch's message, from 'CUDA out of memory' on", ())] if question == "message" else []
    said += [("picture", "Which picture", tuple(PICTURES))] if question == "picture" else []
    return {"parameters": [_parameter(*one) for one in said]}


def _parameter(name: str, label: str, choices: tuple[str, ...]) -> dict[str, object]:
    schema: dict[str, object] = {"type": "string", **({"enum": list(choices)} if choices else {})}
    return {"name": name, "in": "query", "description": label, "required": False, "schema": schema}


def _of_a_file() -> dict[str, object]:
    """Return the OpenAPI parameters and body of a request with a file."""
    return {
        "parameters": [
            {"name": "name", "in": "query", "description": "The file's name", "required": False, "schema": {"type": "string"}}
        ],
        "requestBody": {
            "required": True,
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        },
    }


def _file(name: str, media_type: str) -> Callable[[], Response]:
    content = (files("zeroplan.explore") / "page" / name).read_bytes()
    return lambda: Response(content, media_type=media_type)


async def _controls() -> Response:
    return Response(text_of(controls_payload()), media_type=_JSON)


def _question(what: str) -> _Question:
    """Return the route of a question; one that takes tenths of a second is answered in a thread, so that others need not wait."""

    async def ask(request: Request) -> Response:
        return await run_in_threadpool(_answered, what, request) if what in _SLOW else _answered(what, request)

    return ask


_SLOW = ("changes", "scaling", "longest", "message")


async def _report(request: Request) -> Response:
    return await _handed_out(request, report_of, "text/html", "zeroplan-report.html")


async def _picture(request: Request) -> Response:
    return await _handed_out(request, picture_of, "image/svg+xml", f"zeroplan-{request.query_params.get('picture')}.svg")


async def _handed_out(request: Request, make: Callable[[Mapping[str, str]], bytes], media_type: str, name: str) -> Response:
    """Return a file to download; it is made in a thread, since it takes a second."""
    try:
        content = await run_in_threadpool(make, dict(_asked(request)))
    except ZeroplanError as error:
        return JSONResponse({"error": str(error)}, status_code=422)
    return Response(content, media_type=media_type, headers={"content-disposition": f'attachment; filename="{name}"'})


class Planning:
    """Answers one plan at a time in a thread, since a plan takes seconds, at a limited rate.

    It caches answers. A request that would wait too long is refused.
    """

    def __init__(
        self, planned: Callable[[Mapping[str, str]], dict[str, object]], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._planned = lru_cache(maxsize=64)(lambda said: text_of(planned(dict(said))))
        self._bucket, self._one = Bucket(_PLANS_PER_SECOND, _PLANS_AT_ONCE, clock), threading.Lock()

    async def __call__(self, request: Request) -> Response:
        """Answer one question."""
        if not self._bucket.gives():
            return JSONResponse({"error": "too many plans at once; wait a moment"}, status_code=429)
        try:
            return Response(await run_in_threadpool(self._one_at_a_time, _asked(request)), media_type=_JSON)
        except ZeroplanError as error:
            return JSONResponse({"error": str(error)}, status_code=422)
        except TimeoutError:
            return JSONResponse({"error": "another plan is being made; wait a moment"}, status_code=429)

    def _one_at_a_time(self, said: Said) -> bytes:
        if not self._one.acquire(timeout=_TURN_S):
            raise TimeoutError
        try:
            return self._planned(said)
        finally:
            self._one.release()


def _asked(request: Request) -> Said:
    """Return the fields of a question, sorted; raises SpecError for one that is there twice."""
    return once(request.query_params.multi_items())


def _answered(what: str, request: Request) -> Response:
    status, content = answered(what, request.query_params.multi_items())
    return Response(content, status_code=status, media_type=_JSON)


_JSON = "application/json"


class Guarded:
    """Accepts only requests of this page on this machine, at a limited rate, and sets security headers on every answer."""

    def __init__(self, app: _App, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._app, self._bucket = app, Bucket(_PER_SECOND, _AT_ONCE, clock)

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
        if sum(map(len, headers.values())) > _LONGEST_HEADERS:
            return 431, f"the headers are longer than {_LONGEST_HEADERS} bytes"
        if "transfer-encoding" in headers or int(headers.get("content-length", "0") or 0) > _longest_body(scope):
            return 413, "a question has no body, and a file no more than its limit"
        return None if self._bucket.gives() else (429, "too many questions at once; wait a moment")


def _longest_body(scope: _Scope) -> int:
    """Return the largest allowed body of a request. [bytes]"""
    return LARGEST_BYTES if scope.get("path") == _FILES and scope.get("method") == "POST" else 0


class Bucket:
    """A token bucket: a burst, and a rate per second."""

    def __init__(self, per_second: float, at_once: float, clock: Callable[[], float]) -> None:
        self._per_second, self._at_once, self._clock = per_second, at_once, clock
        self._left, self._at = at_once, clock()

    def gives(self) -> bool:
        """Take a token, and return whether there was one."""
        now = self._clock()
        self._left = min(self._at_once, self._left + (now - self._at) * self._per_second)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def _name_of(host: str) -> str:
    """Return a host without its port."""
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host
