"""Writes checkpoints that take no disk space: sparse safetensors files with a real header, a config and a tokenizer."""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path

N_BYTES = {"F32": 4, "BF16": 2}

Shapes = dict[str, tuple[int, ...]]


def sparse_file(path: Path, tensors: Shapes, dtype: str = "F32") -> int:
    """Write a sparse safetensors file, of which only the header is on the disk; return the bytes of its tensors."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        begin, end = end, end + N_BYTES[dtype] * prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return end


def llama_block(hidden: int, mlp: int, keys: int) -> Shapes:
    """Return the names and shapes of a Llama block's weights; ``keys`` is the width of keys and of values."""
    return {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip


def around_blocks(hidden: int, vocabulary: int) -> Shapes:
    """Return the names and shapes of a Llama's weights outside the blocks; head and embedding are not tied."""
    return {
        "model.embed_tokens.weight": (vocabulary, hidden), "lm_head.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)
    }  # fmt: skip


def checkpoint(folder: Path, config: dict[str, object], block: Shapes, vocabulary: int, layers: int) -> None:
    """Write a folder that ``from_pretrained`` reads: sparse bf16 weights, the config, and a word-level tokenizer."""
    folder.mkdir()
    hidden = block["input_layernorm"][0]
    tensors = {f"model.layers.{n}.{name}.weight": shape for n in range(layers) for name, shape in block.items()}
    sparse_file(folder / "model.safetensors", tensors | around_blocks(hidden, vocabulary), "BF16")
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "vocab_size": vocabulary, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(sizes | config))
    words(folder, vocabulary)


def words(folder: Path, vocabulary: int, tokenizer_class: str = "LlamaTokenizerFast") -> None:
    """Write a word-level tokenizer with ``vocabulary`` tokens: three special ones, then ``w00003`` and so on."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["<unk>", "<s>", "</s>", *(f"w{number:05d}" for number in range(3, vocabulary))]
    made = Tokenizer(models.WordLevel({name: at for at, name in enumerate(names)}, unk_token="<unk>"))  # noqa: S106  no password
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))
    special = dict(zip(("unk_token", "bos_token", "eos_token"), names, strict=False))
    text = json.dumps(special | {"tokenizer_class": tokenizer_class, "model_max_length": 10**12})
    (folder / "tokenizer_config.json").write_text(text)
