"""Optimizer states and temporaries of the step: by hand, and columns of sizes against single sizes."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from zeroplan.engines.optimizers import (
    IMPLEMENTATIONS,
    LocalTensor,
    implementation,
    state_lines,
    step_temporary_lines,
)
from zeroplan.errors import SpecError
from zeroplan.ledger import total_bytes
from zeroplan.numeric import Int
from zeroplan.spec.recipe import Optimizer, OptimizerImpl


def test_every_optimizer_has_a_default() -> None:
    assert set(IMPLEMENTATIONS) == set(get_args(Optimizer))
    for optimizer in get_args(Optimizer):
        assert implementation(optimizer, None) == IMPLEMENTATIONS[optimizer][0]


@pytest.mark.parametrize(
    ("optimizer", "impl"), [("adafactor", "fused"), ("muon", "foreach"), ("rmsprop", "fused"), ("adamw-8bit", "foreach")]
)
def test_an_implementation_that_does_not_exist_is_refused_with_the_way_out(optimizer: Optimizer, impl: OptimizerImpl) -> None:
    with pytest.raises(SpecError, match=f"{optimizer}.*{impl}.*use {IMPLEMENTATIONS[optimizer][0]}"):
        implementation(optimizer, impl)


def test_eight_bit_adam_by_hand() -> None:
    # 8192 elements: 2·8192 for the states and 2·4·32 for the scales of 32 blocks; 100 elements in fp32: 8·100; maps 2·256·4.
    lines = state_lines("adamw-8bit", "fused", (LocalTensor((64, 128)), LocalTensor((100,))), 4)
    assert [line.n_bytes for line in lines] == [2 * 8192, 2 * 4 * 32, 800, 2048]
    assert total_bytes(state_lines("adamw-8bit", "fused", (LocalTensor((100,)),), 4)) == 800


def test_the_for_loop_still_holds_the_temporary_of_the_tensor_before() -> None:
    # 64 elements, then 100, then two blocks of (10, 30): 64 + 2·100 beats 100 + 2·10, 10 + 2·30 and, between blocks, 30 + 2·10.
    tensors = (LocalTensor((64,)), LocalTensor((100,)), LocalTensor((10,), 2), LocalTensor((30,), 2))
    (line,) = step_temporary_lines("adamw", "forloop", tensors, 4)
    assert line.n_bytes == 4 * (64 + 2 * 100)
    (line,) = step_temporary_lines("adamw", "forloop", (LocalTensor((30,), 2), LocalTensor((28,), 2)), 4)
    assert line.n_bytes == 4 * (28 + 2 * 30)


def _tensors(size: Int) -> tuple[LocalTensor, ...]:
    embedding, head = LocalTensor((size, 24), in_block=False), LocalTensor((size,), in_block=False)
    return (embedding, LocalTensor((size, 32), 3), LocalTensor((24,), 3), head)


@pytest.mark.parametrize("optimizer", get_args(Optimizer))
def test_a_column_of_sizes_is_its_points(optimizer: Optimizer) -> None:
    sizes = np.array([40, 4096, 7], dtype=np.int64)
    for impl in IMPLEMENTATIONS[optimizer]:
        for formula in (state_lines, step_temporary_lines):
            column = np.broadcast_to(total_bytes(formula(optimizer, impl, _tensors(sizes), 4)), sizes.shape)
            assert column.tolist() == [total_bytes(formula(optimizer, impl, _tensors(int(size)), 4)) for size in sizes]
