"""Reads YAML of LLaMA-Factory, Axolotl and TRL: it becomes the job that it describes, or one line says why not."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from zeroplan import estimate
from zeroplan.catalog.setups import axolotl, llama_factory
from zeroplan.catalog.setups.keys import keys_of
from zeroplan.catalog.setups.reading import is_setup, read_setup
from zeroplan.catalog.setups.settings import Table
from zeroplan.errors import SpecError, ZeroplanError
from zeroplan.export.setup_words import in_its_words
from zeroplan.planner.asking import with_setup_defaults
from zeroplan.remedies import single_changes
from zeroplan.resolve import Request, Resolved, resolve

if TYPE_CHECKING:
    from collections.abc import Callable

FACTORY: dict[str, Any] = {
    "model_name_or_path": "meta-llama/Llama-3.2-1B", "stage": "sft", "do_train": True, "finetuning_type": "lora", "lora_rank": 16,
    "lora_target": "q_proj,v_proj", "template": "llama3", "cutoff_len": 1024, "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4, "bf16": True, "flash_attn": "fa2", "plot_loss": True,
}  # fmt: skip
V1 = {
    "model": "Qwen/Qwen3-0.6B", "model_class": "llm", "dist_config": {"name": "fsdp2", "dcp_path": None}, "train_dataset": "x.yaml",
    "micro_batch_size": 2, "global_batch_size": 16, "cutoff_len": 1024, "learning_rate": 1e-4,
}  # fmt: skip
AXOLOTL: dict[str, Any] = {
    "base_model": "meta-llama/Llama-3.2-1B", "sequence_len": 1024, "sample_packing": True, "micro_batch_size": 2,
    "gradient_accumulation_steps": 4, "optimizer": "adamw_torch", "bf16": "auto", "flash_attention": True, "adapter": "qlora",
    "load_in_4bit": True, "lora_r": 16, "lora_target_linear": True, "gradient_checkpointing": True, "wandb_project": None,
}  # fmt: skip


def without(data: dict[str, Any], *keys: str, **more: Any) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key not in keys} | more


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Resolved]:
    def read(data: dict[str, Any], **said: Any) -> Resolved:
        file = tmp_path / "mine.yaml"
        file.write_text(yaml.safe_dump(data))
        return resolve(Request(from_file=str(file), **said))

    return read


def test_modules_that_axolotl_and_trl_train_whole(read: Callable[..., Resolved], tmp_path: Path):
    """Embedding and head are read for modelled engines. If the dtype of a copy is unknown, the answer notes the key."""
    file = tmp_path / "mine.yaml"
    found = read(without(AXOLOTL, lora_modules_to_save=["model.embed_tokens", "lm_head"]))
    assert found.job.model.adapter is not None
    assert found.job.model.adapter.saved == ("embed_tokens", "lm_head")
    assert found.job.model.adapter.upcast == "none"
    assert "lora_modules_to_save" not in read_setup(file, gpus=None).matters
    read(without(AXOLOTL, lora_modules_to_save=["wte"]))
    assert "lora_modules_to_save" in read_setup(file, gpus=None).matters
    for dtype, noted in (("bfloat16", False), ("float32", True)):
        read({"model_name_or_path": "meta-llama/Llama-3.2-1B", "bf16": True, "use_peft": True, "lora_target_modules": "all-linear",
              "lora_modules_to_save": "lm_head", "dtype": dtype, "per_device_train_batch_size": 1})  # fmt: skip
        assert ("lora_modules_to_save" in read_setup(file, gpus=None).matters) is noted


def test_llama_factory_with_adapters(read: Callable[..., Resolved]):
    job, notes, *_ = read(FACTORY, gpus=4)
    assert job.model.adapter is not None
    assert (job.model.name, job.model.adapter.rank, job.model.adapter.layers) == ("llama-3.2-1b", 16, ("q_proj", "v_proj"))
    assert not job.model.adapter.dropout
    assert (job.batch.seq_len, job.batch.micro_batch_size, job.batch.grad_accum_steps) == (1024, 2, 4)
    recipe = job.recipe
    assert (recipe.engine, recipe.precision, recipe.attention, recipe.recompute) == ("ddp", "bf16-mixed", "flash", "full")
    assert recipe.reentrant
    assert not any("not known" in note for note in notes)


def test_llama_factorys_defaults_give_way_to_flags(read: Callable[..., Resolved]):
    """Adapters of rank 8 in all linear layers, 2048 tokens, recomputation (hparams/, model_utils/checkpointing.py)."""
    bare = without(FACTORY, "lora_rank", "lora_target", "cutoff_len", "finetuning_type", "flash_attn")
    job = read(bare).job
    assert job.model.adapter is not None
    assert (job.model.adapter.rank, job.model.adapter.targets, job.batch.seq_len) == (8, "all-linear", 2048)
    assert (job.recipe.recompute, job.recipe.attention) == ("full", "sdpa")
    assert read(bare, seq_len=512, lora_rank=4, recompute="none").job.batch.seq_len == 512
    assert read(bare, stage=3, gpus=4).job.recipe.engine == "fsdp2"
    with pytest.raises(SpecError, match=r"--seq-len 512 contradicts LLaMA-Factory .*, where cutoff_len makes it 1024"):
        read(FACTORY, seq_len=512)


def test_llama_factory_keeps_recomputation_off_where_it_is_disabled(read: Callable[..., Resolved]):
    """Without recomputation and adapters, DDP looks for unused parameters (hparams/parser.py)."""
    off = FACTORY | {"disable_gradient_checkpointing": True}
    adapted, whole = read(off, gpus=4).job.recipe, read(off | {"finetuning_type": "full"}, gpus=4).job.recipe
    assert (adapted.recompute, adapted.ddp.find_unused_parameters) == ("none", False)
    assert (whole.recompute, whole.ddp.find_unused_parameters) == ("none", True)


def test_llama_factory_trains_in_16_bits_where_pure_bf16_says_so(read: Callable[..., Resolved]):
    full = without(FACTORY, "bf16", finetuning_type="full", pure_bf16=True)
    assert read(full).job.recipe.precision == "bf16"
    with pytest.raises(SpecError, match="pure_bf16=True changes memory"):
        read(full | {"bf16": True})
    with pytest.raises(SpecError, match="neither bf16 nor fp16 is on"):
        read(without(FACTORY, "bf16"))
    assert read(without(FACTORY, "bf16"), precision="bf16-mixed").job.recipe.precision == "bf16-mixed"


def test_llama_factorys_four_bits_are_doubly_quantised_and_nothing_else_becomes_fp32(read: Callable[..., Resolved]):
    four = FACTORY | {"quantization_bit": 4}
    adapter = read(four).job.model.adapter
    assert adapter is not None
    assert (adapter.quantize, adapter.upcast) == ("nf4-double", "none")
    plain = read(four | {"double_quantization": False, "upcast_layernorm": True}).job.model.adapter
    assert plain is not None
    assert (plain.quantize, plain.upcast) == ("nf4", "norms")


def test_llama_factory_beside_deepspeed_and_ray(read: Callable[..., Resolved], tmp_path: Path):
    (tmp_path / "ds.json").write_text(json.dumps({
        "zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto"}))  # fmt: skip
    job, notes, *_ = read(FACTORY | {"deepspeed": "ds.json", "ray_num_workers": 4, "finetuning_type": "full"})
    assert (job.recipe.engine, job.recipe.zero_stage, job.mesh.world_size) == ("deepspeed", 3, 4)
    assert any("use_reentrant is on" in note for note in notes)


def test_llama_factorys_version_1(read: Callable[..., Resolved]):
    job = read(V1, gpus=4).job
    assert (job.recipe.engine, job.recipe.precision, job.recipe.recompute, job.recipe.keep_logits) == (
        "fsdp2", "bf16-mixed", "full", "fp32",
    )  # fmt: skip
    assert (job.model.name, job.batch.seq_len, job.batch.micro_batch_size, job.batch.grad_accum_steps) == (
        "qwen3-0.6b",
        1024,
        2,
        2,
    )
    adapted = read(V1 | {"cp_size": 2, "peft_config": {"name": "lora", "r": 16, "target_modules": "all"}}, gpus=4).job
    assert adapted.model.adapter is not None
    assert (adapted.model.adapter.rank, adapted.model.adapter.dropout, adapted.batch.seq_len) == (16, True, 512)
    assert read(V1 | {"kernel_config": {"name": "liger_kernel"}}).job.recipe.fused_kernels is not None
    plain = read({key: value for key, value in V1.items() if key != "dist_config"}).job.recipe
    assert (plain.engine, plain.precision) == ("ddp", "fp32")


def test_axolotl_with_qlora(read: Callable[..., Resolved]):
    job, notes, *_ = read(AXOLOTL, gpus=2)
    adapter = job.model.adapter
    assert adapter is not None
    assert (adapter.rank, adapter.targets, adapter.quantize, adapter.upcast) == (16, "all-linear", "nf4-double", "none")
    assert (job.batch.seq_len, job.batch.micro_batch_size, job.batch.grad_accum_steps) == (1024, 2, 4)
    recipe = job.recipe
    assert (recipe.engine, recipe.precision, recipe.attention, recipe.recompute) == ("ddp", "bf16-mixed", "flash", "full")
    assert (recipe.optimizer_impl, recipe.reentrant, recipe.fused_kernels) == (None, True, "axolotl-lora")
    assert [any(word in note for note in notes) for word in ("sample_packing", "not known")] == [True, False]


@pytest.mark.parametrize("more", [{"lora_qkv_kernel": False}, {"rl": "dpo"}, {"trust_remote_code": True}])
def test_axolotls_kernels_are_off_where_it_leaves_them_off(read: Callable[..., Resolved], more: dict[str, Any]):
    assert read(AXOLOTL | more, gpus=1).job.recipe.fused_kernels is None


def test_axolotls_keys_of_experts_change_nothing_in_a_dense_model(read: Callable[..., Resolved], tmp_path: Path):
    """In a model with experts the answer notes them, also where adapters of attention alone are modelled."""
    said = {"quantize_moe_experts": True, "lora_target_parameters": ["experts.down_proj"], "use_scattermoe": True}
    assert any("of experts, or of layers of some families" in note for note in read(AXOLOTL | said, gpus=1).notes)
    assert not read_setup(tmp_path / "mine.yaml", gpus=1).matters
    experts = AXOLOTL | said | {"base_model": "Qwen/Qwen3-30B-A3B"}
    read(experts, gpus=1)
    assert said.keys() <= read_setup(tmp_path / "mine.yaml", gpus=1).matters.keys()


def test_axolotls_adapters_of_all_experts_are_counted(read: Callable[..., Resolved]):
    """Its peft is older, which the answer notes. With ``lora_target_linear`` no router gets an adapter."""
    said = {"base_model": "Qwen/Qwen3-30B-A3B", "lora_target_parameters": ["mlp.experts.gate_up_proj", "experts.down_proj"]}
    plain = without(AXOLOTL, "load_in_4bit", "lora_target_linear") | {"adapter": "lora", "lora_target_modules": ["q_proj"]}
    found = read(plain | said, gpus=1)
    assert found.job.model.adapter is not None
    assert found.job.model.adapter.targets == "q_proj,experts.gate_up_proj,experts.down_proj"
    assert any("Axolotl pins peft 0.19" in note for note in found.notes)
    linear = without(AXOLOTL, "load_in_4bit") | {"adapter": "lora", "base_model": "Qwen/Qwen3-30B-A3B"}
    assert not any(read(linear, gpus=1).job.model.stacked)


@pytest.mark.parametrize(
    ("model", "reentrant", "counted"),
    [("Qwen/Qwen3-30B-A3B", True, True), ("Qwen/Qwen3-30B-A3B", False, False), ("Qwen/Qwen3.5-35B-A3B", False, True)],
)
def test_axolotls_experts_in_four_bits(read: Callable[..., Resolved], model: str, reentrant: bool, counted: bool):
    """In bitsandbytes 0.49 the cache leaks where a checkpoint stops in the experts' forward."""
    said = {"base_model": model, "quantize_moe_experts": True, "lora_target_modules": ["q_proj", "o_proj"]}
    kwargs = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    found = read(without(AXOLOTL, "lora_target_linear") | {"adapter": "qlora", "load_in_4bit": True} | said | kwargs, gpus=1)
    assert found.job.model.adapter is not None
    assert found.job.model.adapter.quantize_experts is counted
    assert any("never frees weights" in note for note in found.notes) is not counted


