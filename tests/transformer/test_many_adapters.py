"""Compares blocks with several adapters beside each layer with runs on the fake GPU, to the byte."""

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

pytestmark = pytest.mark.torch


def differences_with_many(case: Case) -> tuple[int, ...]:
    """Return the differences of a block whose adapters are ours, not peft's."""
    from tests.transformer.many_adapters import with_many_adapters

    def instead(model: object, adapter: AdapterSpec, _recipe: object, *, family: str, **_others: object) -> object:
        return with_many_adapters(model, adapter, family=family)  # type: ignore[arg-type]

    with patch("zeroplan.verify.training.adapters.with_adapters", instead):
        return differences(case)


def case_of(family: str, number: int, adapter: AdapterSpec) -> Case:
    case = drawn(Random(f"{family} {number}"), family)  # noqa: S311  draws tests
    compute = case.compute._replace(
        element_bytes=2, autocast=False, offloaded=False, recompute=("none", "full")[number % 2], attention="sdpa"
    )
    return case._replace(spec=replace(case.spec, adapter=adapter), compute=compute)


@pytest.mark.parametrize("family", modelled("adapters everywhere") if every_case() else ("qwen3", "llama"))
@pytest.mark.parametrize("number", range(8) if every_case() else (0, 1))
@pytest.mark.parametrize("runs", [1, 4])
def test_a_block_with_many_adapters_takes_what_is_said(family: str, number: int, runs: int) -> None:
    assert on_the_fake_gpu(differences_with_many, case_of(family, number, AdapterSpec(rank=8, runs=runs))) == ()


@pytest.mark.parametrize("family", modelled("adapters everywhere") if every_case() else ("qwen3",))
@pytest.mark.parametrize("number", range(6) if every_case() else (0, 1))
@pytest.mark.parametrize("dropout", [False, True])
def test_a_block_whose_adapters_run_one_after_the_other(family: str, number: int, dropout: bool) -> None:
    adapter = AdapterSpec(rank=12, runs=3, looped=True, dropout=dropout)
    assert on_the_fake_gpu(differences_with_many, case_of(family, number, adapter)) == ()


@pytest.mark.parametrize("number", [0, 1])
def test_some_layers_have_many_adapters_with_dropout(number: int) -> None:
    """With recomputation the estimate is 4 bytes per token too high, where the last layer has dropout; why is not known."""
    case = case_of("llama", number, AdapterSpec(rank=16, runs=2, dropout=True, targets="v_proj,down_proj"))
    tokens = case.size.micro_batch_size * case.size.seq_len
    found = on_the_fake_gpu(differences_with_many, case)
    assert all(-4 * tokens <= one <= 0 for one in found), found
