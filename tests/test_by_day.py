"""Checks the case ids in ``by_day.toml``: a renamed case would otherwise run only at night, unnoticed."""

import pytest

from tests.combined import CASES_WITHOUT_A_TEST


def test_every_case_that_is_named_is_one_of_a_test(pytestconfig: pytest.Config):
    """Needs a run of the whole suite, which collects every case."""
    if pytestconfig.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        pytest.skip("only a whole collection has every case")

    assert pytestconfig.stash[CASES_WITHOUT_A_TEST] == []