@pytest.mark.parametrize(
    ("model", "more", "counted"),
    [
        ("Qwen/Qwen3-30B-A3B", {}, True), ("Qwen/Qwen3-30B-A3B", {"activation_checkpointing": True}, False),
        ("Qwen/Qwen3.5-35B-A3B", {"activation_checkpointing": True}, True), ("Qwen/Qwen3-30B-A3B", {"fsdp_version": 1}, False),
    ],
)  # fmt: skip
def test_axolotls_experts_in_four_bits_under_fsdp(read: Callable[..., Resolved], model: str, more: dict, counted: bool):
    data = without(AXOLOTL, "lora_target_linear", "gradient_checkpointing") | {
        "base_model": model, "quantize_moe_experts": True, "lora_target_modules": ["q_proj"],
        "fsdp_config": {"fsdp_version": 2, **more},
    }  # fmt: skip
    adapter = read(data, gpus=2).job.model.adapter
    assert adapter is not None
    assert adapter.quantize_experts is counted


@pytest.mark.parametrize(
    ("more", "words", "elsewhere"),
    [
        ({"qat": {"weight_dtype": "nvfp4", "activation_dtype": "nvfp4"}}, "does not train", {"qat": {"weight_dtype": "mxfp4"}}),
        ({"attn_implementation": "xformers", "base_model": "llama-7b"}, "same tensors", {"base_model": "Qwen/Qwen2.5-7B"}),
        ({"liger_rms_norm_gated": True}, "changes nothing", {"base_model": "Qwen/Qwen3.5-9B"}),
        ({"fused_attn_kernel": True}, "changes nothing", {"base_model": "Qwen/Qwen3-8B"}),
    ],
)  # fmt: skip
def test_axolotls_keys_without_effect_are_noted_once(
    read: Callable[..., Resolved], tmp_path: Path, more: dict[str, Any], words: str, elsewhere: dict[str, Any]
):
    """The same key is open in another model, or with another value."""
    assert any(words in note for note in read(AXOLOTL | more, gpus=1).notes)
    assert not read_setup(tmp_path / "mine.yaml", gpus=1).matters
    read(AXOLOTL | more | elsewhere, gpus=1)
    assert read_setup(tmp_path / "mine.yaml", gpus=1).matters


