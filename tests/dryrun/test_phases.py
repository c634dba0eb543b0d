"""Loading, evaluation and saving, which a script does outside its training steps, have their own peaks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dryrun.running import SCRIPTS, Run, dry_run

pytestmark = pytest.mark.torch
pytest.importorskip("transformers")

_BLOCKS = 4 * (2 * 512 * 2048 + 2048 + 512)
"""Parameters of the model in ``validates.py``."""


def _line(script: str, code: str) -> str:
    """Return the file name and number of the script's line that contains ``code``."""
    lines = (SCRIPTS / script).read_text().splitlines()
    return f"{script}:{1 + next(at for at, line in enumerate(lines) if code in line)}"


def _phases(run: Run) -> dict[str, dict[str, Any]]:
    return {one["phase"]: one for one in run.answer["phases"]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a run of FSDP2 to the script's end: it validates after the first step, and gathers a full state dict to save it."""
    return dry_run("--gpus", "8", "--until-end", "--", str(SCRIPTS / "validates.py"), folder=tmp_path_factory.mktemp("whole"))


def test_saving_a_full_state_dict_gathers_the_whole_model(whole: Run):
    phases = _phases(whole)
    assert (len(whole.answer["steps"]), whole.answer["ended"]) == (4, "script ended")
    assert list(phases) == ["loading", "evaluation", "saving"]
    assert phases["saving"]["kinds"]["all-gather buffers"] == 4 * _BLOCKS
    assert phases["saving"]["line"] == _line("validates.py", "= get_model_state_dict")
    assert (phases["saving"]["after_step"], phases["evaluation"]["after_step"]) == (4, 1)
    assert whole.answer["steps"][-1]["held_kinds"]["optimizer state"] == pytest.approx(_BLOCKS, rel=0.001)
    assert whole.answer["steps"][-1]["held_bytes"] == pytest.approx(3 * _BLOCKS // 2, rel=0.01)
    sent = {one["phase"] for one in whole.answer["collectives"]}
    assert sent <= {"forward", "backward", "optimizer step"}


def test_loading_counts_the_whole_model_before_it_is_sharded(whole: Run):
    loading = _phases(whole)["loading"]
    assert loading["line"] == _line("validates.py", "fully_shard(block)")
    assert loading["peak_bytes"] > 4 * _BLOCKS
    assert loading["peak_bytes"] == whole.answer["initialisation"]["peak_bytes"]


def test_logits_that_the_trainer_keeps_are_the_peak_of_the_evaluation(tmp_path: Path):
    """The copy to the host holds the fp32 logits of 32 rows of 128 tokens twice. A real checkpoint is not deleted."""
    (tmp_path / "out" / "checkpoint-7").mkdir(parents=True)
    (tmp_path / "out" / "checkpoint-7" / "weights.bin").write_text("of a real run")
    pytest.importorskip("accelerate")
    run = dry_run("--", str(SCRIPTS / "trainer_validates.py"), folder=tmp_path)
    phases, logits = _phases(run), 4 * 32 * 128 * 8192
    assert list(phases) == ["loading", "evaluation", "saving"]
    assert phases["evaluation"]["kinds"]["logits and loss"] == pytest.approx(2 * logits, rel=0.001)
    assert phases["evaluation"]["peak_bytes"] > run.peak_bytes
    assert run.answer["ended"] == "steps taken"
    assert (tmp_path / "out" / "checkpoint-7" / "weights.bin").exists()
    replaced = {one["what"] for one in run.answer["stood_in"]}
    assert {"torch.save", "safetensors files", "deleting of older checkpoints"} <= replaced
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.deepspeed
def test_deepspeed_gathers_all_weights_to_save_them(tmp_path: Path):
    pytest.importorskip("deepspeed")
    run = dry_run("--gpus", "8", "--", str(SCRIPTS / "zero3_saves.py"), folder=tmp_path)
    saving = _phases(run)["saving"]
    assert saving["line"] == _line("zero3_saves.py", "save_16bit_model(")
    assert saving["peak_bytes"] > run.answer["steps"][0]["held_bytes"]
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".pt", ".bin")]


def test_copying_weights_is_not_saving_and_an_evaluation_may_record_gradients(tmp_path: Path):
    (tmp_path / "train.py").write_text(
        "import copy, torch\n"
        "model = torch.nn.Linear(256, 256, device='cuda')\n"
        "average = copy.deepcopy(model)\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "for step in range(9):\n"
        "    model.train()\n"
        "    model(torch.ones(4, 256, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n"
        "    average.load_state_dict(model.state_dict())\n"
        "    model.eval()\n"
        "    model(torch.ones(4096, 256, device='cuda'))\n"
    )
    run = dry_run("--", "train.py", folder=tmp_path)
    phases = _phases(run)
    assert list(phases) == ["loading", "evaluation"]
    assert (len(run.answer["steps"]), phases["evaluation"]["times"]) == (2, 2)
    assert phases["evaluation"]["peak_bytes"] > 2 * 4 * 4096 * 256
    assert run.peak_bytes < 4 * 4096 * 256


def test_an_endless_script_gets_an_answer_at_the_timeout(tmp_path: Path):
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(8, 8, device='cuda')\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "while True:\n"
        "    model(torch.ones(4, 8, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n"
    )
    flags = ("--until-end", "--timeout", "12", "-q")
    run = dry_run("--", "train.py", folder=tmp_path, flags=flags)
    assert run.code == 0, run.errors
    assert "stopped at --timeout" in run.output


_LOADS = """
import torch
for size in (60, 100):
    loaded = torch.empty(size << 20, dtype=torch.uint8, device="cuda")
    del loaded
    torch.cuda.empty_cache() if size == 60 else None
weights = torch.zeros(1 << 18, device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([weights], lr=0.1)
for _ in range(2):
    weights.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print(torch.cuda.max_memory_reserved())
"""


def test_memory_reserved_while_loading_stays_reserved(tmp_path: Path):
    (tmp_path / "loads.py").write_text(_LOADS)
    run = dry_run("--", "loads.py", folder=tmp_path, flags=("--json", "--until-end"))
    reserved = run.answer["allocator"][0]["reserved_bytes"]
    assert 100 << 20 <= reserved <= 110 << 20
    assert str(reserved) in run.errors.split()
