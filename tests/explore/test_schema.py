"""Every request of the server's own OpenAPI description gets an answer as described, and never an internal error."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from zeroplan.explore.questions import ANSWERS

schemathesis = pytest.importorskip("schemathesis")
CHECKS = [getattr(schemathesis.checks, name) for name in (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance",
)]  # fmt: skip
A_JOB = {"model": "gpt2", "seq_len": "128", "gpus": "4", "gpu": "l4-24gb", "lora_rank": ""}
A_MESSAGE = (
    "CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of 22.00 GiB of which 1.02 GiB is free. Of the "
    "allocated memory 18.10 GiB is allocated by PyTorch, and 1.90 GiB is reserved by PyTorch but unallocated."
)
PICTURE = {"/api/picture": {"picture": "stages"}, "/api/message": {"message": A_MESSAGE}}
QUESTIONS = tuple(f"/api/{name}" for name in ("controls", *ANSWERS, "plan", "report", "picture"))
_QUICK = ("/api/controls", "/api/answer", "/api/step", "/api/changes")
FILES = "/api/opened"


def test_no_file_is_too_odd(port: int):
    described = schemathesis.openapi.from_url(f"http://127.0.0.1:{port}/openapi.json")

    @settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(described[FILES]["POST"].as_strategy())
    def ask(case: Any) -> None:
        assert case.call_and_validate(checks=CHECKS).status_code == 422

    ask()


@pytest.mark.parametrize("path", QUESTIONS)
def test_no_question_is_too_odd(port: int, path: str):
    described = schemathesis.openapi.from_url(f"http://127.0.0.1:{port}/openapi.json")
    asked: list[int] = []

    examples = {
        "/api/plan": 20,
        "/api/scaling": 10,
        "/api/report": 10,
        "/api/picture": 10,
        "/api/message": 6,
        "/api/longest": 10,
    }.get(path, 40)

    @settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(described[path]["GET"].as_strategy())
    def ask(case: Any) -> None:
        if path != "/api/controls" and len(asked) % 2:  # what it makes up is rarely a model's name
            case.query = {**dict(list((case.query or {}).items())[:1]), **A_JOB, **PICTURE.get(path, {})}
        asked.append(case.call_and_validate(checks=CHECKS).status_code)

    ask()
    assert set(described) == {*QUESTIONS, FILES}
    assert set(asked) == ({200} if path == "/api/controls" else {200, 422})