@pytest.mark.parametrize(
    ("more", "counted"),
    [
        ({}, True), ({"qat": {"activation_dtype": "int8", "weight_dtype": "int4", "group_size": 16}}, False),
        ({"qat": {"weight_dtype": "int4"}}, False), ({"base_model": "google/gemma-2-2b"}, False),
        ({"adapter": "lora", "lora_r": 8, "lora_target_linear": True}, False),
        ({"liger_fused_linear_cross_entropy": False}, False), ({"fsdp_version": 1}, False), ({"qat": False}, False),
    ],
)  # fmt: skip
def test_axolotls_rounded_layers_are_counted_where_they_are_modelled(
    read: Callable[..., Resolved], tmp_path: Path, more: dict[str, Any], counted: bool
):
    data = without(AXOLOTL, "adapter", "load_in_4bit") | {
        "qat": {"activation_dtype": "int8", "weight_dtype": "int4", "group_size": 64}, "liger_fused_linear_cross_entropy": True,
        "fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True},
    }  # fmt: skip
    job = read(data | more, gpus=2).job
    assert ("axolotl-qat" in job.recipe.fused_parts) is counted
    assert ("qat" in read_setup(tmp_path / "mine.yaml", gpus=2).matters) is not (counted or more == {"qat": False})


@pytest.mark.parametrize(
    ("more", "counted"),
    [({}, True), ({"fsdp_version": 1}, False), ({"base_model": "microsoft/phi-2"}, False), ({"bf16": False}, False)],
)
def test_axolotls_float8_is_counted_where_it_is_modelled(
    read: Callable[..., Resolved], tmp_path: Path, more: dict[str, Any], counted: bool
):
    data = without(AXOLOTL, "adapter", "load_in_4bit") | {
        "fp8": True, "fp8_enable_fsdp_float8_all_gather": True, "fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True},
    }  # fmt: skip
    assert (read(data | more, gpus=2).job.recipe.float8_recipe == "tensorwise") is counted
    setup = read_setup(tmp_path / "mine.yaml", gpus=2)
    assert ("fp8" in setup.matters) is not counted
    assert ("fp8_enable_fsdp_float8_all_gather" in setup.saves) is counted


def test_axolotl_counts_weights_of_16_bits_as_fp32_and_says_so(read: Callable[..., Resolved]):
    """Axolotl loads weights in 16 bits. Which of them stay so is unknown, and fp32 is the upper bound."""
    full = without(AXOLOTL, "adapter", "load_in_4bit")
    found = read(full)
    assert found.job.recipe.precision == "bf16-mixed"
    assert any("weights are loaded as 'bfloat16'" in note for note in found.notes)
    assert read(full | {"bf16": False, "bfloat16": True}).job.recipe.precision == "bf16"
    assert read(full | {"fp16": True}).job.recipe.precision == "fp16-mixed"
    assert read(full | {"bf16": None}).job.recipe.precision == "fp32"
    assert read(without(full, "bf16")).job.recipe.precision == "bf16-mixed"  # Axolotl's default is ``auto``


