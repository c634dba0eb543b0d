"""Checks single words of other programs' files: their meaning in a job, or the line that refuses them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zeroplan.catalog.setups.accelerate import accelerate_setup
from zeroplan.catalog.setups.settings import Table, option_value, request_settings
from zeroplan.catalog.setups.setup import Setting, Setup
from zeroplan.catalog.setups.torchtitan import torchtitan_setup
from zeroplan.catalog.setups.trainer import trainer_setup
from zeroplan.errors import SpecError

FSDP2 = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}


def accelerate(said: dict[str, Any]) -> Setup:
    return accelerate_setup(Table(said, "it"), Path())


def with_fsdp(**said: object) -> Setup:
    return accelerate({"distributed_type": "FSDP", "mixed_precision": "bf16", "fsdp_config": FSDP2 | said})


def with_degrees(**said: object) -> Setup:
    degrees = {f"parallelism_config_{key}": value for key, value in said.items()}
    return accelerate({"distributed_type": "FSDP", "num_processes": 16, "fsdp_config": FSDP2, "parallelism_config": degrees})


def with_zero(mixed_precision: str | None = "bf16", **said: object) -> Setup:
    return accelerate({"distributed_type": "DEEPSPEED", "mixed_precision": mixed_precision, "deepspeed_config": said})


def trainer(said: dict[str, Any], folder: Path = Path()) -> Setup:
    return trainer_setup(Table(said, "it"), folder)


def titan(said: dict[str, Any], gpus: int | None = None) -> Setup:
    return torchtitan_setup(Table({"activation_checkpoint": {"mode": "full"}} | said, "it"), Path(), gpus)


def values(setup: Setup, *flags: str) -> list[object]:
    return [setup.flags[flag].value for flag in flags]


def refused(asked: Any, said: str, *words: object, **more: object) -> None:
    with pytest.raises(SpecError) as error:
        asked(*words, **more)
    assert str(error.value) == said


def test_accelerate_on_one_gpu_takes_one_rank_whatever_it_counts():
    """commands/launch.py: ``distributed_type: NO`` is run by ``simple_launcher``, in one process."""
    assert values(accelerate({"distributed_type": "NO", "num_processes": 4}), "gpus", "engine") == [1, "ddp"]


def test_accelerates_old_switch_for_fp16_holds_where_no_precision_is_said():
    """commands/config/config_args.py, ``BaseConfig.from_yaml_file``."""
    assert values(accelerate({"distributed_type": "MULTI_GPU", "fp16": True}), "precision") == ["fp16-mixed"]
    assert values(accelerate({"distributed_type": "MULTI_GPU", "fp16": True, "mixed_precision": "no"}), "precision") == ["fp32"]


def test_accelerates_own_keys_of_deepspeed():
    part = with_zero(zero_stage=3, gradient_accumulation_steps="4", zero3_init_flag="false")
    assert part.deepspeed is not None
    assert (part.deepspeed.data["gradient_accumulation_steps"], part.deepspeed.data["bf16"]) == (4, {"enabled": True})
    assert part.options["deepspeed.zero_init"].value is False
    assert "deepspeed.zero_init" not in with_zero(zero_stage=2, zero3_init_flag=False).options
    whole = with_zero("no", zero_stage=1).deepspeed
    assert whole is not None
    assert whole.data == {
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "zero_optimization": {"stage": 1},
    }  # fmt: skip


def test_what_accelerate_says_and_is_not_modelled():
    refused(
        accelerate,
        "it: compute_environment='AMAZON_SAGEMAKER' is not modelled",
        {"compute_environment": "AMAZON_SAGEMAKER", "distributed_type": "NO"},
    )
    refused(
        accelerate,
        "it: use_cpu is true, but zeroplan estimates GPU memory",
        {"use_cpu": True, "distributed_type": "NO"},
    )
    refused(
        accelerate,
        "it: num_processes=16 is not divisible by num_machines=3",
        {"distributed_type": "MULTI_GPU", "num_processes": 16, "num_machines": 3},
    )
    changes = "changes memory in a way that is not modelled;"
    refused(
        with_fsdp,
        f"it: fsdp_config.fsdp_sharding_strategy='NO_SHARD' {changes} use FULL_SHARD or SHARD_GRAD_OP",
        fsdp_version=1, fsdp_sharding_strategy="NO_SHARD",
    )  # fmt: skip
    refused(
        with_fsdp,
        f"it: fsdp_config.fsdp_forward_prefetch=True {changes} FSDP2 has no such switch; leave it out",
        fsdp_version=2,
        fsdp_forward_prefetch=True,
    )
    refused(with_degrees, "it: parallelism_config_sp_size=2 is not modelled; leave it out", sp_size=2)
    refused(
        with_degrees, "it: num_processes=16 is not the 8 ranks of its parallelism_config", dp_shard_size=4, dp_replicate_size=2
    )
    refused(with_zero, f"it: mixed_precision='fp8' {changes} use bf16, fp16 or no", "fp8", zero_stage=2)


def test_what_is_said_beside_a_file():
    """The same model in file and flag is no conflict. A flag with its default value contradicts a file with another value."""
    one = Setup("trainer", {"model": Setting("model_name_or_path", "gpt2")})
    assert request_settings(one, {"model": "gpt2"}, "it").notes == ()
    told = Setting("bf16", "param")
    assert option_value("fsdp2.reduce_dtype", told, "fp32", "fp32", "it", chosen=False) == "param"
    said = "--set fsdp2.reduce_dtype=fp32 contradicts it, where bf16 makes it param; leave one of them out"
    refused(option_value, said, "fsdp2.reduce_dtype", told, "fp32", "fp32", "it", chosen=True)


def test_values_as_json_and_yaml_write_them():
    table = Table({"off": "False", "steps": 4.0, "half": 4.5}, "it")
    assert (table.switch("off"), table.count("steps")) == (False, 4)
    refused(table.count, "it: half=4.5 is not a whole number from 1 to 1e15", "half")


def test_the_trainers_fsdp_configuration_in_a_file_of_its_own(tmp_path: Path):
    (tmp_path / "fsdp.json").write_text(json.dumps({"fsdp_version": 2, "reshard_after_forward": "false", "mine": 1}))
    found = trainer({"fsdp": True, "fsdp_config": "fsdp.json"}, tmp_path)
    assert values(found, "engine", "stage") == ["fsdp2", 2]
    assert "'fsdp_config.mine' is not known here and left out" in found.notes
    empty = trainer({"fsdp": "full_shard", "fsdp_config": ""})
    assert values(empty, "engine", "stage") == ["fsdp2", 3]


@pytest.mark.parametrize(
    ("args", "optim", "expected"),
    [
        ("momentum=0.9", "sgd", "sgd-momentum"),
        ("momentum = 0.0, dampening=0", "sgd", "sgd"),
        ("alpha=0.9,centered=false", "rmsprop", "rmsprop"),
    ],
)
@pytest.mark.torch
def test_the_trainers_optimizer_keeps_what_its_arguments_ask_for(args: str, optim: str, expected: str):
    """For optimizers other than torch's: what transformers keeps for a parameter."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from transformers.trainer_optimizer import OptimizerContext, _get_rmsprop, _get_sgd, _parse_optim_args

    context = OptimizerContext(transformers.TrainingArguments, None, {"lr": 0.1}, {}, _parse_optim_args(args))
    kind, kwargs = {"sgd": _get_sgd, "rmsprop": _get_rmsprop}[optim](context)
    weight = torch.ones(4, requires_grad=True)
    weight.grad = torch.ones(4)
    optimizer = kind([weight], **kwargs)
    optimizer.step()
    kept = {name for name, state in optimizer.state[weight].items() if getattr(state, "shape", None) == weight.shape}
    assert kept == {"sgd": set(), "sgd-momentum": {"momentum_buffer"}, "rmsprop": {"square_avg"}}[expected]
    assert values(trainer({"optim": optim, "optim_args": args}), "optimizer") == [expected]


