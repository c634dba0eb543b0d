"""transformers' Trainer with arguments from a JSON file; the model in it is a folder with a config.json.

Each sequence ends in one token of padding, so that transformers makes the mask that a collator's padding needs.
"""

import json
import sys
from argparse import Namespace
from pathlib import Path

import small_llama
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

said = json.loads(Path(sys.argv[1]).read_text())
config = AutoConfig.from_pretrained(said.pop("model_name_or_path"))


class Padded(small_llama.Tokens):
    """The same tokens; the last one of each row is padding."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = super().__getitem__(index)
        row["attention_mask"][-1] = 0
        return row


tokens = Padded(Namespace(vocab=config.vocab_size, seq=said.pop("max_length")))
dtype = getattr(torch, said.pop("dtype", "float32"))
model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=said.pop("attn_implementation"))
Trainer(model=model, args=TrainingArguments(**said), train_dataset=tokens).train()
