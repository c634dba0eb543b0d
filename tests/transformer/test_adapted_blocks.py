"""Compares blocks with peft's adapters, of families unlike Llama, with runs on the fake GPU, to the byte."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Final

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft", reason="peft is not installed, and builds the adapters that are measured here")

from tests.causal_models import adapted_model
from tests.combined import every_case
from tests.simulated import on_the_fake_gpu
from tests.transformer.drawn_blocks import RANDOM_STATE, Case, differences, drawn, run_of, said_of
from zeroplan.engines.quantised import quantised_lines
from zeroplan.errors import SpecError
from zeroplan.estimator import account_of
from zeroplan.spec.adapter import STACKED, AdapterSpec, Quantize
from zeroplan.spec.family import LINEAR_FAMILIES, families, modelled
from zeroplan.spec.job import JobSpec
from zeroplan.spec.model import MoeSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.transformer.blocks import Compute
from zeroplan.transformer.params import layout, runs_in_order, trained_count

if TYPE_CHECKING:
    from tests.transformer.fake_blocks import BlockRun
    from zeroplan.spec.model import ModelSpec
    from zeroplan.spec.recipe import Recompute

pytestmark = pytest.mark.torch

UNDER_AUTOCAST: Final = "adapters under autocast"
IN_EXPERTS: Final = "experts' adapters under autocast"
OTHERS = families(lambda one: "adapters" in one.modelled and "adapters everywhere" not in one.modelled)
QUANTISED = tuple(name for name in OTHERS if name in modelled("quantised adapters"))
BARE_EXPERTS = tuple(name for name in STACKED if name in modelled(UNDER_AUTOCAST) and name not in modelled(IN_EXPERTS))
#: The most downloaded, of every kind of attention, and experts that peft finds by their old names.
USUAL = ("qwen3_5_text", "gemma4_text", "gpt_oss", "llama4_text", "granitemoehybrid", "qwen3_moe")
_EXPERTS = "experts.gate_up_proj,experts.down_proj"
#: The most that these peft can run and zeroplan models, where that is not ``all-linear``.
MOST = {
    "llama4_text": "attention,mlp", "nemotron_h": "attention,mlp,in_proj", "falcon_h1": "attention,mlp,in_proj",
    **dict.fromkeys(("gpt_oss", "qwen3_5_moe_text", "granitemoe", "qwen2_moe"), f"all-linear,{_EXPERTS}"),
}  # fmt: skip
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
    assert found == (), case


@pytest.mark.parametrize("family", OTHERS if every_case() else USUAL[:2])
@pytest.mark.parametrize("number", range(1, 8, 2) if every_case() else (1,))
def test_a_block_with_adapters_in_attention_alone(family: str, number: int) -> None:
    """With recomputation, blocks below the first adapter have a backward, too. A model without attention is refused."""
    case = case_of(family, number, "attention")
    if not trained_count(case.spec):
        job = JobSpec(model=case.spec, recipe=RecipeSpec(engine="ddp", zero_stage=0, precision="bf16", recompute="full"))
        with pytest.raises(SpecError, match="adapts none of this model's 3 layers"):
            account_of(job, case.size)
        return
    found = on_the_fake_gpu(differences, case)
    assert found == (), (family, number)


def test_a_recomputation_of_gemma_4_begins_before_the_layers_number_is_multiplied() -> None:
    """A layer ends with a product with a buffer, which autograd saves. In this block of experts the recomputation is the peak."""
    assert on_the_fake_gpu(differences, case_of("gemma4_text", 5, "all-linear")) == ()


@pytest.mark.parametrize("targets", ["mlp,fc1_latent_proj,fc2_latent_proj", "mlp"])
@pytest.mark.parametrize("number", range(4) if every_case() else (1, 2))
def test_a_block_whose_experts_have_a_latent(number: int, targets: str) -> None:
    case = case_of("nemotron_h", number, targets)
    moe = MoeSpec(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, num_shared_experts=2, latent_size=40)
    case = case._replace(spec=replace(case.spec, layer_pattern="E", moe=moe))
    found = on_the_fake_gpu(differences, case)
    assert all(one <= 0 for one in found), (found, case)
    assert all(one >= -4096 for one in found), (found, case)


@pytest.mark.parametrize(
    "family", [*families(lambda one: one.converted), "gpt_oss"] if every_case() else ["mixtral", "gpt_oss"]
)
@pytest.mark.parametrize(("number", "targets"), [(0, "attention,experts.down_proj"), (1, "experts.gate_up_proj")])
def test_one_of_the_weights_of_all_experts_has_an_adapter(family: str, number: int, targets: str) -> None:
    assert on_the_fake_gpu(differences, case_of(family, number, targets)) == ()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "minimax_m2", "qwen3_next", "gpt_oss"])
def test_adapters_of_experts_under_autocast_and_selective_recomputation(family: str) -> None:
    case = case_of(family, 0, MOST.get(family, "all-linear"))
    under = case._replace(compute=case.compute._replace(element_bytes=2, autocast=True))
    assert on_the_fake_gpu(differences, under) == ()
    assert on_the_fake_gpu(differences, under._replace(compute=under.compute._replace(recompute="selective"))) == ()


@pytest.mark.parametrize("number", range(20) if every_case() else (1, 11))
def test_qwen2_moe_under_autocast(number: int) -> None:
    """A variable of the experts' function holds the order of the pairs until it returns: in the eleventh block it counts."""
    case = case_of("qwen2_moe", number, MOST["qwen2_moe"])
    under = case._replace(compute=case.compute._replace(element_bytes=2, autocast=True))
    assert on_the_fake_gpu(differences, under) == (), under


