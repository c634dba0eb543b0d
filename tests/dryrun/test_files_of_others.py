"""A file that a program trains with: what `--from` reads of it against a dry run of the program itself."""

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
    "said", [{"bf16": True, "gradient_checkpointing": True, "gradient_accumulation_steps": 2}, {"optim": "sgd"}], ids=str
)
def test_the_trainer_takes_what_is_read_of_its_arguments(tmp_path: Path, said: dict[str, Any]):
    """The Trainer (trainer.py, get_batch_samples) holds all micro-batches of a step: less than 0.01 %, and not in the estimate."""
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "args.json").write_text(json.dumps(ARGUMENTS | said))
    run = dry_run(str(SCRIPTS / "trainer_from_file.py"), "args.json", folder=tmp_path)
    answer = estimate(resolve(Request(from_file=str(tmp_path / "args.json"))).job)
    libraries = sum(int(line.n_bytes) for line in answer.workspaces)  # a dry run calls none
    batches = said.get("gradient_accumulation_steps", 1) * 3 * 8 * 4 * 512  # ids, labels and mask, int64
    assert 0 <= run.peak_bytes - (answer.peak_bytes - libraries) <= batches
