"""Broken input of every kind gets an answer or a refusal in one line, within limits of time and memory."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.properties.folder import folder
from tests.properties.invalid import KINDS, asked, refuses, written


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), phases=(Phase.reuse, Phase.generate))
@given(case=st.integers(0, 2**48))
def test_broken_input_gets_an_answer_or_one_line(case: int):
    refuses(case)


@pytest.mark.parametrize("kind", KINDS)
def test_input_is_valid_before_it_is_broken(kind: str):
    """If it were invalid already, zeroplan would refuse it before it reads the broken part."""
    codes = set[object]()
    for number in range(3):
        name, data, command = KINDS[kind](Random(number))  # noqa: S311  nothing secret is drawn
        own = folder(f"whole {kind} {number}")
        path = own / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(written(name, data))
        places = {"FILE": str(path), "FOLDER": str(own), "OUT": str(own / "answer.html")}
        codes.add(asked([places.get(word, word) for word in command]))
    assert codes & {0, 3}


def test_a_traceback_would_be_seen(monkeypatch: pytest.MonkeyPatch):
    def falls(*_: object, **__: object) -> None:
        raise KeyError("a key")

    monkeypatch.setattr("zeroplan.cli.app.app", falls)
    with pytest.raises(KeyError):
        asked(["estimate", "--params", "7e9"])
