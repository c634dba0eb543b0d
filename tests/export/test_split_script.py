"""The script for FSDP2 of a split model and shared sequences, run on a pretended GPU as one rank of a fake group."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from zeroplan import SpecError, job
from zeroplan.export.files import export

#: What the script asks of a machine with GPUs, and what a pretended one says; weights without values are not initialised.
SAID = {
    '"cuda" if gpu else "cpu"': "DEVICE",
    'dist.init_process_group("nccl" if gpu else "gloo")': "",
    "    dist.destroy_process_group()\n": "",
    "    model.init_weights()\n": "",
    "torch.Generator(device)": "torch.Generator()",
    ", generator=data": "",
    "loss.item()": "0.0",
}


def script(folder: Path, **said: Any) -> str:
    config = {"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16,
              "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "tie_word_embeddings": True}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return export(job(config=str(folder), stage=3, seq_len=64, **said), "fsdp2").files[0].text


@pytest.mark.torch
def test_a_split_model_trains_on_shared_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Keys and values go round: attention is torch's ring, which takes no mask."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.distributed import device_mesh

    from zeroplan.verify.pretended.card import install
    from zeroplan.verify.pretended.fake_tensors import fake_tensors
    from zeroplan.verify.training.run import _real_meshes, fake_ranks
    from zeroplan.verify.watching.tracker import Tracker

    text = script(tmp_path, gpus=8, replicas=2, recompute="full", grad_accum=2, tensor_parallel=2, context_parallel=2)
    for there, instead in SAID.items():
        assert there in text
        text = text.replace(there, instead)
    device, original = install(), device_mesh.init_device_mesh

    def arranged(*arguments: Any, **named: Any) -> object:
        with unset_fake_temporarily():
            return original(*arguments, **named)

    monkeypatch.setattr(device_mesh, "init_device_mesh", arranged)
    monkeypatch.setattr(sys, "argv", ["script", str(tmp_path)])
    monkeypatch.setenv("STEPS", "1")
    tracker = Tracker(device=device)
    with (
        fake_ranks(job(model="llama-3.2-1b", gpus=8, stage=3), 0, device),
        fake_tensors(tracker, device, strided=True),
        tracker,
        _real_meshes(tracker),
    ):
        exec(compile(text, "<script>", "exec"), {"__name__": "script", "DEVICE": device})  # noqa: S102  what was written
    assert "step 1 of 1" in capsys.readouterr().out
    calls = Counter((call.operation, call.group) for call in tracker.recording.calls)
    assert calls["all_to_all", 2] == 2 * 2 * 2  # of two micro-batches and two layers, two ranks each


@pytest.mark.parametrize("said", [{"tensor_parallel": 2}, {"context_parallel": 2}])
def test_what_is_not_asked_for_is_not_in_it(said: dict[str, int], tmp_path: Path):
    text = script(tmp_path, gpus=8, **said)
    compile(text, "<script>", "exec")
    assert ("context_parallel(" in text, "parallelize_module(" in text) == (
        "context_parallel" in said,
        "tensor_parallel" in said,
    )


def test_experts_on_several_ranks_are_not_written():
    with pytest.raises(SpecError, match="no words for ep=8"):
        export(job(model="mixtral-8x7b", gpus=8, stage=3, expert_parallel=8), "fsdp2")
