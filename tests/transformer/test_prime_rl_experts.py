"""Compares blocks with prime-rl's own experts with runs on the fake GPU, to the byte."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from unittest.mock import patch

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.combined import every_case
from tests.simulated import on_the_fake_gpu
from tests.transformer.drawn_blocks import Case, differences, drawn
from zeroplan.spec.adapter import AdapterSpec
from zeroplan.spec.family import modelled
from zeroplan.spec.recipe import PRIME_RL

pytestmark = pytest.mark.torch


def differences_with_theirs(case: Case) -> tuple[int, ...]:
    """Return the differences of a block with our modules of the same behaviour."""
    from tests.transformer import drawn_blocks
    from tests.transformer.many_adapters import with_many_adapters
    from tests.transformer.prime_rl_experts import with_prime_rl_experts

    make = drawn_blocks.causal_module

    def with_experts(spec: object, *others: object) -> object:
        return with_prime_rl_experts(make(spec, *others), spec)  # type: ignore[arg-type]

    def with_adapters(model: object, adapter: AdapterSpec, _recipe: object, *, family: str, **_others: object) -> object:
        return with_many_adapters(model, adapter, family=family)  # type: ignore[arg-type]

    with (
        patch.object(drawn_blocks, "causal_module", with_experts),
        patch("zeroplan.verify.training.adapters.with_adapters", with_adapters),
    ):
        return differences(case)


def case_of(family: str, number: int, adapter: AdapterSpec | None = None) -> Case:
    case = drawn(Random(f"{family} {number}"), family)  # noqa: S311  draws tests
    compute = case.compute._replace(
        element_bytes=2, autocast=False, offloaded=False, recompute=("none", "full")[number % 2], attention="sdpa",
        fused=(PRIME_RL,),
    )  # fmt: skip
    return case._replace(compute=compute, spec=replace(case.spec, adapter=adapter))


@pytest.mark.parametrize("family", modelled("prime-rl"))
@pytest.mark.parametrize("number", range(8) if every_case() else (0,))
@pytest.mark.parametrize("runs", [0, 3])
def test_a_block_with_their_experts_takes_what_is_said(family: str, number: int, runs: int) -> None:
    """Where the weighting of outputs is the peak, autograd frees the incoming gradient before it sums that of the weights."""
    case = case_of(family, number, AdapterSpec(rank=8, runs=runs) if runs else None)
    moe, size = case.spec.moe, case.size
    assert moe is not None
    pairs = size.micro_batch_size * size.seq_len * moe.num_experts_per_tok
    found = on_the_fake_gpu(differences_with_theirs, case)
    assert all(-4 * pairs <= one < 0 for one in found), found