def test_axolotls_fsdp2_keeps_trained_weights_in_16_bits(read: Callable[..., Resolved]):
    """Its own ``fsdp2_prepare_model`` leaves out accelerate's cast to fp32. Adapters keep the dtypes that peft gives them."""
    sharded = {"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True}}
    full = without(AXOLOTL, "adapter", "load_in_4bit") | sharded
    found = read(full, gpus=2)
    assert (found.job.recipe.engine, found.job.recipe.precision) == ("fsdp2", "bf16")
    assert any("it has no fp32 copy" in note for note in found.notes)
    assert read(full | {"fsdp_version": 1}, gpus=2).job.recipe.precision == "bf16-mixed"
    assert read(full | {"bf16": False, "fp16": True}, gpus=2).job.recipe.precision == "fp16-mixed"
    assert read(without(AXOLOTL, "load_in_4bit") | {"adapter": "lora"} | sharded, gpus=2).job.recipe.precision == "bf16-mixed"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            {"fsdp": ["full_shard", "auto_wrap"], "fsdp_config": {"fsdp_state_dict_type": "FULL_STATE_DICT"}},
            ("fsdp1", 3, False),
        ),
        ({"fsdp_version": 2, "fsdp_config": {"offload_params": True, "reshard_after_forward": True}}, ("fsdp2", 3, True)),
        ({"fsdp_config": {"fsdp_version": 2, "reshard_after_forward": False}}, ("fsdp2", 2, False)),
        ({"fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}}, ("fsdp1", 2, False)),
    ],
)
def test_axolotls_fsdp_is_version_1_unless_it_says_2(
    read: Callable[..., Resolved], said: dict, expected: tuple[str, int, bool]
):
    recipe = read(without(AXOLOTL, "adapter", "load_in_4bit") | said, gpus=4).job.recipe
    assert (recipe.engine, recipe.zero_stage, recipe.offloads_states) == expected


def test_axolotls_older_batch_and_its_names_of_layers(read: Callable[..., Resolved]):
    older = without(AXOLOTL, "gradient_accumulation_steps", "lora_target_linear", batch_size=8,
                    lora_target_modules=["self_attn.q_proj", "mlp.up_proj"])  # fmt: skip
    job = read(older).job
    assert job.model.adapter is not None
    assert (job.batch.grad_accum_steps, job.model.adapter.layers) == (4, ("q_proj", "up_proj"))


def test_axolotls_losses(read: Callable[..., Resolved]):
    liger = {"plugins": ["axolotl.integrations.liger.LigerPlugin"], "liger_fused_linear_cross_entropy": True}
    assert read(without(AXOLOTL, "adapter", "load_in_4bit") | liger).job.recipe.loss == "fused"
    cut = AXOLOTL | {"plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"]}
    job, notes, *_ = read(without(cut, "adapter", "load_in_4bit"))
    assert job.recipe.loss == "fused"
    assert any("cut_cross_entropy is counted as Liger's fused loss" in note for note in notes)
    assert read(cut, loss="full").job.recipe.loss == "full"
    assert read(cut | {"cut_cross_entropy": False}).job.recipe.loss == "full"


@pytest.mark.parametrize(
    ("name", "stage", "offloads"),
    [("zero1", 1, ("none", "none")), ("zero2", 2, ("cpu", "none")), ("zero3_bf16", 3, ("none", "none")),
     ("zero3_bf16_cpuoffload_params", 3, ("none", "cpu")), ("zero3_bf16_cpuoffload_all", 3, ("cpu", "cpu"))],
)  # fmt: skip
def test_axolotls_own_deepspeed_files(read: Callable[..., Resolved], name: str, stage: int, offloads: tuple[str, str]):
    """`axolotl fetch deepspeed_configs` downloads them; a file of that name in the folder takes precedence."""
    data = without(AXOLOTL, "adapter", "load_in_4bit", "fsdp", "fsdp_config", "fsdp_version")
    recipe = read(data | {"deepspeed": f"deepspeed_configs/{name}.json"}, gpus=8).job.recipe
    own = recipe.deepspeed
    assert (recipe.engine, recipe.zero_stage, (own.offload_optimizer, own.offload_param)) == ("deepspeed", stage, offloads)
    if stage == 3:  # 0 to DeepSpeed, to which a parameter then fills a group
        assert (own.sub_group_size, own.stage3_max_live_parameters) == (1, 0)


def test_a_model_that_scores_has_a_head_of_its_outputs(read: Callable[..., Resolved]):
    """Axolotl and ms-swift load AutoModelForSequenceClassification; pairs are two sequences each."""
    plain = read(without(AXOLOTL, "adapter", "load_in_4bit")).job
    scores = read(without(AXOLOTL, "adapter", "load_in_4bit") | {"reward_model": True}).job
    assert (scores.model.head_rows, scores.batch.micro_batch_size) == (1, 2 * plain.batch.micro_batch_size)
    kernel = read(without(AXOLOTL, "flash_attention") | {"attn_implementation": "kernels-community/vllm-flash-attn3"})
    assert kernel.job.recipe.attention == "flash"


