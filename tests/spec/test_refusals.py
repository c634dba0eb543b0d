"""Descriptions that contradict themselves are refused, in a line that says what is wrong and what to do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, AnyStr

import pytest

from tests.profiles import by_hand
from zeroplan import JobSpec, MeshSpec, ModelSpec, MoeSpec, RecipeSpec, SpecError
from zeroplan.spec.adapter import AdapterSpec
from zeroplan.spec.base import Spec
from zeroplan.spec.frozen import FrozenSpec
from zeroplan.spec.model import MlaSpec
from zeroplan.spec.profile import Profile, model_of
from zeroplan.spec.recipe import MegatronOptions

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "head_dim": 16, "vocab_size": 256,
}  # fmt: skip
MOE = MoeSpec(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96)


def model(family: str, **said: Any) -> ModelSpec:
    return ModelSpec(family=family, **(SIZES | said))


def sparse(**said: Any) -> ModelSpec:
    """DeepSeek-V3.2, whose indexer has the sizes ``said``."""
    sizes: dict[str, Any] = {
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "index_n_heads": 2, "index_head_dim": 12, "index_topk": 8,
    }  # fmt: skip
    return model("deepseek_v32", moe=MOE, mla=MlaSpec(**(sizes | said)))


def job(taken: ModelSpec, **said: Any) -> JobSpec:
    return JobSpec(model=taken, recipe=RecipeSpec(**said))


def of_one_variant(**changed: Any) -> Profile:
    whole = by_hand()
    one = replace(whole.variants[0], one=replace(whole.variants[0].one, **changed))
    return replace(whole, variants=(one, *whole.variants[1:]))


OF_MODELS: list[tuple[Callable[[], object], str]] = [
    (
        lambda: model("bloom", hidden_act="gelu_fast"),
        "hidden_act='gelu_fast' of a bloom model has no formula: it always has gelu_new",
    ),
    (
        lambda: model("qwen2", parallel_residual=False),
        "family='qwen2' has no parallel_residual of its own; only gpt_neox has",
    ),
    (
        lambda: model("gpt_neox", head_dim=20),
        "head_dim=20 of a gpt_neox model has no formula: a quarter of each head is rotated, in pairs; use a multiple of 8",
    ),
    (
        lambda: model("gpt2", attention_bias=True, mlp_bias=True),
        "family='gpt2' adds learned positions: positions=0 leaves it without; set their number",
    ),
    (
        lambda: model("mixtral", moe=MOE),
        "a mixtral model has one width for its experts: intermediate_size=128 and moe_intermediate_size=96 must be the same",
    ),
    (
        lambda: model("lfm2_moe", moe=MOE, layer_pattern="cC", num_hidden_layers=4),
        "layer_pattern='cCcC' of an lfm2_moe model: its class has dense layers, c and D, before all others only",
    ),
    (
        lambda: model("phi"),
        "head_dim=16 of a phi model has no formula: 32 elements of each are rotated; use more",
    ),
    (
        lambda: job(model("phi", head_dim=64, hidden_size=256), loss="chunked"),
        "loss 'chunked' of a phi model, whose head has a bias, is not modelled; use 'full'",
    ),
    (
        lambda: job(model("hunyuan_v1_moe", intermediate_size=96, moe=MOE), engine="ddp", zero_stage=0, precision="bf16"),
        (
            "precision 'bf16' of a hunyuan_v1_moe model under 'ddp' is not modelled: its routers stay in fp32; "
            "use 'bf16-mixed', or engine 'deepspeed'"
        ),
    ),
    (
        lambda: job(sparse(), engine="deepspeed", zero_stage=2),
        ("engine 'deepspeed' in a deepseek_v32 model, whose indexer gets no gradient, is not modelled; use engine 'fsdp2'"),
    ),
    (
        lambda: JobSpec(
            model=model(
                "qwen3_moe", moe=MOE, adapter=AdapterSpec(rank=8, targets="attention", quantize="nf4", quantize_experts=True)
            ),
            mesh=MeshSpec(dp_shard=2, ep=2),
        ),
        "ep=2 (experts on several ranks) with experts in four bits is not modelled; use ep=1",
    ),
    (
        lambda: job(sparse(), engine="fsdp2", optimizer="adagrad"),
        (
            "optimizer 'adagrad', which makes its states at once, in a deepseek_v32 model, whose indexer gets no gradient, is not "
            "modelled; use adamw"
        ),
    ),
    (
        lambda: job(sparse(), engine="fsdp2", attention="flash"),
        (
            "attention 'flash', which transformers has not for it, in a deepseek_v32 model, whose indexer gets no gradient, is not "
            "modelled; use attention 'sdpa'"
        ),
    ),
    (
        lambda: sparse(index_topk=0),
        ("family='deepseek_v32' needs index_n_heads, index_topk, q_lora_rank, and an index_head_dim beyond qk_rope_head_dim=8"),
    ),
    (
        lambda: replace(sparse(), family="deepseek_v3"),
        "family='deepseek_v3' has no indexer; leave index_n_heads, index_head_dim and index_topk out",
    ),
    (FrozenSpec, "nothing is frozen; name some parts (embedding,head) or a number of layers"),
]
OF_RECIPES: list[tuple[Callable[[], object], str]] = [
    (
        lambda: MegatronOptions(overlap_param_gather=True),
        "megatron.overlap_param_gather needs megatron.overlap_grad_reduce=true; set both, or neither",
    ),
    (
        lambda: job(model_of(by_hand()), engine="fsdp2", keep_logits="fp32"),
        "keep_logits='fp32' with a profile is not modelled; use yes or no",
    ),
    (
        lambda: job(model_of(by_hand()), engine="fsdp2", recompute="full", offload_activations=True),
        "offload_activations with a profile is not modelled; leave it out",
    ),
    (
        lambda: job(model_of(by_hand()), engine="fsdp2", fused_kernels="rope"),
        "fused_kernels with a profile are not modelled: the module was traced with its own; leave them out",
    ),
]
OF_PROFILES: list[tuple[Callable[[], object], str]] = [
    (
        lambda: replace(
            by_hand(),
            runs=tuple(replace(run, kind=f"{run.kind} one") for run in by_hand().runs),
            kinds={f"{kind} one": tensors for kind, tensors in by_hand().kinds.items()},
        ),
        "is not a name, which formulas need",
    ),
    (
        lambda: of_one_variant(loss=()),
        "a variant of the profile lacks a kind of block, its loss, its head or what is below the blocks",
    ),
    (
        lambda: replace(by_hand(), modules=replace(by_hand().modules, kinds={"Odd": ("mix",)})),
        "the profile does not name the modules of each kind of block",
    ),
    (
        lambda: replace(by_hand(), order=("table.weight", "")),
        "the profile's order does not name each parameter outside the blocks once, and the blocks",
    ),
]


@pytest.mark.parametrize(
    ("built", "line"), [*OF_MODELS, *OF_RECIPES, *OF_PROFILES], ids=lambda one: one if isinstance(one, str) else ""
)
def test_a_contradiction_is_refused(built: Callable[[], object], line: str):
    with pytest.raises(SpecError) as refused:
        built()
    said = str(refused.value)
    assert said.endswith(line) if "not a name" in line else said == line


def test_what_these_refusals_ask_for_is_accepted():
    """Some of the refused descriptions, changed as their line says."""
    assert model("gpt_neox", head_dim=24, hidden_size=96, parallel_residual=False, hidden_act="gelu_fast").head_dim == 24
    assert model("gpt2", attention_bias=True, mlp_bias=True, positions=64).positions == 64
    assert model("mixtral", moe=MOE, intermediate_size=96).moe == MOE
    assert MegatronOptions(overlap_param_gather=True, overlap_grad_reduce=True).overlap_param_gather
    assert job(model_of(by_hand()), engine="fsdp2", keep_logits=True).recipe.keep_logits


def test_a_field_whose_type_cannot_be_checked_is_an_error():
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Wrong(Spec):
        field: AnyStr = "any"

    with pytest.raises(TypeError, match="a spec field cannot be a ~AnyStr"):
        Wrong()
