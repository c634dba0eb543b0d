"""What holds for every job, asked of random ones: every check of :mod:`tests.properties.checks`, some hundred jobs each."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests import strategies
from tests.properties.checks import CHECKS, Refused
from tests.properties.nightly import drawn, held
from zeroplan import estimate
from zeroplan.errors import SpecError

#: A check that takes longer is asked less often.
ASKED = {"can-be-said": 100, "is-explained": 150, "reads-back": 300}
whatever = list(HealthCheck)
#: A case is a number, which has nothing to make smaller: ``python -m tests.properties.nightly --case`` repeats it.
WITHOUT_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)


@pytest.mark.parametrize("name", CHECKS)
def test_it_holds(name: str):
    asked = list[bool]()

    @settings(max_examples=ASKED.get(name, 200), deadline=None, suppress_health_check=whatever, phases=WITHOUT_SHRINKING)
    @given(case=st.integers(0, 2**48))
    def holds(case: int) -> None:
        try:
            CHECKS[name](strategies.job(drawn(case)), drawn(case))
        except Refused:
            asked.append(False)
        else:
            asked.append(True)

    holds()
    assert sum(asked) >= len(asked) // 20


def test_most_random_jobs_are_answered():
    """A strategy whose jobs are refused would ask nothing."""
    refused = 0
    for seed in range(200):
        try:
            estimate(strategies.job(drawn(seed)))
        except SpecError:
            refused += 1
    assert refused < 6


def test_a_failing_case_is_told_as_a_command(monkeypatch: pytest.MonkeyPatch):
    def fails(*_: object) -> None:
        raise AssertionError("too much")

    monkeypatch.setitem(CHECKS, "adds-up", fails)
    told = held(7)
    assert told is not None
    assert "python -m tests.properties.nightly --case 7 --check adds-up" in told
    assert "too much" in told


def test_a_case_names_the_same_job_for_good():
    assert strategies.job(drawn(11)) == strategies.job(drawn(11)) != strategies.job(drawn(12))