@pytest.mark.parametrize("family", BARE_EXPERTS)
@pytest.mark.parametrize("number", range(4) if every_case() else (0, 3))
def test_attention_in_four_bits_beside_a_router_in_fp32_under_autocast(family: str, number: int) -> None:
    """The router multiplies fp32 copies, which autocast makes narrow again; autograd keeps the weight's narrow copy."""
    pytest.importorskip("bitsandbytes")
    case = case_of(family, number, "attention")
    adapter, compute = AdapterSpec(rank=4, targets="attention", quantize="nf4", upcast="none"), case.compute
    under = compute._replace(element_bytes=2, autocast=True)
    case = case._replace(spec=replace(case.spec, adapter=adapter), compute=under)
    assert not is_refused(case)
    assert on_the_fake_gpu(differences, case) == ()


def run_and_said(pair: tuple[Case, Case]) -> tuple[BlockRun, BlockRun]:
    return run_of(pair[0]), said_of(pair[1])


@pytest.mark.parametrize("number", (1, 2, 4, 5) if every_case() else (1, 2))
def test_an_activation_in_fp32_widens_a_block_in_few_bits_as_fp32_norms_do(number: int) -> None:
    """Which is what ``--upcast norms`` counts in its place."""
    pytest.importorskip("bitsandbytes")
    case = case_of("arcee", number, "all-linear")
    assert case.spec.activation == "relu2"
    adapter, under = AdapterSpec(rank=4, quantize="nf4", upcast="none"), case.compute._replace(element_bytes=2, autocast=True)
    ran, counted = (
        case._replace(spec=replace(case.spec, adapter=replace(adapter, upcast=upcast)), compute=under)
        for upcast in ("none", "norms")
    )
    found, said = on_the_fake_gpu(run_and_said, (ran, counted))
    assert all(0 <= one - other <= RANDOM_STATE for one, other in zip(found, said, strict=True))


#: Families whose layers in few bits are modelled.
#: Of these by day: a dense model, latent attention, and experts.
FEW_BITS = ("phi3", "glm4_moe_lite", "qwen3_5_moe_text")


def in_few_bits(family: str, number: int, quantize: Quantize, *, autocast: bool = False) -> Case:
    """In eight bits without recomputation, through which layers keep their inputs. LFM2's eight bits are refused."""
    quantize = "nf4" if family in ("lfm2", "lfm2_moe") and quantize == "int8" else quantize
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


def with_experts_in_four_bits(family: str, number: int, *, autocast: bool) -> Case:
    case = case_of(family, number, "attention")
    quantize: Quantize = "nf4" if number % 2 else "nf4-double"
    adapter = AdapterSpec(rank=4, targets="attention", quantize=quantize, upcast="none", quantize_experts=True)
    compute = case.compute._replace(element_bytes=2, autocast=autocast)
    return case._replace(spec=replace(case.spec, adapter=adapter), compute=compute)


#: Families of linear attention are compared without autocast, under which their routing differs by some bytes per token.
@pytest.mark.parametrize("family", [name for name in STACKED if name in QUANTISED] if every_case() else ["mixtral"])
@pytest.mark.parametrize("number", [0, 1, 2, 3] if every_case() else [0, 1])
def test_experts_in_four_bits_take_what_is_said(family: str, number: int) -> None:
    """Each forward writes them out, and keeps the copy for its backward."""
    pytest.importorskip("bitsandbytes")
    autocast = family in modelled(IN_EXPERTS) and family not in LINEAR_FAMILIES
    case = with_experts_in_four_bits(family, number, autocast=autocast)
    assert case.spec.first_is_bare or on_the_fake_gpu(differences, case) == ()


def test_experts_in_four_bits_are_counted_as_they_are_held() -> None:
    pytest.importorskip("bitsandbytes")
    for number in (0, 1):
        spec = with_experts_in_four_bits("gpt_oss", number, autocast=False).spec
        assert spec.adapter is not None
        assert held_bytes(spec) == counted_bytes(spec, spec.adapter.quantize)


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
        assert is_refused(case) == (family not in modelled(UNDER_AUTOCAST) or family in BARE_EXPERTS)


@pytest.mark.parametrize("family", QUANTISED if every_case() else (*FEW_BITS, "gemma"))
@pytest.mark.parametrize("quantize", ["nf4-double", "int8"])
def test_few_bits_are_counted_as_layers_hold_them(family: str, quantize: Quantize) -> None:
    """Of linear layers alone, and not of routers."""
    pytest.importorskip("bitsandbytes")
    spec = in_few_bits(family, 0, quantize).spec
    assert spec.adapter is not None
    assert held_bytes(spec) == counted_bytes(spec, spec.adapter.quantize)


def held_bytes(spec: ModelSpec) -> int:
    from zeroplan.verify.training.adapters import quantisation_tensors

    module = adapted_model(spec, Compute(2, autocast=False, attention="sdpa", kernels="cpu"))
    every = (*(one for one in module.parameters() if not one.requires_grad), *quantisation_tensors(module))
    return sum({id(one): one.untyped_storage().nbytes() for one in every}.values())


def counted_bytes(spec: ModelSpec, quantize: Quantize) -> int:
    lines = quantised_lines(spec, quantize, element_bytes=2, norm_bytes=2, end_bytes=2)
    return sum(int(line.n_bytes) for line in lines)


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
