"""Broken input of every kind is answered, or refused in one line; what it may cost is bounded."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.properties.invalid import asked, refuses


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck), phases=(Phase.reuse, Phase.generate))
@given(case=st.integers(0, 2**48))
def test_whatever_is_broken_is_refused_in_one_line(case: int):
    refuses(case)


def test_a_traceback_would_be_seen(monkeypatch: pytest.MonkeyPatch):
    def falls(*_: object, **__: object) -> None:
        raise KeyError("a key")

    monkeypatch.setattr("zeroplan.cli.app.app", falls)
    with pytest.raises(KeyError):
        asked(["estimate", "--params", "7e9"])
