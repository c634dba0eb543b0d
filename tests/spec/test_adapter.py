"""Adapters, quantised weights and frozen parts in a job's description. What is not modelled is refused in one line."""

import json
from dataclasses import replace
from typing import Any

import pytest

from zeroplan import estimate
from zeroplan.errors import SpecError
from zeroplan.resolve import Request, job, request_of, resolve
from zeroplan.spec.adapter import AdapterSpec
from zeroplan.spec.model import ModelSpec

EIGHT_B: dict[str, Any] = {"model": "llama-3.1-8b", "gpus": 8}
_OF_PRIME_RL: dict[str, Any] = {
    "model": "qwen3-30b-a3b", "fused_kernels": "prime-rl-experts", "lora_rank": 8, "lora_runs": 4, "lora_base": "fp32",
    "lora_learning": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"lora_rank": 16, "lora_targets": "qproj"}, "LoRA has no target 'qproj'"),
        ({"lora_rank": 16, "lora_targets": ""}, "LoRA needs linear layers"),
        ({"lora_targets": "q_proj"}, "needs the adapters' rank; add --lora-rank, for example 16"),
        ({"lora_rank": 10**6}, "rank=1000000"),
        ({"lora_rank": 8, "engine": "paper"}, "LoRA with engine 'paper' is not modelled"),
        (
            {"lora_rank": 8, "engine": "deepspeed", "stage": 3, "offload_optimizer": "nvme"},
            "LoRA with offload to NVMe is not modelled",
        ),
        ({"quantize": "nf4"}, "--quantize nf4 needs the adapters' rank"),
        ({"lora_rank": 8, "quantize": "fp4"}, "quantize='fp4' is not one of none, nf4, nf4-double, nf4-torchao, gptq, int8"),
        ({"lora_rank": 8, "quantize": "int8", "engine": "fsdp2"}, "weights in 8 bits and engine 'fsdp2' is not modelled"),
        (
            {"lora_rank": 8, "quantize": "nf4", "engine": "deepspeed", "stage": 3, "offload_optimizer": "cpu"},
            "LoRA with quantised weights .QLoRA. and offload to host memory is not modelled",
        ),
        ({"lora_rank": 8, "model": "hunyuan-a13b"}, "LoRA in a hunyuan_v1_moe model is not modelled"),
        ({"lora_rank": 8, "model": "gpt2", "recompute": "full"}, "LoRA with a gpt2 model and recomputation is not modelled"),
        ({"lora_rank": 8, "model": "gpt2", "quantize": "nf4"}, "quantised weights of a gpt2 model are not modelled"),
        ({"lora_rank": 8, "modules_to_save": "wte"}, "modules_to_save has no module 'wte'; there are embed_tokens, lm_head"),
        (
            {"lora_rank": 8, "modules_to_save": "lm_head", "lora_targets": "lm_head"},
            "lm_head has an adapter or is trained whole",
        ),
        ({"modules_to_save": "lm_head"}, "--modules-to-save lm_head needs the adapters' rank"),
        (
            {"lora_rank": 8, "modules_to_save": "lm_head", "engine": "fsdp1"},
            "trained whole, and engine 'fsdp1' is not modelled",
        ),
        (
            {"lora_rank": 8, "modules_to_save": "lm_head", "engine": "ddp", "stage": 1},
            "trained whole in 16 bits, and ZeroRedundancyOptimizer is not modelled",
        ),
        (
            {"lora_rank": 8, "modules_to_save": "lm_head", "tensor_parallel": 2},
            "trained whole on ranks that split the model is not modelled",
        ),
        ({"lora_rank": 8, "model": "gpt-oss-20b", "lora_targets": "mlp"}, "a gpt_oss model has none of these linear layers"),
        (
            {"lora_rank": 8, "model": "qwen3-30b-a3b", "lora_targets": "q_proj,up_proj"},
            "peft adapts gate_proj and up_proj of a qwen3_moe model's experts, which are one weight, only together; name both",
        ),
        (
            {"lora_rank": 8, "model": "llama-4-scout", "lora_targets": "experts.down_proj"},
            "in a llama4_text model are not modelled",
        ),
        (
            {"lora_rank": 8, "model": "gpt-oss-20b", "lora_targets": "q_proj,gate.weight"},
            "a gpt_oss model's router is not modelled",
        ),
        (
            {"lora_rank": 8, "model": "qwen3-30b-a3b", "tensor_parallel": 2},
            "adapters of all experts of a layer on ranks that split the model is not modelled",
        ),
        (
            {"lora_rank": 8, "model": "llama-4-scout"},
            "cannot run an adapter of Llama 4's router.*use --lora-targets attention,mlp",
        ),
        ({"lora_rank": 8, "model": "falcon-h1-0.5b"}, "peft refuses an adapter of out_proj in a falcon_h1 model; use"),
        (
            {"lora_rank": 8, "model": "qwen3.5-27b", "lora_targets": "attention", "recompute": "none"},
            "a first layer without an adapter, and no recomputation, is not modelled",
        ),
        ({"lora_rank": 8, "model": "gpt-oss-20b", "quantize": "gptq"}, "GPTQ's weights of a gpt_oss model are not modelled"),
        (
            {"lora_rank": 8, "model": "qwen3.5-27b", "quantize": "nf4", "engine": "ddp", "stage": 0},
            "quantised weights of a qwen3_5_text model under autocast, and all else in fp32, is not modelled",
        ),
        (
            {"lora_rank": 8, "model": "gpt-oss-20b", "engine": "deepspeed", "stage": 3},
            "a gpt_oss model at stage 3 of DeepSpeed is not modelled yet; use a lower stage",
        ),
        (
            {"lora_rank": 8, "model": "llama-4-scout", "lora_targets": "attention", "engine": "ddp", "stage": 0},
            "a llama4_text model under autocast is not modelled yet; use precision 'bf16'",
        ),
        ({"lora_rank": 8, "model": "phi-3-mini", "engine": "fsdp1"}, "a phi3 model and engine 'fsdp1' is not modelled"),
        ({"lora_dropout": True}, "--lora-dropout needs the adapters' rank"),
        (
            {"lora_rank": 8, "lora_compute": "fp32"},
            "LoRA with adapters that compute in fp32, and engine 'fsdp2' is not modelled",
        ),
        ({"lora_rank": 8, "lora_base": "fp32", "engine": "fsdp1"}, "frozen weights in fp32, and engine 'fsdp1' is not"),
        (
            {"lora_rank": 8, "lora_base": "fp32", "engine": "ddp", "stage": 0, "dora": "peft"},
            "frozen weights in fp32 with engine 'ddp', and DoRA",
        ),
        (
            {"lora_rank": 8, "lora_base": "fp32", "engine": "ddp", "stage": 0, "model": "qwen3-30b-a3b"},
            "frozen weights in fp32 of a qwen3_moe model under autocast",
        ),
        ({"lora_rank": 8, "lora_base": "fp32", "precision": "bf16"}, "frozen weights in fp32, and precision 'bf16' is not"),
        ({"lora_rank": 8, "lora_base": "fp32", "quantize": "nf4"}, "frozen weights in fp32, and quantised weights is not"),
        ({"lora_rank": 8, "lora_runs": 4}, "and frozen weights in 16 bits beside fp32 is not modelled yet; use base 'fp32'"),
        ({"lora_rank": 8, "lora_runs": 4, "engine": "ddp", "stage": 0}, "adapters of several runs .* and engine 'ddp' is not"),
        (
            {"lora_rank": 8, "lora_runs": 4, "lora_base": "fp32", "model": "qwen3-30b-a3b"},
            "and a qwen3_moe model is not modelled yet; use fused_kernels 'prime-rl-experts'",
        ),
        ({**_OF_PRIME_RL, "lora_runs": 0, "lora_learning": None}, "with peft's adapters is not modelled; use runs, prime-rl's"),
        ({**_OF_PRIME_RL, "lora_learning": 2}, "experts of which several adapters learn is not modelled yet; use learning 1"),
        ({**_OF_PRIME_RL, "lora_looped": True}, "experts one after the other is not modelled yet; use looped false"),
        ({**_OF_PRIME_RL, "lora_targets": "mlp"}, "single layers beside experts is not modelled yet; use targets 'all-linear'"),
        ({"fused_kernels": "prime-rl-experts"}, "with a llama model is not modelled; use one of qwen3_moe, glm4_moe"),
        (
            {"lora_rank": 8, "lora_runs": 4, "lora_base": "fp32", "tensor_parallel": 2},
            "and ranks that split the model is not modelled yet; use data-parallel ranks",
        ),
        ({"lora_rank": 12, "lora_runs": 4}, "groups the products of ranks that 8 divides; rank 12 needs looped"),
        ({"lora_rank": 8, "lora_learning": 1}, "are those of prime-rl's runs alone; set runs"),
        ({"lora_rank": 8, "lora_runs": 2, "lora_learning": 3}, "learning=3 is more than the 2 adapters"),
        ({"lora_runs": 4}, "--lora-runs 4 needs the adapters' rank"),
        ({"lora_base": "fp32"}, "--lora-base fp32 needs the adapters' rank"),
        ({"dora": "peft"}, "--dora peft needs the adapters' rank"),
        (
            {"lora_rank": 8, "dora": "peft", "engine": "fsdp1"},
            "DoRA and engine 'fsdp1' is not modelled yet; use engine 'ddp' or",
        ),
        ({"lora_rank": 8, "dora": "peft", "tensor_parallel": 2}, "DoRA and ranks that split the model is not modelled"),
        ({"lora_rank": 8, "dora": "peft", "model": "qwen3-30b-a3b"}, "DoRA and adapters of all experts of a layer is not"),
        ({"lora_rank": 8, "dora": "peft", "lora_targets": "lm_head"}, "DoRA and an adapter of the head is not modelled"),
        (
            {"lora_rank": 8, "dora": "peft", "quantize": "nf4", "upcast": "none", "engine": "ddp", "stage": 0},
            "DoRA and weights in four bits under autocast is not modelled yet; use upcast 'norms', which takes as much",
        ),
        ({"lora_rank": 8, "quantize": "gptq", "engine": "fsdp1"}, "kernels compute in fp16 is not modelled"),
        ({"lora_rank": 8, "quantize": "gptq"}, "GPTQ's weights and engine 'fsdp2' is not modelled"),
        ({"lora_rank": 8, "group_size": 0}, "group_size=0 is no number of weights"),
        ({"lora_rank": 8, "bitsandbytes": "new"}, "bitsandbytes='new' is not a release"),
        (
            {"lora_rank": 8, "quantize": "nf4", "bitsandbytes": "0.43.1", "engine": "ddp", "stage": 0},
            "bitsandbytes before 0.43.2 and no full recomputation is not modelled",
        ),
        ({"lora_rank": 8, "fused_kernels": "lora", "engine": "fsdp1"}, "fused kernels of adapters and such weights"),
        ({"fused_kernels": "softmax"}, "fused_kernels has no 'softmax'; there are cross-entropy, rms-norm, rope, lora"),
        ({"fused_kernels": "rms-norm", "engine": "deepspeed"}, "fused_kernels with engine 'deepspeed' is not modelled"),
        ({"fused_kernels": "cross-entropy", "loss": "fused"}, "has nothing to replace"),
        (
            {"lora_rank": 8, "model": "mixtral-8x7b", "transformers": "4.55"},
            "with a mixtral model is modelled from 4.39 to 4.48 with LoRA, whose experts are separate layers, and as 5.23",
        ),
        (
            {"lora_rank": 8, "model": "mixtral-8x7b", "transformers": "4.48", "engine": "fsdp1"},
            "LoRA with adapters in experts is not modelled",
        ),
        ({"reentrant": True}, "reentrant=True is modelled with engine 'ddp' and recompute 'full' alone"),
    ],
)
def test_what_is_not_modelled_is_refused_in_one_line(said: dict[str, Any], message: str):
    with pytest.raises(SpecError, match=message) as refused:
        job(**{**EIGHT_B, **said})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"freeze": "lm_head"}, "no part 'lm_head' can be frozen; there are embedding, norm, head"),
        ({"freeze_layers": 32}, "freezing 32 of 32 layers leaves none to train"),
        ({"freeze": "head", "lora_rank": 8}, "with adapters everything else is frozen"),
        ({"freeze": "head", "model": "llama-3.2-1b"}, "this model's head is its embedding"),
        (
            {"freeze": "head", "engine": "deepspeed", "stage": 3, "offload_optimizer": "nvme"},
            "frozen parameters with offload to NVMe are not modelled",
        ),
        ({"freeze": "head", "engine": "paper"}, "frozen parameters with engine 'paper' are not modelled"),
        ({"freeze": "head", "model": "gpt2"}, "frozen parts of a gpt2 model are not modelled"),
    ],
)
def test_what_cannot_be_frozen_is_refused_in_one_line(said: dict[str, Any], message: str):
    with pytest.raises(SpecError, match=message) as refused:
        job(**{**EIGHT_B, **said})
    assert "\n" not in str(refused.value)


