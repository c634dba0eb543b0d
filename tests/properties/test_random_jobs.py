"""What holds for every job, asked of random ones: every check of :mod:`tests.properties.checks` of some hundred jobs.

All checks are asked of one job after the other, as in the night, since they share its estimate.
"""

from __future__ import annotations

import pytest

from tests import strategies
from tests.properties.checks import CHECKS
from tests.properties.nightly import INVALID, Night, drawn, failures, held, told
from tests.properties.tally import MOST_REASONS, Tally

#: Cases of a test, of which there are several, so that processes share them out.
CASES = 50


@pytest.mark.parametrize("first", range(0, 4 * CASES, CASES))
def test_they_hold(first: int):
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


def test_a_check_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch):
    def goes_on(*_: object) -> None:
        while True:
            pass

    monkeypatch.setitem(CHECKS, "adds-up", goes_on)
    monkeypatch.setattr("tests.properties.nightly.MOST_CPU", 0.1)
    assert "TooLong" in str(held(7, ("adds-up",)))


def test_what_is_counted_is_the_same_for_every_job_and_does_not_grow():
    one, other = Tally(), Tally()
    one.reason("refused", "tp=4 does not divide 1,234 heads")
    other.reason("refused", "tp=8 does not divide 7 heads")
    one.add(other)
    assert one.sections["refused"] == {"tp=N does not divide N heads": 2}
    for number in range(2 * MOST_REASONS):
        one.count("names", "x" * number)
    assert len(one.sections["names"]) == MOST_REASONS + 1
    assert sum(one.sections["names"].values()) == 2 * MOST_REASONS


def test_a_case_names_the_same_job_for_good():
    assert strategies.job(drawn(11)) == strategies.job(drawn(11)) != strategies.job(drawn(12))


def test_a_night_counts_what_its_processes_asked(capsys: pytest.CaptureFixture[str]):
    night = Night(0, 8, 60.0)
    night.names = ["stages-agree-on-one-rank", INVALID]
    night.run(1)
    night.say()
    assert night.undone == 8
    assert night.tally.sections["cases"]["drawn"] == 8
    assert night.tally.sections["held"][INVALID] == 8
    assert "8 cases" in capsys.readouterr().out
