"""Targets of adapters that are a regular expression or ends of modules' names choose the modules that peft chooses."""

from __future__ import annotations

import warnings

import pytest

from zeroplan.catalog.model import model
from zeroplan.errors import SpecError
from zeroplan.resolve.targets import plain_targets

AXOLOTLS = r"model.language_model.layers.[\d]+.(_checkpoint_wrapped_module.)?(mlp|self_attn).(up|down|gate|q|k|v|o)_proj"


@pytest.mark.parametrize(
    ("targets", "name", "expected"),
    [
        (AXOLOTLS, "gemma-3-4b", "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"),
        (r".*\.(q|v)_proj", "llama-3.1-8b", "q_proj,v_proj"),
        ("linear_attn.in_proj_ba,q_proj", "qwen3-next-80b-a3b", "in_proj_ba,q_proj"),
        ("all-linear", "llama-3.1-8b", "all-linear"),
        ("q_proj, v_proj", "llama-3.1-8b", "q_proj, v_proj"),
    ],
)
def test_names_of_layers(targets: str, name: str, expected: str) -> None:
    assert plain_targets(targets, model(name)) == expected


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (r"model\.layers\.[0-7]\.self_attn\.q_proj", "not self_attn.q_proj of layer 8, which is not modelled"),
        (r"visual\..*", "match no linear layer"),
        ("(q_proj", "are no regular expression"),
        ("(a+)+b", "long or repeating"),
        ("x*" * 300, "long or repeating"),
    ],
)
def test_others_are_refused(targets: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        plain_targets(targets, model("llama-3.1-8b"))


@pytest.mark.torch
@pytest.mark.parametrize("targets", [r".*self_attn\.(q|o)_proj", r"model\.layers\.\d+\.mlp\.(up|down)_proj"])
def test_peft_adapts_these_layers(targets: str) -> None:
    pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    from tests.causal_models import causal_model, tiny_spec
    from zeroplan.transformer.blocks import Compute

    spec = tiny_spec("qwen3", heads=2, kv_heads=1, head_dim=8, ffn=32, vocab=24)
    module = causal_model(spec, Compute(2, autocast=False, attention="sdpa", kernels="cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft calls functions that transformers has deprecated
        adapted = peft.get_peft_model(module, peft.LoraConfig(r=2, target_modules=targets))
    found = {name.split(".lora_A")[0].rpartition(".")[2] for name, _ in adapted.named_modules() if "lora_A" in name}
    assert found == set(plain_targets(targets, spec).split(","))