def test_a_complete_job_keeps_its_adapters_and_takes_another_rank():
    complete = job(**EIGHT_B, lora_rank=16, lora_targets="attention")
    again = resolve(request_of(complete).overridden_by(Request(lora_rank=4))).job
    assert resolve(request_of(complete)).job == complete
    assert again.model == replace(complete.model, adapter=AdapterSpec(rank=4, targets="attention"))


def test_a_group_of_targets_names_each_layer_once():
    assert AdapterSpec(rank=1, targets="mlp, up_proj,q_proj").layers == ("q_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("targets", "named"),
    [
        ("mlp.gate_proj,mlp.up_proj", "gate_proj,up_proj"),
        (r".*\.(q_proj|gate_proj|up_proj)", "q_proj,gate_proj,up_proj"),
        (r"model\.layers\.\d+\.mlp\.gate", "gate"),
        ("q_proj,mlp.experts.gate_up_proj", "q_proj,experts.gate_up_proj"),
        ("nn.Linear", "q_proj,k_proj,v_proj,o_proj"),
    ],
)
def test_experts_are_found_by_the_names_that_they_had(targets: str, named: str):
    found = job(model="qwen3-30b-a3b", gpus=8, lora_rank=8, lora_targets=targets)
    assert found.model.adapter == AdapterSpec(rank=8, targets=named)


