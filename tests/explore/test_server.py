"""The server accepts only this machine and this page, limits requests, and never fails with an error of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from tests.cli.command import running
from zeroplan.explore.opened import LARGEST_BYTES
from zeroplan.explore.server import LONGEST_QUERY, Guarded, Planning, explore_app


class Answer(NamedTuple):
    status: int
    body: bytes
    headers: dict[str, str]


def ask(port: int, path: str, method: str = "GET", body: bytes | None = None, headers: dict[str, str] | None = None) -> Answer:
    with contextlib.closing(HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request(method, path, body=body, headers=headers or {})
        response = connection.getresponse()
        return Answer(response.status, response.read(), {name.lower(): value for name, value in response.getheaders()})


@pytest.mark.parametrize(("path", "begins"), [
    ("/", b"<!doctype html>"), ("/page.js", b'"use strict"'), ("/page.css", b":root"), ("/api/controls", b'{"schema_version"'),
    ("/api/answer?model=gpt2&gpus=4", b'{"schema_version"'), ("/api/changes?model=gpt2", b'{"schema_version"'),
    ("/api/plan?model=gpt2&gpu=l4-24gb&gpus=2&seq_len=256", b'{"schema_version"'), ("/openapi.json", b"{"),
    ("/api/report?model=gpt2", b"<!doctype html>"), ("/api/picture?picture=stages&model=gpt2", b"<?xml"),
])  # fmt: skip
def test_what_there_is(port: int, path: str, begins: bytes):
    status, body, headers = ask(port, path)
    assert (status, body[: len(begins)]) == (200, begins)
    assert "default-src 'none'" in headers["content-security-policy"]
    assert headers["cache-control"] == "no-store"


@pytest.mark.parametrize(("path", "headers", "status"), [
    ("/", {"Host": "example.com"}, 421), ("/", {"Host": "127.0.0.1.example.com:80"}, 421),
    ("/", {"Origin": "http://example.com"}, 403), ("/", {"Origin": "null"}, 403),
    ("/api/answer?model=gpt2", {"Sec-Fetch-Site": "cross-site"}, 403),
    ("/api/answer?model=" + "x" * LONGEST_QUERY, {}, 414), ("/nothing", {}, 404), ("/../../etc/passwd", {}, 404),
    ("/api/answer?model=nobody", {}, 422), ("/api/plan?model=nobody&gpu=l4-24gb", {}, 422), ("/api/plan?model=gpt2", {}, 422),
    ("/api/plan?model=gpt2&gpu=l4-24gb&objective=cost", {}, 422), ("/api/plan?model=gpt2&colour=red", {}, 422),
    ("/api/answer?model=" + "x" * 300, {}, 422), ("/api/picture?model=gpt2", {}, 422), ("/api/report?model=nobody", {}, 422),
])  # fmt: skip
def test_what_there_is_not_and_for_whom(port: int, path: str, headers: dict[str, str], status: int):
    found, body, _ = ask(port, path, headers=headers)
    assert found == status
    assert isinstance(json.loads(body), dict)


def test_what_is_saved_is_what_the_command_line_writes(port: int, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    run = running(capsys)
    job = ("--model", "gpt2", "--gpus", "2", "--seq-len", "128", "--gpu", "l4-24gb")
    query = "model=gpt2&gpus=2&seq_len=128&gpu=l4-24gb"
    report = ask(port, f"/api/report?{query}").body.decode()
    told = json.loads(report.partition('id="told">')[2].partition("</script>")[0])
    assert told["answers"]["3"]["answer"]["command"] == "zeroplan estimate --model gpt2 --gpu l4-24gb --gpus 2 --seq-len 128"
    for picture in ("stages", "timeline"):
        assert run("plot", picture, *job, "-o", str(tmp_path / f"{picture}.svg"))[0] == 0
        status, body, headers = ask(port, f"/api/picture?picture={picture}&{query}")
        assert (status, headers["content-type"]) == (200, "image/svg+xml")
        assert headers["content-disposition"].startswith("attachment;")
        assert body == (tmp_path / f"{picture}.svg").read_bytes()


def test_nothing_can_be_sent(port: int):
    assert ask(port, "/api/answer", method="POST")[0] == 405
    assert ask(port, "/api/answer", method="POST", body=b"model=gpt2")[0] == 413


def test_a_file_is_opened_and_no_other_body(port: int):
    found = ask(port, "/api/opened?name=../s.json", method="POST", body=b'{"traceEvents":[]}')
    assert (found.status, json.loads(found.body)["error"].partition(" is ")[0]) == (422, "file 's.json'")
    too_long = {"Content-Length": str(LARGEST_BYTES + 1)}
    assert ask(port, "/api/opened", method="POST", headers=too_long)[0] == 413
    assert ask(port, "/api/opened", method="POST", body=b"{}", headers={"Origin": "http://example.com"})[0] == 403
    assert ask(port, "/api/opened?name=x", method="GET")[0] == 405


def test_eight_at_once_are_answered(port: int):
    paths = [f"/api/answer?model=gpt2&gpus={2**at}&seq_len=128" for at in range(8)] * 5
    with ThreadPoolExecutor(8) as pool:
        assert {status for status, _, _ in pool.map(lambda path: ask(port, path), paths)} == {200}


def asked(app: Any, query: bytes) -> int:
    """Call the application without a network; return the status."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {
        "type": "http", "method": "GET", "path": "/api/answer", "raw_path": b"/api/answer", "query_string": query, "scheme": "http",
        "headers": [(b"host", b"127.0.0.1:1")], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 1), "root_path": "",
        "http_version": "1.1", "extensions": {},
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    status: int = sent[0]["status"]
    return status


