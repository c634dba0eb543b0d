"""Broken input of every kind is answered, or refused in one line; what it may cost is bounded."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.properties.folder import folder
from tests.properties.invalid import KINDS, asked, refuses, written


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), phases=(Phase.reuse, Phase.generate))
@given(case=st.integers(0, 2**48))
def test_whatever_is_broken_is_refused_in_one_line(case: int):
    refuses(case)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_broken_was_whole(kind: str):
    """Else nothing behind the first refusal would be tried."""
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