def test_dropout_that_peft_refuses_is_noted():
    said = {"model": "qwen3-30b-a3b", "gpus": 8, "lora_rank": 8, "lora_dropout": True}
    notes = [resolve(Request(**said, lora_targets=targets)).notes for targets in ("mlp", "attention")]
    assert [any("peft 0.21 refuses lora_dropout" in one for one in found) for found in notes] == [True, False]


def test_before_bitsandbytes_0_47_a_4_bit_layer_computes_in_the_dtype_of_its_input():
    """Its weight is then written out in fp32 beside the 16-bit copies. If no norm is in fp32, both releases hold the same."""
    model = ModelSpec(
        family="llama", hidden_size=1024, intermediate_size=8192, num_hidden_layers=2, num_attention_heads=16,
        num_key_value_heads=16, head_dim=64, vocab_size=128,
    )  # fmt: skip
    asked = {"model": model, "gpus": 1, "lora_rank": 1, "quantize": "nf4", "engine": "ddp", "stage": 0, "seq_len": 8}
    peaks = {
        (upcast, release): int(estimate(job(**asked, upcast=upcast, bitsandbytes=release)).peak_bytes)
        for upcast in ("all", "none") for release in ("0.46.1", "0.47.0")
    }  # fmt: skip
    assert peaks["all", "0.46.1"] - peaks["all", "0.47.0"] == pytest.approx(4 * 1024 * 8192, rel=0.02)
    assert peaks["none", "0.46.1"] == peaks["none", "0.47.0"]


@pytest.mark.parametrize(
    ("activation", "upcast", "refused"), [("relu2", "none", True), ("relu2", "all", False), ("silu", "none", False)]
)
def test_an_activation_that_autocast_widens_is_refused_before_a_layer_in_few_bits(activation: str, upcast: str, refused: bool):
    shape = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1000,
             "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": activation}  # fmt: skip
    said = {"config": json.dumps(shape), "lora_rank": 8, "quantize": "nf4", "upcast": upcast, "engine": "ddp", "stage": 0}
    if refused:
        with pytest.raises(SpecError, match="whose relu2 is fp32 then, is not modelled yet; use precision 'bf16'"):
            job(**said)
    else:
        assert job(**said).model.is_quantised
