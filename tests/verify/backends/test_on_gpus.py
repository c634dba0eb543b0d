"""Runs on real GPUs, skipped without one. One card as a rank of two must count the same bytes as two cards over NCCL."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from zeroplan.cli.app import main
from zeroplan.measurement import Measurement
from zeroplan.records import read_record

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.torch, pytest.mark.skipif(not GPUS, reason="no GPU here")]
SMALL = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 4096,
}  # fmt: skip
ENGINES = [
    ("fsdp2", 2), ("fsdp2", 3), ("ddp", 0), ("ddp", 1),
    *(pytest.param("deepspeed", stage, marks=[
        pytest.mark.deepspeed, pytest.mark.skipif(find_spec("deepspeed") is None, reason="no DeepSpeed")])
      for stage in (0, 1, 2, 3)),
]  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def measured(folder: Path, engine: str, stage: int, *arguments: str) -> list[Measurement]:
    """Run a small job on cards, require exit code 0 (the estimate is within 2 %), and return the records of its ranks."""
    job = ("--config", "config.json", "--engine", engine, "--stage", str(stage), "--gpus", "2", "--seq-len", "1024")
    with pytest.raises(SystemExit) as ended:
        main(["verify", *job, "--backend", "cuda", "--record-dir", str(folder), *arguments])
    assert (ended.value.code or 0) == 0
    return sorted((read_record(path) for path in folder.glob("*.json")), key=lambda one: one.rank)


@pytest.mark.parametrize(("engine", "stage"), ENGINES)
def test_one_card_as_a_rank_of_two_agrees_with_the_estimate(here: Path, engine: str, stage: int):
    (record,) = measured(here / "alone", engine, stage, "--as-rank", "0")
    assert (record.tensors, record.process_group) == ("cuda", "fake")


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("engine", "stage"), ENGINES)
def test_a_fake_process_group_shows_what_nccl_shows(here: Path, engine: str, stage: int):
    (alone,) = measured(here / "alone", engine, stage, "--as-rank", "0")
    together = measured(here / "together", engine, stage, "--nproc", "2")
    assert [one.process_group for one in together] == ["nccl", "nccl"]
    peaks = [[(phase.phase, phase.peak_bytes) for phase in one.steady.phases] for one in (alone, together[0])]
    assert peaks[0] == peaks[1]
