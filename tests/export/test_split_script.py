"""The FSDP2 script with tensor and context parallelism, run on the fake GPU as one rank of a fake group."""

from __future__ import annotations

import io
import json
import os
import sys
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.simulated import in_a_process_of_its_own
from zeroplan import SpecError, job
from zeroplan.export.files import export
from zeroplan.verify.replaced import replaced

#: Lines of the script that need a machine with GPUs, and their replacements here. Fake weights are not initialised.
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
def test_a_script_with_tensor_and_context_parallelism_trains(tmp_path: Path):
    """Ranks pass keys and values around: attention is torch's ring, which takes no mask."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    text = script(tmp_path, gpus=8, replicas=2, recompute="full", grad_accum=2, tensor_parallel=2, context_parallel=2)
    for there, instead in SAID.items():
        assert there in text
        text = text.replace(there, instead)
    printed, calls = in_a_process_of_its_own(_run, text, tmp_path)
    assert "step 1 of 1" in printed
    assert calls["all_to_all", 2] == 2 * 2 * 2  # 2 micro-batches x 2 layers x 2


def _run(text: str, folder: Path) -> tuple[str, Counter[tuple[str, int]]]:
    """Run a script as rank 0 of 8; return what it prints, and its collectives by kind and size of group."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.distributed import device_mesh

    from zeroplan.verify.fake_cuda.fake_tensors import fake_tensors
    from zeroplan.verify.fake_cuda.installed import CUDA, install_node
    from zeroplan.verify.training.run import _real_meshes, fake_ranks
    from zeroplan.verify.watching.tracker import Tracker

    install_node()
    original, tracker, printed = device_mesh.init_device_mesh, Tracker(device=CUDA), io.StringIO()

    def arranged(*arguments: Any, **named: Any) -> object:
        with unset_fake_temporarily():
            return original(*arguments, **named)

    with (
        replaced(device_mesh, "init_device_mesh", arranged),
        replaced(sys, "argv", ["script", str(folder)]),
        mock.patch.dict(os.environ, STEPS="1", LOCAL_RANK="0"),
        redirect_stdout(printed),
        fake_ranks(job(model="llama-3.2-1b", gpus=8, stage=3), 0, CUDA),
        fake_tensors(tracker, CUDA, strided=True),
        tracker,
        _real_meshes(tracker),
    ):
        exec(compile(text, "<script>", "exec"), {"__name__": "script", "DEVICE": CUDA})  # noqa: S102  what was written
    return printed.getvalue(), Counter((call.operation, call.group) for call in tracker.recording.calls)


@pytest.mark.parametrize("said", [{"tensor_parallel": 2}, {"context_parallel": 2}])
def test_the_script_has_only_the_parallelism_that_is_asked_for(said: dict[str, int], tmp_path: Path):
    text = script(tmp_path, gpus=8, **said)
    compile(text, "<script>", "exec")
    assert ("context_parallel(" in text, "parallelize_module(" in text) == (
        "context_parallel" in said,
        "tensor_parallel" in said,
    )


def test_expert_parallelism_is_refused():
    with pytest.raises(SpecError, match="no words for ep=8"):
        export(job(model="mixtral-8x7b", gpus=8, stage=3, expert_parallel=8), "fsdp2")
