"""Dry runs stay within limits of time and memory: processor seconds of the command and its processes, on two cores.

The limits are those promised to users, for an idle machine. A busy machine also needs more processor time, because caches and
cores are shared; the tests allow twice as much.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.combined import BY_NIGHT
from tests.dryrun.running import SCRIPTS
from tests.dryrun.sparse import around_blocks, llama_block, sparse_file

pytestmark = [pytest.mark.torch, BY_NIGHT]
pytest.importorskip("transformers")

LOADED = 2.0
"""How much more processor time a busy machine may take."""
GIB = 2**30


class Took(NamedTuple):
    """Processor seconds, the largest memory of one process [bytes], and wall-clock seconds."""

    seconds: float
    bytes: int
    clock: float


def took(folder: Path, *typed: str) -> Took:
    """Run `zeroplan dryrun`; return what it and all processes that it waits for needed."""
    return measured(folder, "-m", "zeroplan", "dryrun", "-q", "--json", "--timeout", "900", *typed)


def measured(folder: Path, *typed: str) -> Took:
    """Run Python with arguments; return what it and all processes that it waits for needed."""
    command, begin = [sys.executable, *typed], time.monotonic()
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.stderr is not None
        assert process.returncode == 0, process.stderr.read()[-2000:]
    found = Took(used.ru_utime + used.ru_stime, 1024 * used.ru_maxrss, time.monotonic() - begin)
    print(found)  # noqa: T201  for a night's log
    return found


SIZES = {
    "7B, 8 ranks": (8, (32, 4096, 11008, 32000), 20, 1 * GIB),
    "70B, 64 ranks": (64, (80, 8192, 28672, 128256), 60, 1 * GIB),
    "405B, 1,024 ranks": (1024, (126, 16384, 53248, 128256), 120, 1 * GIB),
}
"""Ranks; layers, width, width of the MLP and vocabulary; limits in seconds and bytes."""


@pytest.mark.parametrize(("ranks", "shape", "seconds", "most"), SIZES.values(), ids=SIZES)
def test_a_loop_with_fsdp2_stays_within_its_limits(tmp_path: Path, ranks: int, shape: tuple[int, ...], seconds: int, most: int):
    found = took(tmp_path, "--gpus", str(ranks), "--", str(SCRIPTS / "fsdp2_large.py"), *map(str, shape))
    assert found.seconds < LOADED * seconds
    assert found.bytes < most


def test_a_checkpoint_of_a_terabyte_is_read_without_its_tensors(tmp_path: Path):
    n_bytes = sparse_checkpoint(tmp_path / "checkpoint", layers=80)
    assert n_bytes > 1e12
    found = took(tmp_path, "--gpus", "512", "--", str(SCRIPTS / "fsdp2_large.py"), "checkpoint")
    assert found.seconds < LOADED * 120
    assert found.bytes < 1 * GIB


STARTS = """
import torch
layer = torch.nn.Linear(8, 8, device="cuda")
optimizer = torch.optim.SGD(layer.parameters())
for _ in range(3):
    layer(torch.ones(8, 8, device="cuda")).sum().backward()
    optimizer.step()
"""
IMPORTS = "import torch, torch._subclasses.fake_tensor, torch.distributed.tensor, torch._dynamo"
"""What every dry run imports from torch."""


def test_a_small_script_takes_two_seconds_without_imports(tmp_path: Path):
    (tmp_path / "script.py").write_text(STARTS)
    whole, imports = took(tmp_path, "--", "script.py"), measured(tmp_path, "-c", IMPORTS)
    assert whole.seconds - imports.seconds < LOADED * 2


def sparse_checkpoint(folder: Path, *, layers: int) -> int:
    """Write a sparse checkpoint of a large fp32 Llama, one file per layer; return the size of its tensors. [bytes]"""
    folder.mkdir()
    hidden, mlp, keys, vocab = 16384, 53248, 1024, 128256
    files = [
        {f"model.layers.{n}.{name}.weight": shape for name, shape in llama_block(hidden, mlp, keys).items()}
        for n in range(layers)
    ]
    files.append(around_blocks(hidden, vocab))
    names = [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    total = sum(sparse_file(folder / name, tensors) for name, tensors in zip(names, files, strict=True))
    places = {tensor: name for name, tensors in zip(names, files, strict=True) for tensor in tensors}
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": mlp,
        "num_hidden_layers": layers, "num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": vocab,
        "tie_word_embeddings": False, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return total
