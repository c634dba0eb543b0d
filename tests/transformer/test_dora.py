"""Compares blocks whose adapters have DoRA's magnitudes with runs on the fake GPU, to the byte."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft", reason="peft is not installed, and builds the adapters that are measured here")

import torch

from tests.combined import every_case
from tests.simulated import on_the_fake_gpu
from tests.transformer.drawn_blocks import RANDOM_STATE, Case, differences, drawn, run_of, said_of
from zeroplan import estimate, job
from zeroplan.spec.adapter import AdapterSpec
from zeroplan.spec.family import TRAITS, modelled
from zeroplan.transformer.params import trained_count

if TYPE_CHECKING:
    from tests.transformer.fake_blocks import BlockRun
    from zeroplan.spec.adapter import Dora, Quantize

pytestmark = pytest.mark.torch

#: Families with biases (Qwen2), with norms of queries (Qwen3), and with one matrix of queries, keys and values (Phi-3).
USUAL = ("llama", "qwen2", "qwen3", "phi3")


def case_of(family: str, number: int, adapter: AdapterSpec, *, autocast: bool = False) -> Case:
    """A block without recomputation, or with an odd number with it."""
    case = drawn(Random(f"{family} {number}"), family)  # noqa: S311  draws tests
    compute = case.compute._replace(
        element_bytes=2, autocast=autocast, offloaded=False, recompute=("none", "full")[number % 2], attention="sdpa"
    )
    return case._replace(spec=replace(case.spec, adapter=adapter), compute=compute)


@pytest.mark.parametrize("family", USUAL if every_case() else USUAL[1:3])
@pytest.mark.parametrize("number", range(6) if every_case() else (0, 1))
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dropout", [False, True])
def test_a_block_with_dora_takes_what_is_said(family: str, number: int, autocast: bool, dropout: bool) -> None:
    case = case_of(family, number, AdapterSpec(rank=4, dora="peft", dropout=dropout), autocast=autocast)
    assert on_the_fake_gpu(differences, case) == ()


@pytest.mark.parametrize("family", [one for one in modelled("adapters") if one not in USUAL and one != "gpt2"])
def test_a_block_of_another_family(family: str) -> None:
    """With recomputation, since the first layers of some families have no adapter."""
    case = case_of(family, 1, AdapterSpec(rank=4, dora="peft", targets="attention"))
    if not trained_count(case.spec):
        pytest.skip("this model has no attention")
    assert on_the_fake_gpu(differences, case) == ()
    if "adapters under autocast" in TRAITS[family].modelled:
        assert on_the_fake_gpu(differences, case._replace(compute=case.compute._replace(autocast=True))) == ()


@pytest.mark.parametrize(("quantize", "autocast"), [("nf4", False), ("nf4-double", False), ("nf4-double", True)])
@pytest.mark.parametrize("number", range(4) if every_case() else (1,))
@pytest.mark.parametrize("dropout", [False, True])
def test_a_block_in_four_bits(number: int, quantize: Quantize, autocast: bool, dropout: bool) -> None:
    """Under autocast with fp32 norms."""
    pytest.importorskip("bitsandbytes")
    adapter = AdapterSpec(rank=4, dora="peft", dropout=dropout, quantize=quantize, upcast="norms" if autocast else "none")
    assert on_the_fake_gpu(differences, case_of("llama", number, adapter, autocast=autocast)) == ()


def run_and_said(pair: tuple[Case, Case]) -> tuple[BlockRun, BlockRun]:
    return run_of(pair[0]), said_of(pair[1])


@pytest.mark.parametrize("number", [0, 1])
def test_norms_in_16_bits_under_autocast_take_at_most_what_norms_in_fp32_take(number: int) -> None:
    """A layer in four bits then returns fp32, which is why it is refused."""
    pytest.importorskip("bitsandbytes")
    adapter = AdapterSpec(rank=4, dora="peft", quantize="nf4", upcast="none")
    ran = case_of("llama", number, adapter, autocast=True)
    counted = case_of("llama", number, replace(adapter, upcast="norms"), autocast=True)
    found, said = on_the_fake_gpu(run_and_said, (ran, counted))
    hidden = ran.spec.hidden_size
    assert all(one - other <= RANDOM_STATE + 4 * hidden for one, other in zip(found, said, strict=True)), (found, said)


def torchtunes_forward(self: Any, x: torch.Tensor, *, scaling: float, base_result: torch.Tensor, **parts: Any) -> torch.Tensor:
    """Torchtune's order (0.7, modules/peft/dora.py, DoRALinear.forward): the adapter runs before the norms are made."""
    first, second, weight = parts["lora_A"], parts["lora_B"], parts["base_layer"].weight
    output = second(first(x))
    identity = torch.eye(first.weight.shape[1], device=x.device, dtype=x.dtype)
    change = second(first(identity)).T
    norms = torch.linalg.norm(weight + scaling * change.detach(), dim=1).to(weight.dtype).detach()
    scale = (self.weight / norms).view(1, -1)
    changed: torch.Tensor = (scale - 1) * base_result + scale * output * scaling
    return changed


def differences_in_torchtunes_order(case: Case) -> tuple[int, ...]:
    from peft.tuners.lora import dora

    with patch.object(dora.DoraLinearLayer, "forward", torchtunes_forward):
        return differences(case)


@pytest.mark.parametrize("number", range(6) if every_case() else (0, 1, 4))
def test_torchtune_runs_the_adapter_first(number: int) -> None:
    """The fourth has biases, which torchtune does not take off its layer's output."""
    assert (
        on_the_fake_gpu(differences_in_torchtunes_order, case_of("llama", number, AdapterSpec(rank=4, dora="torchtune"))) == ()
    )


@pytest.mark.parametrize("dora", ["peft", "torchtune"])
def test_magnitudes_are_trained_and_the_norms_take_memory_and_time(dora: Dora) -> None:
    said = {"model": "llama-3.1-8b", "lora_rank": 16, "engine": "ddp", "stage": 0, "recompute": "full", "seq_len": 128}
    plain, other = (job(**said, dora=one) for one in ("none", dora))
    widths = 4096 + 1024 + 1024 + 4096 + 14336 + 14336 + 4096
    assert trained_count(other.model) - trained_count(plain.model) == 32 * widths
    more = int(estimate(other).peak.total_bytes) - int(estimate(plain).peak.total_bytes)
    assert more > 2 * (14336**2 + 3 * 14336 * 4096)  # an identity of the widest layer's inputs, and three copies of its weight
