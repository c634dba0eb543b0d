"""On a terminal a slow search shows its progress; a fast search, or a search in a pipe, shows nothing."""

import pytest

from zeroplan.cli import searching
from zeroplan.progress import counted


def search_twice() -> None:
    with searching.shown_if_slow():
        for _ in range(2):
            assert list(counted("abc")) == ["a", "b", "c"]


def test_a_slow_search_shows_how_far_it_is_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(searching, "AFTER_S", 0.0)
    search_twice()
    out, err = capsys.readouterr()
    assert out == ""
    assert "searching" in err
    assert "2/3" in err
    assert err.endswith("\x1b[2K")  # the line is cleared


@pytest.mark.parametrize(("terminal", "after_s"), [(False, 0.0), (True, 2.0)])
def test_nothing_is_shown_in_a_pipe_or_of_a_fast_search(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool, after_s: float
):
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    monkeypatch.setattr(searching, "AFTER_S", after_s)
    search_twice()
    assert capsys.readouterr() == ("", "")
