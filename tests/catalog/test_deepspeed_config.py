"""Reads DeepSpeed configurations: each becomes the job that it describes, or one line says why not."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from zeroplan.catalog.deepspeed_config import Beside, config_of, parsed_config
from zeroplan.errors import SpecError
from zeroplan.resolve import Request, Resolved, resolve
from zeroplan.spec.recipe import DeepSpeedOptions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

#: As transformers' documentation of DeepSpeed has it for stage 3, offload left out.
TRAINERS: dict[str, Any] = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}


@pytest.fixture
def resolved(tmp_path: Path) -> Callable[..., Resolved]:
    """Resolve a job of Llama 2 7B on 8 GPUs with a configuration and the flags beside it."""

    def resolved(config: object, *, chosen: tuple[str, ...] = (), **said: Any) -> Resolved:
        file = tmp_path / "ds_config.json"
        file.write_text(config if isinstance(config, str) else json.dumps(config))
        return resolve(Request(model="llama-2-7b", gpus=8, deepspeed_config=str(file), **said), chosen=chosen)

    return resolved


def test_the_trainers_own_example_becomes_the_job_it_runs(resolved: Callable[..., Resolved]):
    job, notes, *_ = resolved(TRAINERS, micro_batch=2, grad_accum=4, seq_len=4096)
    assert (job.recipe.engine, job.recipe.zero_stage, job.recipe.precision) == ("deepspeed", 3, "bf16-mixed")
    assert (job.recipe.optimizer, job.recipe.optimizer_impl) == ("adamw", "fused")
    assert (job.batch.micro_batch_size, job.batch.grad_accum_steps) == (2, 4)
    assert job.recipe.deepspeed == DeepSpeedOptions(
        overlap_comm=True,
        reduce_bucket_size=4096 * 4096,
        stage3_prefetch_bucket_size=int(0.9 * 4096 * 4096),
        stage3_param_persistence_threshold=10 * 4096,
    )
    assert [note.split()[1] for note in notes] == [
        "bf16.enabled", "zero_optimization.reduce_bucket_size", "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.stage3_param_persistence_threshold",
    ]  # fmt: skip


def test_the_trainer_fills_in_no_option_of_stage_3_below_it(resolved: Callable[..., Resolved]):
    zero = {"stage": 2, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto", "overlap_comm": "auto"}
    options = resolved({"zero_optimization": zero}).job.recipe.deepspeed
    assert options == DeepSpeedOptions(reduce_bucket_size=4096 * 4096)


def test_options_stand_as_json_writes_them_with_their_prefix_or_without(resolved: Callable[..., Resolved]):
    zero = {"stage": 3, "reduce_bucket_size": 5e7, "prefetch_bucket_size": 3, "stage3_max_live_parameters": 4}
    options = resolved({"zero_optimization": zero}).job.recipe.deepspeed
    assert options == DeepSpeedOptions(
        reduce_bucket_size=50_000_000, stage3_prefetch_bucket_size=3, stage3_max_live_parameters=4
    )


BF16, BOTH = {"enabled": True}, {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


@pytest.mark.parametrize(
    ("config", "asked", "precision"),
    [
        ({}, None, "fp32"),
        ({"bf16": BF16}, None, "bf16-mixed"),
        ({"bfloat16": BF16}, "bf16-mixed", "bf16-mixed"),
        ({"bf16": {**BF16, **BOTH}}, None, "bf16"),
        ({"bf16": {"enabled": False, **BOTH}}, None, "fp32"),
        ({"fp16": BF16, "bf16": {"enabled": "auto"}}, None, "fp16-mixed"),
        ({"fp16": {"enabled": "auto"}}, None, "fp16-mixed"),
        ({"fp16": {"enabled": "auto"}}, "fp32", "fp32"),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, "fp16-mixed", "fp16-mixed"),
    ],
)
def test_precision(resolved: Callable[..., Resolved], config: dict[str, Any], asked: str | None, precision: str):
    assert resolved(config, precision=asked).job.recipe.precision == precision


@pytest.mark.parametrize(
    ("config", "said", "micro", "steps"),
    [
        ({}, {}, 1, 1),
        ({"train_micro_batch_size_per_gpu": 4}, {"grad_accum": 2}, 4, 2),
        ({"train_batch_size": 64}, {}, 8, 1),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 2}, {}, 4, 2),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": "auto"}, {"micro_batch": 2}, 2, 4),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1}, {}, 8, 1),
    ],
)
def test_two_numbers_of_the_batch_make_the_third(
    resolved: Callable[..., Resolved], config: dict[str, Any], said: dict[str, int], micro: int, steps: int
):
    batch = resolved(config, **said).job.batch
    assert (batch.micro_batch_size, batch.grad_accum_steps) == (micro, steps)


@pytest.mark.parametrize(
    ("optimizer", "name", "implementation"),
    [
        ({"type": "Adam"}, "adam", "fused"),
        ({"type": "AdamW", "params": {"torch_adam": True}}, "adamw", "foreach"),
        ({"type": "Muon", "params": {"lr": 0.02, "muon_lr": 0.02, "ns_method": "gram"}}, "muon", None),
        ({"type": "adamw", "params": {"torch_adam": True, "foreach": False}}, "adamw", "forloop"),
        ({}, "sgd", None),
    ],
)
def test_the_optimizer(resolved: Callable[..., Resolved], optimizer: dict[str, Any], name: str, implementation: str | None):
    asked = None if optimizer else "sgd"
    recipe = resolved({"optimizer": optimizer}, optimizer=asked).job.recipe
    assert (recipe.optimizer, recipe.optimizer_impl) == (name, implementation)


def test_gradients_are_summed_in_another_dtype_where_it_is_another(resolved: Callable[..., Resolved]):
    for dtype, option in (("fp32", "fp32"), ("torch.bfloat16", "param"), (None, "param")):
        config = {"bf16": BF16, "zero_optimization": {"stage": 2}, "data_types": {"grad_accum_dtype": dtype}}
        assert resolved(config).job.recipe.deepspeed.grad_accum_dtype == option


def test_what_is_said_twice_is_said_once(resolved: Callable[..., Resolved]):
    said = {"stage": 3, "engine": "deepspeed", "precision": "bf16-mixed", "optimizer": "adamw", "optimizer_impl": "fused"}
    options = DeepSpeedOptions(overlap_comm=True, zero_init=False)
    job = resolved(TRAINERS, **said, deepspeed=options, chosen=("overlap_comm", "sub_group_size")).job
    assert job.recipe.deepspeed.zero_init is False
    assert job.recipe.deepspeed.overlap_comm is True


def test_a_flag_goes_before_what_would_be_filled_in(resolved: Callable[..., Resolved]):
    job, notes, *_ = resolved(TRAINERS, deepspeed=DeepSpeedOptions(reduce_bucket_size=7))
    assert job.recipe.deepspeed.reduce_bucket_size == 7
    assert not any("reduce_bucket_size" in note for note in notes)


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"stage": 2}, "zero_optimization.stage is 3"),
        ({"engine": "fsdp2"}, "its engine is deepspeed"),
        ({"optimizer": "sgd"}, "optimizer.type is adamw"),
        ({"precision": "bf16"}, "bf16.enabled is bf16-mixed"),
        ({"deepspeed": DeepSpeedOptions(overlap_comm=False)}, "zero_optimization.overlap_comm is true"),
        ({"chosen": ("overlap_comm",)}, "zero_optimization.overlap_comm is true"),
    ],
)
def test_what_contradicts_it_is_refused(resolved: Callable[..., Resolved], said: dict[str, Any], says: str):
    with pytest.raises(SpecError, match="contradicts") as refused:
        resolved(TRAINERS, **said)
    assert says in str(refused.value)


def test_a_key_that_is_not_known_is_named_and_no_error(resolved: Callable[..., Resolved]):
    config = {"frobnicate": 1, "zero_optimization": {"stage": 1, "stage3_frob": 2}, "tensorboard": {"enabled": True}}
    notes = list(resolved(config, seq_len=128).notes)
    assert notes == [
        "'ds_config.json': 'frobnicate' is not known here and left out",
        "'ds_config.json': 'zero_optimization.stage3_frob' is not known here and left out",
    ]


REFUSED: dict[str, Any] = {
    "offload_optimizer.ratio": {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
    "offload_optimizer.super_offload": {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}},
    },
    "offload_optimizer.device": {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "disk"}}},
    "offload_param.device": {"zero_optimization": {"stage": 3, "offload_param": {"device": "disk"}}},
    "aio.use_gds": {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}, "aio": {"use_gds": True}},
    "cpu_offload": {"zero_optimization": {"stage": 2, "cpu_offload": True}},
    "zero_hpz_partition_size": {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": "node"}},
    "zero_quantized_weights": {"zero_optimization": {"stage": 3, "zero_quantized_weights": "int8"}},
    "zero_quantized_nontrainable_weights": {"zero_optimization": {"zero_quantized_nontrainable_weights": True}},
    "round_robin_gradients": {"zero_optimization": {"stage": 2, "round_robin_gradients": True}},
    "mics_shard_size": {"zero_optimization": {"stage": 3, "mics_shard_size": 4}},
    "activation_checkpointing.partition_activations": {"activation_checkpointing": {"partition_activations": True}},
    "activation_checkpointing.cpu_checkpointing": {"activation_checkpointing": {"cpu_checkpointing": True}},
    "fp8": {"fp8": {"enabled": True}},
    "torch_autocast": {"torch_autocast": {"enabled": True}},
    "tensor_parallel": {"tensor_parallel": {"autotp_size": 2}},
    "fp16.fp16_master_weights_and_grads": {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
    "bf16.bf16_master_weights_and_grads": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    "keep_in_fp32_modules": {"data_types": {"keep_in_fp32_modules": ["norm"]}},
    "optimizer.type='Lamb'": {"optimizer": {"type": "Lamb"}},
    "optimizer.params.ns_method='standard'": {"optimizer": {"type": "Muon", "params": {"ns_method": "standard"}}},
    "optimizer.params.per_head_muon=": {"optimizer": {"type": "Muon", "params": {"per_head_muon": True}}},
    "grad_accum_dtype='fp16'": {"bf16": BF16, "data_types": {"grad_accum_dtype": "fp16"}},
    "communication_data_type='fp32'": {"bf16": BF16, "communication_data_type": "fp32"},
    "param_dtype='bf16'": {"data_types": {"param_dtype": "bf16"}},
    "enables bf16 and fp16": {"bf16": BF16, "fp16": BF16},
    "gradient_clipping=1.0 needs the norm": {
        "gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "compute_grad_norm": False},
    },
    "train_batch_size=7": {"train_batch_size": 7},
    "stage=4": {"zero_optimization": {"stage": 4}},
    "stage='auto'": {"zero_optimization": {"stage": "auto"}},
    "zero_optimization=True": {"zero_optimization": True},
    "reduce_bucket_size='big'": {"zero_optimization": {"reduce_bucket_size": "big"}},
    "reduce_bucket_size=0": {"zero_optimization": {"reduce_bucket_size": 0}},
    "bf16-mixed='yes'": {"bf16": {"enabled": "yes"}},
    "gradient_clipping=-1": {"gradient_clipping": -1},
    "gradient_clipping=True": {"gradient_clipping": True},
    "train_micro_batch_size_per_gpu=1.5": {"train_micro_batch_size_per_gpu": 1.5},
    "gradient_accumulation_steps=0": {"gradient_accumulation_steps": 0},
    "data_types.grad_accum_dtype=32": {"data_types": {"grad_accum_dtype": 32}},
    "optimizer='AdamW'": {"optimizer": "AdamW"},
    "holds [], not a JSON object": [],
    "is not JSON": "{'stage': 3}",
    "'bf16' twice": '{"bf16": {}, "bf16": {}}',
    "nested too deep": '{"a":' * 100_000,
}  # fmt: skip


@pytest.mark.parametrize("says", REFUSED)
def test_what_is_not_modelled_or_makes_no_sense_is_refused_in_one_line(resolved: Callable[..., Resolved], says: str):
    with pytest.raises(SpecError) as refused:
        resolved(REFUSED[says])
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "ds_config.json" in str(refused.value)


def test_numbers_that_json_writes_with_a_point_are_whole(resolved: Callable[..., Resolved]):
    """Such as 2e8, which DeepSpeed's own documentation writes for bucket sizes."""
    job = resolved({"zero_optimization": {"stage": 2.0, "reduce_bucket_size": 2e8}}).job
    assert (job.recipe.zero_stage, job.recipe.deepspeed.reduce_bucket_size) == (2, 200_000_000)