def test_trls_yaml_is_trainers_keys(read: Callable[..., Resolved]):
    """A file of `trl sft --config` has the keys of ModelConfig and SFTConfig together."""
    data = {"model_name_or_path": "meta-llama/Llama-3.2-1B", "max_length": 1024, "use_peft": True, "lora_r": 8,
            "lora_target_modules": ["q_proj", "v_proj"], "bf16": True, "gradient_checkpointing": True, "packing": True,
            "per_device_train_batch_size": 4, "gradient_checkpointing_kwargs": {"use_reentrant": False}}  # fmt: skip
    job, notes, *_ = read(data, gpus=2)
    assert job.model.adapter is not None
    assert (job.model.adapter.rank, job.batch.seq_len, job.recipe.reentrant) == (8, 1024, False)
    assert not any("not known" in note for note in notes)
    assert any("num_generations=8 takes memory that is not counted" in one for one in read(data | {"num_generations": 8}).notes)
    assert job.model.adapter.base == "fp32"
    assert any("TRL loads the model in fp32" in note for note in notes)
    narrow = read(data | {"dtype": "bfloat16"}, gpus=2)
    assert narrow.job.model.adapter is not None
    assert narrow.job.model.adapter.base == "compute"
    assert any("counted in 16 bits, too low" in note for note in read(data | {"use_dora": True}).notes)
    pairs, why, *_ = read(data | {"beta": 0.1})
    assert pairs.batch.micro_batch_size == 8
    assert any("beta makes the training step a part of a loop" in note for note in why)


def test_trls_defaults_are_not_transformers(read: Callable[..., Resolved]):
    """TRL computes in bf16 and recomputes unless a file says otherwise (trl/trainer/base_config.py)."""
    data = {"model_name_or_path": "meta-llama/Llama-3.2-1B", "per_device_train_batch_size": 4, "max_length": 1024}
    plain, trls = read(data).job.recipe, read(data | {"packing": True})
    assert (plain.precision, plain.recompute) == ("fp32", "none")
    assert (trls.job.recipe.precision, trls.job.recipe.recompute) == ("bf16-mixed", "full")
    assert [any(f"{key} is left out: it is on in TRL" in note for note in trls.notes)
            for key in ("bf16", "gradient_checkpointing")] == [True, True]  # fmt: skip
    off = read(data | {"packing": True, "bf16": False, "gradient_checkpointing": False}).job.recipe
    assert (off.precision, off.recompute) == ("fp32", "none")


def test_the_trainer_keeps_weights_of_16_bits(read: Callable[..., Resolved]):
    """Only FSDP and DeepSpeed cast them to fp32. Where autocast runs LayerNorms in fp32, fp32 is counted as an upper bound."""
    data = {"model_name_or_path": "meta-llama/Llama-3.2-1B", "bf16": True, "dtype": "bfloat16", "max_seq_length": 512}
    assert read(data).job.recipe.precision == "bf16"
    assert read(data, precision="bf16-mixed").job.recipe.precision == "bf16-mixed"
    assert read(data | {"fsdp": "full_shard"}, gpus=2).job.recipe.precision == "bf16-mixed"
    bounded = read(data | {"model_name_or_path": "gpt2"})
    assert bounded.job.recipe.precision == "bf16-mixed"
    assert any("autocast runs parts of this model in fp32" in note for note in bounded.notes)
    assert read(data | {"model_name_or_path": "gpt2", "bf16": False}).job.recipe.precision == "bf16"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (FACTORY | {"stage": "ppo"}, "stage='ppo' changes memory in a way that is not modelled; sft, pt, dpo, kto and rm are"),
        (AXOLOTL | {"rl": "ebft"}, "rl='ebft' changes memory"),
        (FACTORY | {"finetuning_type": "freeze"}, "finetuning_type='freeze' changes memory"),
        (FACTORY | {"do_train": False}, "do_train is not true, so that nothing is trained"),
        (FACTORY | {"flash_attn": "fa9"}, "flash_attn='fa9' changes memory"),
        (FACTORY | {"quantization_bit": 3}, "quantization_bit=3 changes memory"),
        (FACTORY | {"quantization_bit": 4, "quantization_method": "hqq"}, "quantization_method='hqq' changes memory"),
        (FACTORY | {"quantization_bit": 4, "quantization_type": "fp4"}, "quantization_type='fp4' changes memory"),
        (FACTORY | {"upcast_layernorm": True}, "upcast_layernorm=True changes memory"),
        (FACTORY | {"quantization_bit": 4, "finetuning_type": "full"}, "quantization_bit=True changes|weights in four bits"),
        (FACTORY | {"model_name_or_path": "someone/else"}, "unknown model 'someone/else'.*--config takes its config.json"),
        ({"model": "x", "model_class": "llm", "dist_config": {"name": "fsdp2"}}, "it has no train_dataset"),
        (V1 | {"dist_config": {"name": "fsdpturbo"}}, "dist_config.name='fsdpturbo' changes memory"),
        (V1 | {"optim_config": {"name": "muon"}}, "optim_config=.* changes memory"),
        (V1 | {"peft_config": {"name": "freeze"}}, "peft_config.name='freeze' changes memory"),
        (AXOLOTL | {"adapter": "llama-adapter"}, "adapter='llama-adapter' changes memory"),
        (without(AXOLOTL, "lora_r"), "lora_r is left out; give a rank"),
        (AXOLOTL | {"optimizer": "muon"}, "optimizer='muon' changes memory"),
        (AXOLOTL | {"micro_batch_size": "two"}, "micro_batch_size='two' is not a whole number"),
        (AXOLOTL | {"tensor_parallel_size": 2}, "tensor_parallel_size is 2, transformers' own tensor parallelism"),
        (AXOLOTL | {"peft_autocast_adapter_dtype": False}, "peft_autocast_adapter_dtype=False changes memory"),
        (AXOLOTL | {"bf16": False, "bfloat16": True}, "bfloat16=True changes memory"),
    ],
)  # fmt: skip
def test_what_is_not_modelled_is_refused_in_one_line(read: Callable[..., Resolved], data: dict, expected: str):
    with pytest.raises(ZeroplanError, match=expected) as refused:
        read(data, gpus=4)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("data", "key", "expected"),
    [
        (FACTORY | {"use_galore": True}, "use_galore", "use_galore=True may save memory, .* the answer is the most it takes"),
        (FACTORY | {"additional_target": "embed_tokens"}, "additional_target", "takes memory that is not counted: .* too low"),
        (FACTORY | {"torch_compile": True}, "torch_compile", "the step is counted without torch.compile"),
        (FACTORY | {"torch_compile_mode": "reduce-overhead"}, "torch_compile_mode", "takes memory that is not counted"),
        (FACTORY | {"stage": "dpo", "pref_loss": "orpo"}, "stage", "pref_loss=orpo reads the logits a second time"),
        (FACTORY | {"stage": "rm"}, "stage", "reads a value head, not the logits beside it"),
        (AXOLOTL | {"rl": "orpo"}, "rl", "rl=orpo: .* reference model and generation are not counted"),
        (AXOLOTL | {"gradient_checkpointing": "offload"}, "gradient_checkpointing", "recomputation is counted instead"),
        (without(AXOLOTL, "flash_attention", attn_implementation="eager"), "sample_packing", "a mask of all pairs of .* too low"),
        (AXOLOTL | {"flash_attention": False, "xformers_attention": True, "sample_packing": False}, "attn_implementation",
         "attention with xformers is not modelled: FlashAttention is counted"),
        (AXOLOTL | {"plugins": ["axolotl.integrations.kd.KDPlugin"]}, "plugins: KDPlugin", "the plugin 'KDPlugin' does to memory"),
        (AXOLOTL | {"adapter": "lora", "load_in_4bit": False, "load_in_8bit": True, "fsdp_config": {"fsdp_version": 2}},
         "load_in_8bit", "changes memory in a way that is not modelled"),
        (without(AXOLOTL, "adapter", "load_in_4bit", base_model="Qwen/Qwen3.5-9B", liger_rms_norm_gated=True),
         "liger_rms_norm_gated", "may save memory"),
        (AXOLOTL | {"fsdp_config": {"fsdp_version": 2}, "lora_mlp_kernel": True}, "lora_mlp_kernel", "peft's layers are counted"),
    ],
)  # fmt: skip
def test_a_key_that_matters_and_is_not_modelled_is_named(
    read: Callable[..., Resolved], data: dict, key: str, expected: str, tmp_path: Path
):
    """The answer leaves the key out, and names whether it is too low because of that."""
    assert any(re.search(expected, note) for note in read(data, gpus=4).notes)
    assert key in read_setup(tmp_path / "mine.yaml", gpus=4).matters


