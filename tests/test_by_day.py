"""``by_day.toml`` names cases by their id: one that was renamed would run at night only, and nobody would notice."""

import pytest

from tests.combined import CASES_WITHOUT_A_TEST


def test_every_case_that_is_named_is_one_of_a_test(pytestconfig: pytest.Config):
    """A part of the tests holds its own files against the table; the whole suite holds all of them."""
    if pytestconfig.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        pytest.skip("only a whole collection has every case")

    assert pytestconfig.stash[CASES_WITHOUT_A_TEST] == []
