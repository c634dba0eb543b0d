"""Which files of TRL make the training step a part of a loop, and with which options."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeroplan.catalog.setups.reading import read_setup
from zeroplan.resolve import Request, resolve
from zeroplan.workflow.loop import loop_of_file

ARGUMENTS = (
    "--model_name_or_path meta-llama/Llama-3.1-8B --per_device_train_batch_size 2 --bf16 --max_length 2048 --output_dir out"
)
FILE = "model_name_or_path: Qwen/Qwen2.5-7B-Instruct\nper_device_train_batch_size: 8\nbf16: true\noutput_dir: out\n"


@pytest.mark.parametrize("program", ["trl dpo", "python trl/scripts/dpo.py", "accelerate launch -m trl.scripts.dpo"])
def test_a_script_of_dpo_is_told_by_its_name(tmp_path: Path, program: str):
    (tmp_path / "train.sh").write_text(f"{program} {ARGUMENTS}\n")
    assert read_setup(tmp_path / "train.sh", gpus=8).loop["workflow"] == "dpo"


@pytest.mark.parametrize("line", ["loss_type: sigmoid", "rpo_alpha: 1.0", "precompute_ref_log_probs: false", "beta: 0.1"])
def test_a_file_of_dpo_is_told_by_its_keys(tmp_path: Path, line: str):
    (tmp_path / "dpo.yaml").write_text(f"{FILE}{line}\n")
    assert read_setup(tmp_path / "dpo.yaml", gpus=8).loop["workflow"] == "dpo"


@pytest.mark.parametrize("line", ["", "loss_type: nll", "beta: 0.04\nnum_generations: 8"])
def test_other_files_are_not_of_dpo(tmp_path: Path, line: str):
    (tmp_path / "sft.yaml").write_text(f"{FILE}{line}\n")
    assert read_setup(tmp_path / "sft.yaml", gpus=8).loop.get("workflow") != "dpo"


def test_a_file_of_grpo_with_vllm_has_its_options_and_its_length(tmp_path: Path):
    said = "num_generations: 8\nmax_prompt_length: 512\nmax_completion_length: 1024\nuse_vllm: true\nbeta: 0.04\n"
    (tmp_path / "grpo.yaml").write_text(f"{FILE}{said}vllm_gpu_memory_utilization: 0.25\n")
    setup = read_setup(tmp_path / "grpo.yaml", gpus=8)
    assert setup.loop == {
        "workflow": "grpo", "beta": 0.04, "num_generations": 8, "max_completion_length": 1024, "vllm_gpu_memory_utilization": 0.25,
    }  # fmt: skip
    assert setup.flags["seq_len"].value == 1536
    assert not setup.matters


def test_logits_that_accelerate_keeps_are_none_of_a_loop_without_logits(tmp_path: Path):
    (tmp_path / "acc.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\nfsdp_config:\n  fsdp_version: 2\n"
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
    )
    (tmp_path / "dpo.sh").write_text(f"accelerate launch --config_file acc.yaml trl/scripts/dpo.py {ARGUMENTS}\n")
    found = resolve(Request(from_file=str(tmp_path / "dpo.sh"), gpu="h100"))
    assert found.job.recipe.keep_logits
    assert loop_of_file(found.job, found.loop).answer.job.recipe.keep_logits is False
