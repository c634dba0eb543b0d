"""Compares the formulas of torchao's NVFP4 layer with its own function on CPU tensors, without its kernels.

The kernels are written in Triton for Blackwell. Functions that return tensors of the same sizes replace them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from zeroplan.ledger import Kind
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.float8 import mode_of
from zeroplan.transformer.families.tape import Site, Store, Tape
from zeroplan.transformer.symbols import T, e, h, m

if TYPE_CHECKING:
    from collections.abc import Iterator

torch = pytest.importorskip("torch")
LAYER = "torchao.prototype.moe_training.nvfp4_training.nvfp4_linear"
pytest.importorskip(LAYER)
pytestmark = pytest.mark.torch

#: Tokens, features that the layer reads, and features that it makes.
SHAPES = ({"T": 256, "h": 512, "m": 128}, {"T": 128, "h": 128, "m": 640}, {"T": 1024, "h": 256, "m": 256})


def run(shape: dict[str, int]) -> tuple[int, int, int]:
    """Return the bytes that the layer keeps with its output, and the highest moments of forward and backward beyond their start."""
    from importlib import import_module

    from zeroplan.verify.watching.timeline import Timeline
    from zeroplan.verify.watching.tracker import Tracker

    layer, tracker, at = import_module(LAYER), Tracker(), list[int]()

    class Passage(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, value: Any) -> Any:
            return value.view_as(value)

        @staticmethod
        def backward(_ctx: Any, gradient: Any) -> Any:
            at.append(tracker.now)
            return gradient

    with (
        patch.multiple(layer, triton_rht_amax=_largest, triton_rht_quantize_row_col=_by_rows_and_columns),
        patch.object(layer, "triton_weight_quantize_2d", _by_rows_and_columns_of_weight),
        patch("torch.nn.functional.scaled_mm", _multiplied),
        tracker,
    ):
        weight = torch.zeros(shape["m"], shape["h"], dtype=torch.bfloat16, requires_grad=True)
        seed = torch.zeros(1, dtype=torch.int64)
        given = Passage.apply(torch.zeros(shape["T"], shape["h"], dtype=torch.bfloat16, requires_grad=True) * 1)
        begun = tracker.now
        made = layer.nvfp4_linear(given, weight, sign_vector=(1,) * 16, sr_seed=seed)
        returned = tracker.now
        Passage.apply(made).backward(torch.ones_like(made))
    live, (back, end) = Timeline(tracker.recording).live, at
    forward, backward = live[begun : returned + 1], live[back : end + 1]
    return live[returned] - live[begun], max(forward) - live[begun], max(backward) - live[back]


def _codes(*sizes: int) -> Iterator[Any]:
    rows, columns = sizes
    yield torch.empty(rows, columns // 2, dtype=torch.uint8)
    yield torch.empty(rows // 128, columns // 64, 32, 16, dtype=torch.float8_e4m3fn)


def _largest(_given: Any, **_others: Any) -> tuple[Any, Any]:
    return torch.empty((), dtype=torch.float32), torch.empty((), dtype=torch.float32)


def _by_rows_and_columns(given: Any, **_others: Any) -> tuple[Any, ...]:
    rows, columns = given.shape
    return (*_codes(columns, rows), *_codes(rows, columns))


def _by_rows_and_columns_of_weight(weight: Any, _largest: Any) -> tuple[Any, ...]:
    rows, columns = weight.shape
    return (*_codes(rows, columns), *_codes(columns, rows))


def _multiplied(first: Any, second: Any, **_others: Any) -> Any:
    return torch.empty(first.shape[0], second.shape[1], dtype=torch.bfloat16)


def said(shape: dict[str, int]) -> tuple[int, int, int]:
    """Return the estimate of the same moments."""
    values = {**shape, "e": 2, "r": 2}
    tape = Tape(wide=False, autocast=False, saving=True)
    tape.mode = mode_of("nvfp4")
    given = op.tensor(tape, "input", e, T * h, "")
    tape.moments.clear()
    tape.freed = True

    def size(stores: tuple[Store, ...]) -> int:
        return sum(int(store.size.value(values)) for store in stores)

    before = size(tuple(tape.alive))
    made = op.linear(tape, given, m, Site("layer", ""))
    kept, highest = size(tuple(tape.alive)), max(size(moment.stores) for moment in tape.moments)
    incoming = tape.make(Kind.ACTIVATION_GRADIENTS, "gradient of the output", e * made.shape, "")
    begun = size(tuple(tape.alive))
    tape.run_backward(made, incoming)
    backward = max(
        size(moment.stores) + 2 * sum(int(one.value(values)) for one in moment.gradients) for moment in tape.moments
    )  # fmt: skip
    return kept - before, highest - before, backward - begun


@pytest.mark.parametrize("shape", SHAPES)
def test_the_layer_takes_what_is_said(shape: dict[str, int]) -> None:
    """The estimate leaves out one number of 4 or 8 bytes for each scale, and two of the random numbers' generator."""
    found, estimated = run(shape), said(shape)
    assert all(0 <= theirs - ours <= 64 for theirs, ours in zip(found, estimated, strict=True)), (found, estimated)
