"""The Trainer's callback gives the command line's answer for the same arguments, and stops a job that cannot fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
from zeroplan import estimate  # noqa: E402  after the check
from zeroplan.hooks import MemoryCheck, WillNotFitError  # noqa: E402
from zeroplan.resolve import Request, resolve  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::FutureWarning")]  # old names in transformers
CONFIG = transformers.LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=256,
    max_position_embeddings=512,
)  # fmt: skip


def arguments(folder: Path, **said: Any) -> Any:
    return transformers.TrainingArguments(output_dir=str(folder), report_to=[], per_device_train_batch_size=2, **said)


def begun(args: Any, model: Any, **said: Any) -> MemoryCheck:
    check = MemoryCheck(**said)
    check.on_train_begin(args, transformers.TrainerState(), transformers.TrainerControl(), model=model)
    return check


def test_it_says_what_the_command_line_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    args, model = arguments(tmp_path, gradient_checkpointing=True), transformers.LlamaForCausalLM(CONFIG)
    check = begun(args, model, seq_len=128, gpu="l4-24gb")
    (tmp_path / "args.json").write_text(json.dumps(args.to_dict(), default=str))
    (tmp_path / "config.json").write_text(CONFIG.to_json_string(use_diff=False))
    asked = Request(
        from_file=str(tmp_path / "args.json"), config=str(tmp_path / "config.json"), gpus=1, gpu="l4-24gb", seq_len=128
    )
    assert check.predicted is not None
    assert check.predicted.peak_bytes == estimate(resolve(asked).job).peak_bytes
    assert check.predicted.job.recipe.recompute == "full"
    assert "zeroplan: It fits NVIDIA L4" in capsys.readouterr().err


def test_what_cannot_fit_is_stopped_or_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    args, model = arguments(tmp_path), transformers.LlamaForCausalLM(CONFIG)
    args.per_device_train_batch_size = 200_000
    with pytest.raises(WillNotFitError, match="It does not fit NVIDIA L4"):
        begun(args, model, seq_len=512, gpu="l4-24gb")
    assert begun(args, model, seq_len=512, gpu="l4-24gb", if_too_large="warn").predicted.fits is False  # type: ignore[union-attr]
    assert "zeroplan: It does not fit" in capsys.readouterr().err


def test_adapters_are_those_of_the_model(tmp_path: Path):
    adapted = peft.get_peft_model(
        transformers.LlamaForCausalLM(CONFIG), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    )
    check = begun(arguments(tmp_path), adapted, seq_len=128, gpu="l4-24gb")
    assert check.predicted is not None
    trained = sum(one.numel() for one in adapted.parameters() if one.requires_grad)
    assert check.predicted.trained_parameters == trained


def test_what_is_not_modelled_is_said_and_the_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = transformers.LlamaForCausalLM(CONFIG)
    assert begun(arguments(tmp_path), model, seq_len=128).predicted is None
    assert "cannot check whether this job fits: there is no GPU here" in capsys.readouterr().err
    assert begun(arguments(tmp_path, optim="galore_adafactor"), model, seq_len=128, gpu="l4-24gb").predicted is None
    assert "optim='galore_adafactor'" in capsys.readouterr().err


def test_what_matters_and_is_not_counted_is_said_beside_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = transformers.LlamaForCausalLM(CONFIG)
    assert begun(arguments(tmp_path, label_smoothing_factor=0.1), model, seq_len=128, gpu="l4-24gb").predicted is not None
    assert "label_smoothing_factor=0.1 takes memory that is not counted" in capsys.readouterr().err
