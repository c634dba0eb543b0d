"""The estimate of a Trainer's arguments file, read with `--from`, agrees with a dry run of the Trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.dryrun.running import SCRIPTS, dry_run
from zeroplan.estimator import estimate
from zeroplan.resolve import Request, resolve

pytestmark = pytest.mark.torch
pytest.importorskip("accelerate")

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1408,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 32000,
    "max_position_embeddings": 2048, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
ARGUMENTS = {
    "model_name_or_path": "small", "max_length": 512, "attn_implementation": "sdpa", "output_dir": "out", "max_steps": 2,
    "per_device_train_batch_size": 4, "report_to": "none", "save_strategy": "no",
}  # fmt: skip


@pytest.mark.parametrize(
    "said",
    [
        {"bf16": True, "gradient_checkpointing": True, "gradient_accumulation_steps": 2},
        {"optim": "sgd"},
        {"bf16": True, "dtype": "bfloat16"},
    ],
    ids=str,
)
def test_the_estimate_of_a_trainers_arguments_agrees_with_its_dry_run(tmp_path: Path, said: dict[str, Any]):
    """The estimate leaves out that the Trainer holds all micro-batches of a step (trainer.py, get_batch_samples)."""
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "args.json").write_text(json.dumps(ARGUMENTS | said))
    run = dry_run(str(SCRIPTS / "trainer_from_file.py"), "args.json", folder=tmp_path)
    answer = estimate(resolve(Request(from_file=str(tmp_path / "args.json"))).job)
    libraries = sum(int(line.n_bytes) for line in answer.workspaces)  # a dry run runs no library kernels
    batches = said.get("gradient_accumulation_steps", 1) * 3 * 8 * 4 * 512  # ids, labels and mask, int64
    assert 0 <= run.peak_bytes - (answer.peak_bytes - libraries) <= batches
