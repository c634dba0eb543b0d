"""Runs every check of :mod:`tests.properties.checks` on 200 random jobs.

All checks of one job run before the next job, as at night, because they share its estimate.
"""

from __future__ import annotations

import pytest

from tests import strategies
from tests.properties.checks import CHECKS
from tests.properties.nightly import INVALID, Night, drawn, failures, held, told
from tests.properties.tally import MOST_REASONS, Tally

#: Cases of one test. There are four tests, so that several pytest processes share the work.
CASES = 50


@pytest.mark.parametrize("first", range(0, 4 * CASES, CASES))
def test_every_check_holds(first: int):
    tally = Tally()
    failing = [failure for case in range(first, first + CASES) for failure in failures(case, CHECKS, tally)]
    assert not failing, "\n\n".join(map(told, failing))
    held_by, not_asked = tally.sections["held"], tally.sections["not asked"]
    assert set(held_by) == set(CHECKS), "a check that nothing was asked of"
    assert not_asked["adds-up"] <= CASES // 20, "most random jobs are answered; those that are refused ask nothing"


def test_a_failing_case_is_printed_as_a_command(monkeypatch: pytest.MonkeyPatch):
    def fails(*_: object) -> None:
        raise AssertionError("too much")

    monkeypatch.setitem(CHECKS, "adds-up", fails)
    told = held(7)
    assert told is not None
    assert "python -m tests.properties.nightly --case 7 --check adds-up" in told
    assert "too much" in told


def test_an_endless_check_is_stopped(monkeypatch: pytest.MonkeyPatch):
    def goes_on(*_: object) -> None:
        while True:
            pass

    monkeypatch.setitem(CHECKS, "adds-up", goes_on)
    monkeypatch.setattr("tests.properties.nightly.MOST_CPU", 0.1)
    assert "TooLong" in str(held(7, ("adds-up",)))


def test_counts_have_no_numbers_of_jobs_and_a_limited_size():
    one, other = Tally(), Tally()
    one.reason("refused", "tp=4 does not divide 1,234 heads")
    other.reason("refused", "tp=8 does not divide 7 heads")
    one.add(other)
    assert one.sections["refused"] == {"tp=N does not divide N heads": 2}
    for number in range(2 * MOST_REASONS):
        one.count("names", "x" * number)
    assert len(one.sections["names"]) == MOST_REASONS + 1
    assert sum(one.sections["names"].values()) == 2 * MOST_REASONS


def test_a_case_always_draws_the_same_job():
    assert strategies.job(drawn(11)) == strategies.job(drawn(11)) != strategies.job(drawn(12))


def test_a_night_adds_up_the_counts_of_its_processes(capsys: pytest.CaptureFixture[str]):
    night = Night(0, 8, 60.0)
    night.names = ["stages-agree-on-one-rank", INVALID]
    night.run(1)
    night.say()
    assert night.undone == 8
    assert night.tally.sections["cases"]["drawn"] == 8
    assert night.tally.sections["held"][INVALID] == 8
    assert "8 cases" in capsys.readouterr().out