@pytest.mark.parametrize(
    "harmless",
    [
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": None,
                "zero_hpz_partition_size": 1,
                "memory_efficient_linear": True,
            }
        },
        {
            "zero_optimization": {
                "stage": 2,
                "round_robin_gradients": False,
                "leaf_module": {},
                "offload_optimizer": {"device": "none"},
            }
        },
        {"zero_optimization": {"stage": 3, "round_robin_gradients": True}},
        {"activation_checkpointing": {"partition_activations": False, "number_checkpoints": 4}, "amp": {"enabled": False}},
        {"tensor_parallel": {"autotp_size": 0}, "sequence_parallel_size": 1, "compile": {"deepcompile": False}},
    ],
)
def test_what_is_off_is_left_alone(resolved: Callable[..., Resolved], harmless: dict[str, Any]):
    assert resolved(harmless, seq_len=128).notes == ()


@pytest.mark.parametrize(("said", "kept"), [({}, True), ({"memory_efficient_linear": False}, False)])
def test_whose_linear_runs_is_read(resolved: Callable[..., Resolved], said: dict[str, Any], kept: bool):
    assert resolved({"zero_optimization": {"stage": 3, **said}}).job.recipe.deepspeed.memory_efficient_linear is kept


def test_zero_plus_plus_is_read(resolved: Callable[..., Resolved]):
    said = {"zero_hpz_partition_size": 4, "zero_quantized_weights": True, "zero_quantized_gradients": True}
    options = resolved({"zero_optimization": {"stage": 3, **said}}).job.recipe.deepspeed
    assert {key: getattr(options, key) for key in said} == said


