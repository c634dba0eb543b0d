import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroplan.numeric import ceil_div, maximum, minimum, round_up, where

small = st.integers(-(2**40), 2**40)
positive = st.integers(1, 2**20)


@given(a=small, b=positive)
def test_ceil_div_is_the_smallest_integer_not_below_the_quotient(a: int, b: int):
    assert (ceil_div(a, b) - 1) * b < a <= ceil_div(a, b) * b


@given(values=st.lists(small, min_size=1, max_size=5), divisor=positive)
def test_a_column_is_its_points(values: list[int], divisor: int):
    column = np.array(values, dtype=np.int64)
    assert ceil_div(column, divisor).tolist() == [ceil_div(value, divisor) for value in values]
    assert round_up(column, divisor).tolist() == [round_up(value, divisor) for value in values]
    assert maximum(column, divisor, 0).tolist() == [max(value, divisor, 0) for value in values]
    assert minimum(column, divisor).tolist() == [min(value, divisor) for value in values]
    assert where(column > 0, 1, column).tolist() == [where(value > 0, 1, value) for value in values]


def test_scalar_zero_and_column_zero_agree():
    assert ceil_div(0, 3) == 0 == ceil_div(np.array([0]), 3)[0]


def test_a_column_of_one_is_still_a_column():
    assert isinstance(maximum(np.array([1]), 2), np.ndarray)


@pytest.mark.parametrize("condition", [True, False])
def test_where_picks_by_a_plain_condition(condition: bool):
    assert where(condition, "yes", "no") == ("yes" if condition else "no")
