"""The kept answers on other people's runs are today's."""

import pytest

from tests.on_gpus import others

FOUND = others.kept()


@pytest.mark.parametrize("index", range(len(FOUND.rows)), ids=[row["what"] for row in FOUND.rows])
def test_the_kept_answer_is_todays(index: int):
    row = FOUND.rows[index]
    assert others.predicted(row, FOUND.sources[row["source"]][0]) == pytest.approx(row["predicted"], abs=0.006)
