"""How long dry runs take: processor seconds of everything that the command starts, and its memory, on two cores.

The limits are what a user was promised, for a machine that does nothing else. A loaded machine takes more processor time, too:
caches and cores are shared.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.combined import BY_NIGHT
from tests.dryrun.running import SCRIPTS

pytestmark = [pytest.mark.torch, BY_NIGHT]
pytest.importorskip("transformers")

LOADED = 2.0
"""By how much more processor time a machine may take that does other work, too."""
GIB = 2**30


class Took(NamedTuple):
    """Processor seconds, and the most memory of one process [bytes]."""

    seconds: float
    bytes: int


def took(folder: Path, *typed: str) -> Took:
    """Run `zeroplan dryrun`; what it and every process that it waits for took."""
    command = [sys.executable, "-m", "zeroplan", "dryrun", "-q", "--json", "--timeout", "900", *typed]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.stderr is not None
        assert process.returncode == 0, process.stderr.read()[-2000:]
    found = Took(used.ru_utime + used.ru_stime, 1024 * used.ru_maxrss)
    print(found)  # noqa: T201  for a night's log
    return found


SIZES = {
    "7B, 8 ranks": (8, (32, 4096, 11008, 32000), 20, 1 * GIB),
    "70B, 64 ranks": (64, (80, 8192, 28672, 128256), 60, 1 * GIB),
    "405B, 1,024 ranks": (1024, (126, 16384, 53248, 128256), 120, 1 * GIB),
}
"""Ranks; layers, width, width of the MLP and vocabulary; seconds and bytes."""


@pytest.mark.parametrize(("ranks", "shape", "seconds", "most"), SIZES.values(), ids=SIZES)
def test_a_loop_with_fsdp2_takes_its_time(tmp_path: Path, ranks: int, shape: tuple[int, ...], seconds: int, most: int):
    found = took(tmp_path, "--gpus", str(ranks), "--", str(SCRIPTS / "fsdp2_large.py"), *map(str, shape))
    assert found.seconds < LOADED * seconds
    assert found.bytes < most


def test_a_checkpoint_of_a_terabyte_costs_its_headers(tmp_path: Path):
    n_bytes = sparse_checkpoint(tmp_path / "checkpoint", layers=80)
    assert n_bytes > 1e12
    found = took(tmp_path, "--gpus", "512", "--", str(SCRIPTS / "fsdp2_large.py"), "checkpoint")
    assert found.seconds < LOADED * 120
    assert found.bytes < 1 * GIB


def sparse_checkpoint(folder: Path, *, layers: int) -> int:
    """A checkpoint of a large Llama in fp32, a file per layer, that takes no room on the disk; its size in bytes."""
    folder.mkdir()
    hidden, mlp, keys, vocab = 16384, 53248, 1024, 128256
    block = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    files = [{f"model.layers.{n}.{name}.weight": shape for name, shape in block.items()} for n in range(layers)]
    files.append(
        {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    )
    names = [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    total = sum(_sparse_file(folder / name, tensors) for name, tensors in zip(names, files, strict=True))
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


def _sparse_file(path: Path, tensors: dict[str, tuple[int, ...]]) -> int:
    """A safetensors file with its header alone; the tensors' bytes are a hole."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        begin, end = end, end + 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return end