@pytest.mark.parametrize(
    ("more", "dora", "upcast"),
    [
        ({}, "peft", "all"),
        ({"quantization_bit": 4}, "peft", "norms"),
        ({"deepspeed": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}}, "none", "all"),
    ],
)
def test_dora_is_read_with_engines_for_which_it_is_modelled(
    read: Callable[..., Resolved], more: dict, dora: str, upcast: str, tmp_path: Path
):
    """Under autocast, weights in four bits beside DoRA are counted with norms in fp32."""
    adapter = read(FACTORY | {"use_dora": True} | more, gpus=2).job.model.adapter
    assert adapter is not None
    assert (adapter.dora, adapter.upcast) == (dora, upcast)
    assert ("use_dora" in read_setup(tmp_path / "mine.yaml", gpus=2).matters) == (dora == "none")


@pytest.mark.parametrize(
    ("data", "note"),
    [
        (without(AXOLOTL, "adapter", "load_in_4bit", flash_attn_fuse_mlp=True), "xformers has no fused SwiGLU since release"),
        (without(AXOLOTL, "adapter", "load_in_4bit", flash_optimum=True), "optimum 1.16.2 cannot be imported beside"),
        (
            without(AXOLOTL, "adapter", "load_in_4bit", "flash_attention", "sample_packing", base_model="tiiuae/falcon-7b",
                    attn_implementation="xformers"),
            "transformers has no attention by xformers for this model, so this file does not train",
        ),
    ],
)  # fmt: skip
def test_keys_of_packages_that_axolotl_cannot_have_change_nothing(
    read: Callable[..., Resolved], data: dict, note: str, tmp_path: Path
):
    assert any(note in one for one in read(data, gpus=4).notes)
    assert not read_setup(tmp_path / "mine.yaml", gpus=4).matters


def test_tokens_weighted_by_their_entropy_in_axolotl(read: Callable[..., Resolved], tmp_path: Path):
    """Of several sequences the shifted logits are one copy more, which is not counted."""
    said = without(AXOLOTL, "adapter", "load_in_4bit", base_model="google/gemma-3-1b-it", cls_model_config="Gemma3TextConfig",
                   use_eaft=True, micro_batch_size=1)  # fmt: skip
    assert read(said, gpus=1).job.recipe.log_probs == "eaft"
    assert not {"use_eaft", "cls_model_config"} & read_setup(tmp_path / "mine.yaml", gpus=1).matters.keys()
    assert read(said | {"micro_batch_size": 2}, gpus=1).job.recipe.loss == "full"
    assert "use_eaft" in read_setup(tmp_path / "mine.yaml", gpus=1).matters


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (FACTORY | {"stage": "dpo"}, ({"workflow": "dpo", "full_logits": True}, True)),
        (FACTORY | {"stage": "kto"}, ({"workflow": "kto", "full_logits": True}, False)),
        (AXOLOTL | {"rl": "ipo"}, ({"workflow": "dpo", "full_logits": True}, True)),
        (AXOLOTL, ({}, False)),
    ],
)
def test_a_preference_is_a_loop_of_phases(read: Callable[..., Resolved], data: dict, said: tuple, tmp_path: Path):
    found = read(data, gpus=4)
    assert (found.loop, found.pairs) == said
    assert not {"stage", "rl"} & read_setup(tmp_path / "mine.yaml", gpus=4).matters.keys()


