"""Compares blocks with peft's adapters, of families unlike Llama, with runs on the fake GPU, to the byte."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft", reason="peft is not installed, and builds the adapters that are measured here")

from tests.causal_models import adapted_model
from tests.combined import every_case
from tests.simulated import on_the_fake_gpu
from tests.transformer.drawn_blocks import Case, differences, drawn
from zeroplan.engines.quantised import quantised_lines
from zeroplan.errors import SpecError
from zeroplan.spec.adapter import (
    ADAPTED_FAMILIES,
    ADAPTED_LIKE_LLAMA,
    CONVERTED,
    NOT_QUANTISED,
    NOT_UNDER_AUTOCAST,
    AdapterSpec,
    Quantize,
)
from zeroplan.spec.job import JobSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.transformer.blocks import Compute
from zeroplan.transformer.params import layout, runs_in_order

if TYPE_CHECKING:
    from zeroplan.spec.model import ModelSpec
    from zeroplan.spec.recipe import Recompute

pytestmark = pytest.mark.torch

OTHERS = tuple(name for name in ADAPTED_FAMILIES if name not in ADAPTED_LIKE_LLAMA)
#: The most downloaded, of every kind of attention, and experts that peft finds by their old names.
USUAL = ("qwen3_5_text", "gemma4_text", "gpt_oss", "llama4_text", "granitemoehybrid", "qwen3_moe")
_EXPERTS = "experts.gate_up_proj,experts.down_proj"
#: The most that these peft can run and zeroplan models, where that is not ``all-linear``.
MOST = {
    "llama4_text": "attention,mlp", "nemotron_h": "attention,mlp,in_proj", "falcon_h1": "attention,mlp,in_proj",
    **dict.fromkeys(("gpt_oss", "qwen3_5_moe_text", "granitemoe", "qwen2_moe"), f"all-linear,{_EXPERTS}"),
}  # fmt: skip
#: Estimates that are too high by this much in fp32 with recomputation: an eighth of the residual stream. [bytes]
TOO_HIGH = {"glm4": 81_904}
COMPUTED: tuple[tuple[Recompute, str], ...] = (("none", "sdpa"), ("full", "sdpa"), ("none", "eager"), ("full", "eager"))


def case_of(family: str, number: int, targets: str) -> Case:
    case = drawn(Random(f"{family} {number}"), family)  # noqa: S311  draws tests
    recompute, attention = COMPUTED[number % 4]
    spec = replace(case.spec, adapter=AdapterSpec(rank=4, targets=targets))
    compute = case.compute._replace(autocast=False, recompute=recompute, attention=attention, offloaded=False)
    return case._replace(spec=spec, compute=compute)


@pytest.mark.parametrize("family", OTHERS if every_case() else USUAL)
@pytest.mark.parametrize("number", range(8) if every_case() else (1, 2))
def test_a_block_with_adapters_takes_what_is_said(family: str, number: int) -> None:
    case = case_of(family, number, MOST.get(family, "all-linear"))
    found = on_the_fake_gpu(differences, case)
    assert all(-TOO_HIGH.get(family, 0) <= one <= 0 for one in found), (found, case)


@pytest.mark.parametrize("family", OTHERS if every_case() else USUAL[:2])
@pytest.mark.parametrize("number", range(1, 8, 2) if every_case() else (1,))
def test_a_block_with_adapters_in_attention_alone(family: str, number: int) -> None:
    """With recomputation, blocks below the first adapter have a backward, too."""
    found = on_the_fake_gpu(differences, case_of(family, number, "attention"))
    assert all(-TOO_HIGH.get(family, 0) <= one <= 0 for one in found), (family, number, found)


@pytest.mark.parametrize("family", [*CONVERTED, "gpt_oss"] if every_case() else ["mixtral", "gpt_oss"])
@pytest.mark.parametrize(("number", "targets"), [(0, "q_proj,experts.down_proj"), (1, "experts.gate_up_proj")])
def test_one_of_the_weights_of_all_experts_has_an_adapter(family: str, number: int, targets: str) -> None:
    assert on_the_fake_gpu(differences, case_of(family, number, targets)) == ()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "minimax_m2", "qwen3_next", "gpt_oss"])
def test_adapters_of_experts_under_autocast_and_selective_recomputation(family: str) -> None:
    case = case_of(family, 0, MOST.get(family, "all-linear"))
    under = case._replace(compute=case.compute._replace(element_bytes=2, autocast=True))
    assert on_the_fake_gpu(differences, under) == ()
    assert on_the_fake_gpu(differences, under._replace(compute=under.compute._replace(recompute="selective"))) == ()


#: Families whose layers in few bits are modelled.
QUANTISED = tuple(name for name in OTHERS if name not in NOT_QUANTISED)
#: Of these by day: a dense model, latent attention, and experts.
FEW_BITS = ("phi3", "glm4_moe_lite", "qwen3_5_moe_text")


def in_few_bits(family: str, number: int, quantize: Quantize, *, autocast: bool = False) -> Case:
    """In eight bits without recomputation, through which layers keep their inputs. LFM2's eight bits are refused."""
    quantize = "nf4" if (family, quantize) == ("lfm2", "int8") else quantize
    case = case_of(family, number, MOST.get(family, "all-linear"))
    recompute: Recompute = "none" if quantize == "int8" else case.compute.recompute
    adapter = AdapterSpec(
        rank=4, targets=MOST.get(family, "all-linear"), quantize=quantize, upcast="none" if number % 4 < 2 else "all"
    )
    compute = case.compute._replace(element_bytes=2, autocast=autocast, recompute=recompute)
    return case._replace(spec=replace(case.spec, adapter=adapter), compute=compute)


