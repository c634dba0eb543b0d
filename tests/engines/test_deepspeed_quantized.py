"""ZeRO++'s quantized weights and gradients: bytes sent, and refusals. tests/verify compares with the engine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.formulas import assert_explained
from zeroplan import Estimate, estimate, job
from zeroplan.engines.deepspeed.gathers import Piece, Sharing, gather_in_8_bits
from zeroplan.engines.requests.log import Log
from zeroplan.errors import SpecError
from zeroplan.spec.recipe import DeepSpeedOptions

#: Options with which no parameter stays gathered between two uses.
STREAMED = {"stage3_max_live_parameters": 1, "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}
WEIGHTS, GRADIENTS = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}


def asked(*, gpus: int = 16, stage: int = 3, said: dict[str, Any] | None = None, **options: Any) -> Estimate:
    chosen = DeepSpeedOptions(**{**STREAMED, **options})
    return estimate(
        job(model="llama-2-7b", engine="deepspeed", stage=stage, gpus=gpus, seq_len=1024, deepspeed=chosen, **(said or {}))
    )


def across(answer: Estimate) -> float:
    """Return the bytes that leave a node, in units of the model's parameters in bf16."""
    calls = [call for call in answer.traffic.collectives if not call.near]
    return sum(int(call.payload_bytes) for call in calls) / (2 * answer.parameters)


def test_of_three_volumes_a_quarter_crosses_nodes_as_the_paper_has_it():
    """ZeRO++ (arXiv:2306.10209), section 3: of 3 M, 0.5 M remain for weights in 8 bits and 0.25 M for gradients in 4 bits.

    A node sends these 0.25 M; each of its 8 GPUs sends an eighth.
    """
    assert across(asked()) == pytest.approx(3, rel=0.01)
    assert across(asked(**WEIGHTS)) == pytest.approx(0.5 + 0.5 + 1, rel=0.01)
    assert across(asked(**GRADIENTS)) == pytest.approx(1 + 1 + 0.25 / 8, rel=0.01)
    every = asked(**WEIGHTS, **GRADIENTS, zero_hpz_partition_size=8)
    assert across(every) == pytest.approx(0.5 + 0.25 / 8, rel=0.01)
    assert every.bytes_on_slowest_link < asked().bytes_on_slowest_link / 5


def test_a_flat_gather_is_held_in_8_bits():
    """Two parameters on 8 ranks, with shares of 4,096 and 8,192 elements of bf16: all requests, and what is left at the end."""
    log, payload, share, scales = Log(), 98304, 12288, 4 * 2
    assert gather_in_8_bits(log, "gather", (Piece(4096, 8), Piece(8192, 8)), Sharing(8, width=2), together=True) == 2 * 8
    sizes = [request.n_bytes for request in log.requests]
    assert sizes == [payload, 2 * share, 2 * share, share + scales, 8 * scales]
    assert log.events == [0, 1, 2, -2, 3, -3, 4, -4]
    assert log.bytes_of("gather") == payload + 8 * scales


def test_on_one_node_gradients_are_not_quantized():
    assert across(asked(gpus=8, **GRADIENTS)) == across(asked(gpus=8))


def test_nodes_have_the_gpus_of_the_cluster():
    by_default, of_four = asked(**GRADIENTS), asked(**GRADIENTS, said={"gpus_per_node": 4})
    groups = [{call.group for call in one.traffic.collectives if call.near} for one in (by_default, of_four)]
    assert groups == [{8}, {4}]


@pytest.mark.parametrize("grad_accum", [1, 2])
def test_every_line_is_explained(grad_accum: int):
    assert_explained(asked(**WEIGHTS, **GRADIENTS, said={"grad_accum": grad_accum}))


@pytest.mark.parametrize(
    ("options", "gpus", "stage", "says"),
    [
        (WEIGHTS, 16, 2, "zero_quantized_weights needs ZeRO stage 3"),
        (GRADIENTS, 16, 2, "zero_quantized_gradients needs ZeRO stage 3"),
        (WEIGHTS | {"offload_param": "cpu"}, 16, 3, "with offload is not modelled"),
        (GRADIENTS | {"offload_optimizer": "cpu"}, 16, 3, "with offload is not modelled"),
        (GRADIENTS | {"reduce_scatter": False}, 16, 3, "needs reduce_scatter"),
        (GRADIENTS, 12, 3, "needs whole nodes of 8 GPUs"),
        (GRADIENTS, 512, 3, "cannot be shared out over 512 ranks"),
        (WEIGHTS, 1000, 3, "cannot split a rank's share"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], gpus: int, stage: int, says: str):
    with pytest.raises(SpecError, match=says):
        asked(gpus=gpus, stage=stage, **options)