def test_what_goes_to_host_memory_is_read(resolved: Callable[..., Resolved]):
    sections = {
        "offload_optimizer": {"device": "cpu", "pin_memory": False, "buffer_count": 4, "fast_init": False},
        "offload_param": {"device": "cpu"},
    }
    options = resolved({"zero_optimization": {"stage": 3, **sections}}).job.recipe.deepspeed
    assert options.offloads
    assert (options.offload_optimizer, options.offload_optimizer_pin_memory) == ("cpu", False)
    assert (options.offload_param, options.offload_param_pin_memory) == ("cpu", True)


def test_what_goes_to_nvme_is_read(resolved: Callable[..., Resolved]):
    sections = {
        "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "buffer_count": 8, "pipeline_read": True},
        "offload_param": {"device": "nvme", "nvme_path": "/local_nvme", "buffer_size": 1e8, "max_in_cpu": 1e9},
    }
    read = resolved({"zero_optimization": {"stage": 3, **sections}, "aio": {"block_size": 262144}})
    options = read.job.recipe.deepspeed
    assert (options.offload_optimizer, options.offload_optimizer_buffer_count) == ("nvme", 8)
    assert (options.offload_optimizer_pipeline_read, options.offload_optimizer_pipeline_write) == (True, False)
    assert (options.offload_param_buffer_size, options.offload_param_max_in_cpu) == (10**8, 10**9)
    assert [note for note in read.notes if "aio.block_size=262144 is left out" in note]


def test_a_flag_that_offloads_less_than_the_file_is_refused(resolved: Callable[..., Resolved]):
    file = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    with pytest.raises(SpecError, match=r"offload_optimizer\.device is cpu"):
        resolved(file, offload_optimizer="none")


def test_the_reader_alone(tmp_path: Path):
    (tmp_path / "ds.json").write_text('{"bf16": {"enabled": true}}')
    config = config_of(*parsed_config(tmp_path / "ds.json"), Beside(hidden_size=8, ranks=2))
    assert {name: stated.value for name, stated in config.flags.items()} == {
        "engine": "deepspeed", "stage": 0, "precision": "bf16-mixed",
    }  # fmt: skip
    assert (config.options, config.notes) == ({}, ())


def test_who_has_no_configuration_does_not_pay_for_it():
    loaded = "import sys, zeroplan.cli.app; sys.exit('zeroplan.catalog.deepspeed_config' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], check=False).returncode == 0