@pytest.mark.parametrize("family", QUANTISED if every_case() else FEW_BITS)
@pytest.mark.parametrize(
    ("number", "quantize"), [(0, "int8"), (1, "nf4"), (2, "nf4-double"), (3, "nf4")][: 4 if every_case() else 2]
)
def test_a_block_in_few_bits_takes_what_is_said(family: str, number: int, quantize: Quantize) -> None:
    pytest.importorskip("bitsandbytes")
    case = in_few_bits(family, number, quantize)
    assert on_the_fake_gpu(differences, case) == (), case


def is_refused(case: Case) -> bool:
    """Whether this is not modelled under autocast."""
    try:
        JobSpec(model=case.spec, recipe=RecipeSpec(engine="ddp", zero_stage=0, recompute="full"))
    except SpecError:
        return True
    return False


@pytest.mark.parametrize("family", QUANTISED if every_case() else FEW_BITS)
@pytest.mark.parametrize("number", range(4) if every_case() else (1,))
def test_a_block_in_few_bits_under_autocast(family: str, number: int) -> None:
    """What is not refused agrees; in the gentlest case nothing but older families' routers is refused."""
    pytest.importorskip("bitsandbytes")
    case = in_few_bits(family, number, "nf4", autocast=True)
    assert is_refused(case) or on_the_fake_gpu(differences, case) == (), case
    if number == 1 and case.spec.activation not in ("relu2", "gelu_new"):
        assert is_refused(case) == (family in NOT_UNDER_AUTOCAST)


@pytest.mark.parametrize("family", QUANTISED if every_case() else (*FEW_BITS, "gemma"))
@pytest.mark.parametrize("quantize", ["nf4-double", "int8"])
def test_few_bits_are_counted_as_layers_hold_them(family: str, quantize: Quantize) -> None:
    """Of linear layers alone, and not of routers."""
    pytest.importorskip("bitsandbytes")
    from zeroplan.verify.training.adapters import quantisation_tensors

    spec = in_few_bits(family, 0, quantize).spec
    module = adapted_model(spec, Compute(2, autocast=False, attention="sdpa", kernels="cpu"))
    every = (*(one for one in module.parameters() if not one.requires_grad), *quantisation_tensors(module))
    held = sum({id(one): one.untyped_storage().nbytes() for one in every}.values())
    assert spec.adapter is not None
    lines = quantised_lines(spec, spec.adapter.quantize, element_bytes=2, norm_bytes=2, end_bytes=2)
    assert held == sum(line.n_bytes for line in lines)


@pytest.mark.parametrize("family", OTHERS if every_case() else USUAL)
def test_parameters_stand_as_peft_has_them(family: str) -> None:
    """``all-linear`` names the same layers as in peft, and the first layer has the same position."""
    spec: ModelSpec = case_of(family, 0, MOST.get(family, "all-linear")).spec
    module = adapted_model(spec, Compute(2, autocast=False, attention="sdpa", kernels="cpu")).get_base_model()
    tree = layout(spec)
    blocks = [one for index in runs_in_order(spec) for one in tree.runs[index].parameters]
    expected = [(one.shape, not one.frozen) for one in (*tree.embeddings, *blocks, *tree.tail)]
    assert expected == [(tuple(one.shape), one.requires_grad) for one in module.parameters()]
    assert tree.runs[runs_in_order(spec)[0]].kind == "first"