def test_the_trainers_notes():
    found = trainer({"auto_find_batch_size": True, "torch_dtype": "float16", "fp16": True, "accelerator_config": "mine.json"})
    loaded = (
        "weights are loaded as 'float16'; they are counted in fp32, as training with bf16 or fp16 needs them; set "
        "--precision bf16 if they stay in 16 bits"
    )
    assert found.notes == (
        loaded,
        "auto_find_batch_size makes batches smaller until they fit; the one that is asked for is counted",
        "accelerator_config is a file of its own, 'mine.json', which is left out",
    )
    sharded = trainer(
        {"per_device_train_batch_size": 1, "torch_dtype": "bfloat16", "bf16": True, "fsdp": True, "fsdp_config": {"version": 2}}
    )
    assert (sharded.notes, sharded.own_units) == ((), "accelerate, which the Trainer runs on,")


def test_the_trainers_degrees_and_adapters():
    found = trainer({"parallelism_config": {"cp_size": 2, "dp_replicate_size": 4, "tp_size": 2}})
    assert values(found, "context_parallel", "replicas") == [2, 4]
    assert found.asks["tensor_parallel"].startswith("parallelism_config.tp_size is 2, transformers' own tensor parallelism")
    whole = trainer({"use_peft": True, "lora_target_modules": "all-linear"})
    assert values(whole, "lora_rank", "lora_targets") == [16, "all-linear"]
    assert "quantize" not in whole.flags
    assert values(trainer({"model_name_or_path": "x" * 300}), "model") == ["x" * 300]  # no file can be called so


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ({"fsdp_config": [1]}, "fsdp_config=[1] is not a table of keys and values, or the path of one"),
        ({"fsdp": "hybrid_shard"}, "fsdp='hybrid_shard' {changes} use full_shard or shard_grad_op"),
        ({"fsdp": True, "fsdp_config": {"auto_wrap_policy": "SIZE_BASED_WRAP"}},
         "fsdp_config.auto_wrap_policy='SIZE_BASED_WRAP' {changes} use TRANSFORMER_BASED_WRAP"),
        ({"fsdp": True, "fsdp_config": {"reshard_after_forward": "never"}},
         "fsdp_config.reshard_after_forward='never' {changes} use true or false"),
        ({"optim": "rmsprop", "optim_args": "momentum=0.9"}, "optim_args='momentum=0.9' {changes} leave it out"),
        ({"optim": "rmsprop", "optim_args": "centered=True"}, "optim_args='centered=True' {changes} leave it out"),
        ({"attn_implementation": "flex_attention"},
         ("attn_implementation='flex_attention' {changes} use one of flash_attention_2, flash_attention_3, "
          "flash_attention_4, sdpa, eager")),
        ({"load_in_4bit": True}, "load_in_4bit=True {changes} weights in four bits are modelled under adapters: add use_peft"),
        ({"lora_r": 8, "lora_target_modules": {"q_proj": 1}}, "lora_target_modules={{'q_proj': 1}} is not a list of names"),
        ({"lora_r": 8, "lora_target_modules": "q_proj", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
         "bnb_4bit_quant_type='fp4' {changes} use nf4"),
    ],
)  # fmt: skip
def test_what_the_trainer_says_and_is_not_modelled(said: dict[str, Any], line: str):
    refused(trainer, "it: " + line.format(changes="changes memory in a way that is not modelled;"), said)


