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
from zeroplan.spec.adapter import ADAPTED_FAMILIES, ADAPTED_LIKE_LLAMA, AdapterSpec
from zeroplan.transformer.blocks import Compute
from zeroplan.transformer.params import layout, runs_in_order

if TYPE_CHECKING:
    from zeroplan.spec.model import ModelSpec
    from zeroplan.spec.recipe import Recompute

pytestmark = pytest.mark.torch

OTHERS = tuple(name for name in ADAPTED_FAMILIES if name not in ADAPTED_LIKE_LLAMA)
#: The most downloaded, of every kind of attention.
USUAL = ("qwen3_5_text", "gemma4_text", "gpt_oss", "llama4_text", "granitemoehybrid")
#: The most that these peft can run and zeroplan models, where that is not ``all-linear``.
MOST = {
    "llama4_text": "attention,mlp", "nemotron_h": "attention,mlp,in_proj", "falcon_h1": "attention,mlp,in_proj",
    "qwen3_next": "attention,in_proj_qkvz,in_proj_ba,out_proj,shared_expert_gate",
    "olmoe": "attention", "minimax_m2": "attention", "qwen3_moe": "attention", "deepseek_v3": "attention",
    "deepseek_v32": "attention", "glm_moe_dsa": "attention",
    "glm4_moe_lite": "attention", "glm4_moe": "attention", "dots1": "attention",
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
