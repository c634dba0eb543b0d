"""Polynomials through counted bytes: exact, or none. One that covers another is never below it, for any batch."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroplan.spec.profile import Amount
from zeroplan.verify.profiling.polynomials import OF_MORE, OF_ONE, Fit, Shape, covers, padded, value

SHAPES = [Shape(count, length) for count in (2, 3) for length in (128, 256, 640)]
coefficients = st.integers(-3000, 3000)
amounts = st.builds(
    Amount, constant=coefficients, micro_batch=coefficients, seq_len=coefficients, tokens=coefficients,
    seq_len_squared=coefficients, tokens_seq_len=coefficients,
)  # fmt: skip


@given(amounts)
def test_a_polynomial_is_found_from_its_values(amount: Amount):
    assert Fit(SHAPES, OF_MORE).amount([value(amount, shape) for shape in SHAPES]) == amount


def test_values_that_need_fractions_have_no_polynomial():
    assert Fit(SHAPES[:3], OF_ONE).amount([shape.length**2 // 3 for shape in SHAPES[:3]]) is None


@given(amounts, amounts)
def test_a_polynomial_that_covers_another_is_never_below_it(first: Amount, second: Amount):
    if covers(first, second):
        for shape in map(Shape._make, product((1, 2, 7), (1, 3, 128, 5000))):
            assert value(first, shape) >= value(second, shape)


@pytest.mark.parametrize("multiple", [8, 32, 128])
def test_padding_to_a_multiple_is_found(multiple: int):
    amount = Amount(tokens=6, padding=16)
    counted = {shape: value(amount, shape, multiple) for shape in (Shape(5, 170), Shape(5, 337), Shape(3, 8192))}
    assert padded(Amount(tokens=6), counted) == (amount, multiple)
    assert padded(Amount(tokens=6), {**counted, Shape(5, 339): 1}) is None