def test_torchtitans_words():
    graphs = (
        "CUDA graphs, which torchtitan captures unless training.disable_cuda_graphs is true, hold memory that is not counted"
    )
    assert graphs in titan({"training": {"disable_cuda_graphs": False}}).notes
    assert graphs not in titan({"training": {"disable_cuda_graphs": True}}).notes
    every = titan({"activation_checkpoint": {"mode": "selective", "selective_ac_option": "1"}})
    assert values(every, "recompute") == ["full"]
    chunks = titan({"loss": {"loss_fn": {}, "num_chunks": 4}})
    assert values(chunks, "loss") == ["chunked"]
    assert "loss.num_chunks is 4: eight chunks are counted" in chunks.notes
    shape = "model llama3 debugmodel is torchtitan's own; its shape comes from the flags"
    assert shape in titan({"model": {"name": "llama3", "flavor": "debugmodel"}}).notes
    alone = titan({"parallelism": {"tensor_parallel_degree": 2}})
    assert values(alone, "gpus", "engine") == [2, "ddp"]


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ({"fault_tolerance": {"enable": True}}, "fault_tolerance.enable=True {changes} leave it out"),
        ({"parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "DualPipeV"}},
         "parallelism.pipeline_parallel_schedule='DualPipeV' {changes} use 1F1B, GPipe or Interleaved1F1B"),
        ({"parallelism": {"tensor_parallel_degree": 3}}, "--gpus 8 is not divisible by its other degrees, 3 together"),
        ({"parallelism": {"fsdp_reshard_after_forward": "sometimes"}},
         "parallelism.fsdp_reshard_after_forward='sometimes' is not default, always or never"),
        ({"training": {"mixed_precision_reduce": "bfloat16"}},
         "training.mixed_precision_reduce='bfloat16' {changes} use float32"),
        ({"training": {"mixed_precision_param": "float8"}},
         "training.mixed_precision_param='float8' is not float32 or bfloat16"),
        ({"activation_checkpoint": {"memory_budget": 0.5}},
         "activation_checkpoint.memory_budget=0.5 {changes} use mode none or full"),
        ({"activation_checkpoint": {"mode": "half"}}, "activation_checkpoint.mode='half' is not none, full or selective"),
        ({"optimizer": {"param_groups": [{"optimizer_name": "A"}, {"optimizer_name": "B"}]}},
         "optimizer.param_groups=[{{'optimizer_name': 'A'}}, {{'optimizer_name': 'B'}}] {changes} use one optimizer for all"),
        ({"optimizer": {"name": "Muon"}}, "optimizer 'Muon' is not modelled; Adam and AdamW are"),
        ({"optimizer": {"implementation": "magic"}},
         "optimizer.implementation='magic' {changes} use one of fused, foreach, for-loop"),
        ({"training": {"max_context_length": 2048, "num_tokens_per_microbatch_per_dp_rank": 3000}},
         "3000 tokens per micro-batch are no whole sequences of max_context_length=2048"),
        ({"parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 3}},
         "a batch of 8 is not divisible by pipeline_parallel_microbatch_size=3"),
    ],
)  # fmt: skip
def test_what_torchtitan_says_and_is_not_modelled(said: dict[str, Any], line: str):
    refused(titan, "it: " + line.format(changes="changes memory in a way that is not modelled;"), said, 8)


def test_torchtitans_pipeline_in_tokens():
    """Releases after 0.3 set the number of micro-batches; the tokens are those of one micro-batch."""
    said = {
        "training": {"max_context_length": 2048, "num_tokens_per_microbatch_per_dp_rank": 4096},
        "parallelism": {"pipeline_parallel_degree": 2, "num_pp_microbatches": 6},
    }
    assert values(titan(said, 4), "micro_batch", "grad_accum", "pipeline_parallel") == [2, 6, 2]