APP = explore_app()


def test_a_field_that_is_there_twice_is_refused_in_one_line(port: int):
    for path in ("answer", "step", "changes", "plan", "report", "picture"):
        status, body, _ = ask(port, f"/api/{path}?model=gpt2&gpus=2&model=gpt2-xl")
        assert (status, json.loads(body)) == (422, {"error": "'model' is there twice; keep one"})


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60) | st.text("modelgpus=&%0123456789e+-. ", max_size=60).map(str.encode))
def test_whatever_is_asked_is_answered_or_refused(query: bytes):
    assert asked(APP, query) in (200, 422)


def test_too_many_requests_at_once_wait_and_are_answered_later():
    now = [0.0]

    async def nothing(_scope: object, _receive: object, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    app = Guarded(nothing, clock=lambda: now[0])  # type: ignore[arg-type]
    answers = [asked(app, b"") for _ in range(2001)]
    assert answers == [200] * 2000 + [429]
    now[0] += 0.001
    assert [asked(app, b"") for _ in range(2)] == [200, 429]


def request_for(**said: str) -> Any:
    from fastapi import Request

    query = "&".join(f"{name}={value}" for name, value in said.items()).encode()
    return Request({"type": "http", "method": "GET", "path": "/api/plan", "query_string": query, "headers": []})


def test_a_plan_takes_its_time_beside_the_other_answers():
    done = threading.Event()

    def planned(_said: object) -> dict[str, object]:
        return {"the loop went on": done.wait(timeout=10)}

    async def both() -> Any:
        asking = asyncio.create_task(Planning(planned)(request_for()))
        await asyncio.sleep(0.05)
        done.set()
        return await asking

    assert json.loads(asyncio.run(both()).body) == {"the loop went on": True}


def test_plans_are_so_many_per_minute_and_one_that_was_made_is_not_made_again():
    now, made = [0.0], []

    def planned(said: Any) -> dict[str, object]:
        made.append(dict(said))
        return {}

    planning = Planning(planned, clock=lambda: now[0])
    answers = [asyncio.run(planning(request_for(gpus=str(at % 3)))).status_code for at in range(21)]
    assert answers == [200] * 20 + [429]
    assert len(made) == 3
    now[0] += 0.5
    assert [asyncio.run(planning(request_for())).status_code for _ in range(2)] == [200, 429]
