"""The program of a layer with experts, compared with what Megatron-LM's own MoE layer saves."""

from __future__ import annotations

import pytest

from tests.measured.megatron_experts import Asked, cases, estimated, rows


def test_every_case_is_kept() -> None:
    assert [one._replace(n_bytes=0) for one in rows()] == list(cases())


@pytest.mark.parametrize("asked", rows(), ids=lambda one: f"{one.dispatcher}-{one.experts}-{one.n_bytes}")
def test_a_layer_saves_what_megatron_s_own_does(asked: Asked) -> None:
    """The storages of autograd and of the dispatcher's attributes match to the byte."""
    assert estimated(asked) == asked.n_bytes
