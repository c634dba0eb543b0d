"""``check_memory`` and Lightning's callback give the command line's answer, and stop a job that cannot fit."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.catalog.setups.test_setups import TITAN
from zeroplan import estimate
from zeroplan.hooks import WillNotFitError, check_memory
from zeroplan.resolve import Request, resolve


def test_a_loop_of_ones_own_asks_by_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """The launcher's environment gives the number of ranks; only rank 0 prints."""
    file = tmp_path / "mine.toml"
    file.write_text(TITAN)
    monkeypatch.setenv("WORLD_SIZE", "8")
    found = check_memory(from_file=str(file), gpu="h100-sxm-80gb")
    asked = Request(from_file=str(file), gpus=8, gpu="h100-sxm-80gb")
    assert found is not None
    assert found.peak_bytes == estimate(resolve(asked).job).peak_bytes
    assert "zeroplan: It fits NVIDIA H100" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "3")
    check_memory(from_file=str(file), gpu="h100-sxm-80gb")
    assert capsys.readouterr().err == ""


def test_a_run_that_cannot_fit_is_stopped_or_warned_of(capsys: pytest.CaptureFixture[str]):
    said: dict[str, Any] = {"model": "llama-3.1-8b", "gpu": "l4-24gb", "gpus": 1, "seq_len": 4096}
    with pytest.raises(WillNotFitError, match="It does not fit NVIDIA L4"):
        check_memory(**said)
    found = check_memory(**said, if_too_large="warn")
    assert found is not None
    assert found.fits is False
    assert "does not fit" in capsys.readouterr().err
    assert check_memory(model="nobody", gpu="l4-24gb") is None
    assert "cannot check whether this job fits: unknown model 'nobody'" in capsys.readouterr().err


@pytest.fixture
def lightning(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The callback, with a stand-in for Lightning that has only the base class."""
    package, module = ModuleType("lightning"), ModuleType("lightning.pytorch")
    module.Callback = type("Callback", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lightning", package)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", module)
    monkeypatch.delitem(sys.modules, "zeroplan.hooks.lightning", raising=False)  # an earlier test may have imported it
    from zeroplan.hooks import LightningMemoryCheck

    return LightningMemoryCheck


def a_trainer(strategy: str, **said: Any) -> SimpleNamespace:
    own = {"num_nodes": 1, "world_size": 8, "precision": "bf16-mixed", "accumulate_grad_batches": 4, "is_global_zero": True}
    return SimpleNamespace(strategy=type(strategy, (), {"config": {"zero_optimization": {"stage": 3}}})(), **(own | said))


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [("FSDPStrategy", ("fsdp1", 3)), ("DDPStrategy", ("ddp", 0)), ("DeepSpeedStrategy", ("deepspeed", 3)),
     ("ModelParallelStrategy", ("fsdp2", 3))],
)  # fmt: skip
def test_lightnings_trainer_is_read(lightning: Any, strategy: str, expected: tuple[str, int]):
    check = lightning(model="llama-3.2-1b", gpu="h100-sxm-80gb", micro_batch=2, seq_len=1024)
    check.setup(a_trainer(strategy), SimpleNamespace(), "fit")
    recipe, batch = check.predicted.job.recipe, check.predicted.job.batch
    assert (recipe.engine, recipe.zero_stage, recipe.precision) == (*expected, "bf16-mixed")
    assert (batch.micro_batch_size, batch.grad_accum_steps, check.predicted.job.mesh.world_size) == (2, 4, 8)


def test_lightnings_run_is_stopped_before_its_model_is_there(lightning: Any, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(WillNotFitError, match="It does not fit"):
        lightning(model="llama-3.1-8b", gpu="l4-24gb").setup(a_trainer("DDPStrategy"), SimpleNamespace(), "fit")
    unasked = lightning(model="llama-3.1-8b", gpu="l4-24gb")
    unasked.setup(a_trainer("DDPStrategy"), SimpleNamespace(), "test")
    assert unasked.predicted is None
    lightning(gpu="l4-24gb").setup(a_trainer("DDPStrategy"), SimpleNamespace(), "fit")
    assert "the module has no model.config" in capsys.readouterr().err


def test_a_hook_takes_no_third_of_a_second(tmp_path: Path):
    """Measures the second call, since the first one in a process imports modules."""
    (tmp_path / "mine.yaml").write_text(
        yaml.safe_dump({"trainer": {"strategy": "fsdp", "devices": 8, "precision": "bf16-mixed"}})
    )
    said = {"from_file": str(tmp_path / "mine.yaml"), "model": "llama-3.1-70b", "gpu": "h100-sxm-80gb", "seq_len": 8192}
    check_memory(**said, if_too_large="warn")
    begun = time.process_time()
    check_memory(**said, if_too_large="warn")
    assert time.process_time() - begun < 0.3


def test_a_loop_that_cannot_fit_is_stopped_though_its_training_step_fits(tmp_path: Path):
    """The training step of a 1B model fits 22 GiB; with a reference model beside it the loop does not."""
    data = {"model_name_or_path": "meta-llama/Llama-3.2-1B", "per_device_train_batch_size": 1, "max_length": 64, "bf16": True,
            "gradient_checkpointing": True}  # fmt: skip
    said: dict[str, Any] = {"from_file": str(tmp_path / "mine.json"), "gpu": "l4-24gb", "gpus": 1}
    (tmp_path / "mine.json").write_text(json.dumps(data))
    assert check_memory(**said) is not None
    (tmp_path / "mine.json").write_text(json.dumps(data | {"beta": 0.1}))
    with pytest.raises(WillNotFitError, match=r"With all phases of its loop \(dpo\): It does not fit"):
        check_memory(**said)