@pytest.mark.parametrize(
    ("data", "fused", "loss"),
    [
        (FACTORY | {"enable_liger_kernel": True}, "rope,liger-rms-norm,liger-swiglu", "fused"),
        (FACTORY | {"enable_liger_kernel": True, "stage": "kto"}, "rope,liger-rms-norm,liger-swiglu", "full"),
        (AXOLOTL | {"liger_rms_norm": True, "liger_glu_activation": True}, "liger-rms-norm,liger-swiglu,axolotl-lora", "full"),
        ({"model_name_or_path": "Qwen/Qwen3-8B", "per_device_train_batch_size": 1, "use_liger_kernel": True,
          "liger_kernel_config": {"rope": False}}, "liger-rms-norm,liger-swiglu", "fused"),
    ],
)  # fmt: skip
def test_ligers_kernels_are_counted(read: Callable[..., Resolved], data: dict, fused: str, loss: str):
    recipe = read(data, gpus=1).job.recipe
    assert (recipe.fused_kernels, recipe.loss) == (fused, loss)


def test_a_family_without_ligers_kernels_is_counted_without_them(read: Callable[..., Resolved]):
    found = read({"model_name_or_path": "allenai/OLMo-2-1124-7B", "per_device_train_batch_size": 1, "use_liger_kernel": True})
    assert found.job.recipe.fused_kernels is not None
    other = read({"model_name_or_path": "openai/gpt-oss-20b", "per_device_train_batch_size": 1, "use_liger_kernel": True})
    assert other.job.recipe.fused_kernels is None
    assert any("Liger's kernels are not modelled with family 'gpt_oss'" in note for note in other.notes)


def test_a_preference_takes_two_sequences(read: Callable[..., Resolved]):
    assert read(FACTORY | {"stage": "dpo"}).job.batch.micro_batch_size == 4
    assert read(AXOLOTL | {"rl": "kto"}).job.batch.micro_batch_size == 2


def test_paged_states_are_counted_on_the_gpu_where_ranks_share_them(read: Callable[..., Resolved]):
    paged = AXOLOTL | {"optimizer": "paged_adamw_8bit"}
    assert read(paged).job.recipe.optimizer == "paged-adamw-8bit"
    found = read(paged | {"fsdp": ["full_shard"]}, gpus=2)
    assert found.job.recipe.optimizer == "adamw-8bit"
    assert any("may move to the host: they are counted on the GPU" in note for note in found.notes)


@pytest.mark.parametrize("data", [FACTORY, AXOLOTL])
def test_an_unknown_key_is_named_and_the_file_is_recognised_by_its_words(
    read: Callable[..., Resolved], data: dict, tmp_path: Path
):
    assert any("'mine' is not known here and left out" in note for note in read(data | {"mine": 1}).notes)
    assert is_setup(tmp_path / "mine.yaml")
    assert read_setup(tmp_path / "mine.yaml", gpus=1).kind == ("axolotl" if data is AXOLOTL else "llama-factory")


@pytest.mark.parametrize("value", [3, "x", "", [], [1], [[]], {}, {"a": 1}, True, 1.5, -1])
def test_any_value_of_any_key_is_read_or_refused(value: object):
    """Lists instead of names, tables instead of numbers: the only error is SpecError."""
    for data, setup, name in ((FACTORY, llama_factory.llama_factory_setup, "llama-factory"),
                              (AXOLOTL, axolotl.axolotl_setup, "axolotl")):  # fmt: skip
        asked = Table(dict(data), "it")
        setup(asked, Path())
        for key in {
            *data,
            *keys_of(name).refused.split(),
            *asked.read,
            *keys_of(name).instead.values(),
            "plugins",
            "fsdp_version",
        }:
            with suppress(SpecError):
                setup(Table(data | {key: value}, "it"), Path())


def test_more_shards_are_offered_though_their_engine_has_no_such_checkpoints(read: Callable[..., Resolved]):
    job = read(without(FACTORY, "flash_attn", finetuning_type="full"), gpus=4).job
    assert job.recipe.reentrant
    words = [in_its_words(job, one.job, "llama-factory", {}) for one in single_changes(job)]
    assert any("fsdp: [full_shard, auto_wrap]" in said for said in words)
    assert not any("reentrant" in key for said in words for key in said)


def test_a_search_goes_through_engines_whose_checkpoints_are_not_reentrant(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(FACTORY))
    found = with_setup_defaults(Request(from_file=str(tmp_path / "mine.yaml")))
    assert found.request.reentrant is None
    assert any("reentrant checkpoints" in note for note in found.notes)


def test_weights_in_eight_bits(read: Callable[..., Resolved]):
    """Layers keep their inputs under non-reentrant checkpoints; Axolotl's and LLaMA-Factory's are reentrant."""
    axolotl = read(AXOLOTL | {"adapter": "lora", "load_in_4bit": False, "load_in_8bit": True})
    factory = read(FACTORY | {"quantization_bit": 8, "disable_gradient_checkpointing": True})
    for job, notes in ((one.job, one.notes) for one in (axolotl, factory)):
        assert job.model.adapter is not None
        assert (job.model.adapter.quantize, job.model.adapter.upcast) == ("int8", "none")
        assert any("beyond bitsandbytes' threshold" in note for note in notes)


def test_llama_factory_on_megatron_core(read: Callable[..., Resolved]):
    """Its example megatron/qwen3_moe_full.yaml, which says that each of 8 GPUs has 78 GB; experts are whole, as by default."""
    data = {
        "model_name_or_path": "Qwen/Qwen3-30B-A3B-Instruct-2507", "do_train": True, "stage": "sft", "finetuning_type": "full",
        "cutoff_len": 4096, "template": "qwen3_nothink", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8,
        "bf16": True, "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 4, "expert_model_parallel_size": 2,
        "use_distributed_optimizer": True, "moe_grouped_gemm": True, "moe_token_dispatcher_type": "alltoall",
        "recompute_granularity": "full",
    }  # fmt: skip
    job = read(data, gpu="h100").job
    assert (job.recipe.engine, job.mesh.world_size, job.mesh.pp, job.mesh.ep) == ("megatron", 8, 4, 2)
    assert (job.batch.seq_len, job.batch.micro_batch_size, job.batch.grad_accum_steps) == (4096, 1, 8)
    assert estimate(job).peak.total_bytes == pytest.approx(78e9, rel=0.03)
    split = read({**data, "tensor_model_parallel_size": 2, "sequence_parallel": True}, gpu="h100").job
    assert (split.recipe.megatron.expert_ways(2), split.recipe.megatron.apply_rope_fusion) == (1, False)
    bridge = read(
        {**data, "tensor_model_parallel_size": 2, "sequence_parallel": True, "mixed_precision": "bf16_mixed"}, gpu="h100"
    ).job
    assert (bridge.recipe.megatron.expert_ways(2), bridge.recipe.zero_stage) == (2, 1)
    with pytest.raises(SpecError, match="do_train is not true"):
        read({**data, "do_train": False})


@pytest.mark.parametrize(("how", "in_flight"), [(True, 5), ("disk", 5), ("legacy", 0)])
def test_axolotl_moves_inputs_of_blocks_to_the_host(read: Callable[..., Resolved], how: object, in_flight: int):
    full = {"base_model": "meta-llama/Llama-3.2-1B", "sequence_len": 2048, "gradient_checkpointing": True, "bf16": True}
    recipe = read({**full, "activation_offloading": how}).job.recipe
    assert (recipe.offload_activations, recipe.recompute, recipe.inputs_in_flight, recipe.reentrant) == (
        True,
        "full",
        in_flight,
        False,
    )
    older = read({**full, "gradient_checkpointing": "offload"}).job.recipe
    assert (older.offload_activations, older.inputs_in_flight) == (True, 5)


def test_axolotls_other_offloads_are_noted(read: Callable[..., Resolved], tmp_path: Path):
    adapted = {"base_model": "meta-llama/Llama-3.2-1B", "sequence_len": 2048, "adapter": "lora", "lora_r": 8,
               "lora_target_linear": True, "gradient_checkpointing": True, "activation_offloading": True}  # fmt: skip
    for data, saves in ((adapted, False), ({**adapted, "activation_offloading": "hidden_states"}, True)):
        assert not read(data).job.recipe.offload_activations
        setup = read_setup(tmp_path / "mine.yaml", gpus=None)
        assert "activation_offloading" in setup.matters
        assert ("activation_offloading" in setup.saves) == saves


def test_axolotls_hybrid_attention_of_gemma_4_is_counted_as_torchs(read: Callable[..., Resolved], tmp_path: Path):
    """FlashAttention has no heads of 512 elements, and Axolotl runs those layers with torch's attention and a mask."""
    data = {"base_model": "google/gemma-4-31B", "sequence_len": 2048, "sample_packing": True, "micro_batch_size": 1,
            "attn_implementation": "flash_attention_2", "bf16": True, "gradient_checkpointing": True}  # fmt: skip
    with pytest.raises(SpecError, match="heads of 256 elements, not of 512"):
        read(data)
    resolved = read(data | {"gemma4_hybrid_attn_impl": True})
    assert (resolved.job.recipe.attention, resolved.job.recipe.padded) == ("sdpa", True)
    assert any("torch's attention is counted in all layers" in note for note in resolved.notes)
    two = read(data | {"gemma4_hybrid_attn_impl": True, "micro_batch_size": 2}).job
    assert (two.batch.micro_batch_size, two.batch.seq_len, two.recipe.padded) == (1, 4096, True)
    assert not read_setup(tmp_path / "mine.yaml", gpus=None).matters


def test_axolotl_in_four_bits_behind_an_activation_in_fp32(read: Callable[..., Resolved]):
    found = read(AXOLOTL | {"base_model": "arcee-ai/AFM-4.5B"}, gpus=1)
    assert found.job.model.adapter is not None
    assert (found.job.model.activation, found.job.model.adapter.upcast) == ("relu2", "norms")
    assert any("computes relu2 in fp32" in note for note in found.notes)


def test_axolotls_packed_rows_with_torchs_attention(read: Callable[..., Resolved], tmp_path: Path):
    """Lengths instead of a mask for models without windows; else the mask of one row, if the row has one sequence's length."""
    data = {"base_model": "meta-llama/Llama-3.2-1B", "sequence_len": 2048, "sample_packing": True, "micro_batch_size": 1}
    assert read({**data, "attn_implementation": "sdpa", "micro_batch_size": 4}).job.recipe.attention == "flash"
    assert not read_setup(tmp_path / "mine.yaml", gpus=None).matters
    for more in ({}, {"attn_implementation": "sdpa", "sdpa_varlen": False}):
        recipe = read({**data, **more}).job.recipe
        assert (recipe.attention, recipe.padded) == ("sdpa", True)
    four = read({**data, "micro_batch_size": 4}).job
    assert (four.batch.micro_batch_size, four.batch.seq_len, four.recipe.padded) == (1, 8192, True)


def test_axolotl_freezes_adapters_that_unfrozen_parameters_does_not_name(read: Callable[..., Resolved], tmp_path: Path):
    data = {"base_model": "google/gemma-3-1b-it", "sequence_len": 2048, "adapter": "lora", "lora_r": 8, "lora_target_linear": True,
            "unfrozen_parameters": ["^model.language_model.*", "^lm_head.*"]}  # fmt: skip
    notes = " ".join(read(data).notes)
    assert "trains nothing" in notes
    assert "unfrozen_parameters" not in read_setup(tmp_path / "mine.yaml", gpus=None).matters
    read({**data, "unfrozen_parameters": [".*lora_A.*"]})
    assert "unfrozen_parameters" in read_setup(tmp_path / "mine.yaml", gpus=None).matters
