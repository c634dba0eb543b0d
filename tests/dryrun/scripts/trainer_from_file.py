"""transformers' Trainer with arguments from a JSON file; the model in it is a folder with a config.json."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import small_llama
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

said = json.loads(Path(sys.argv[1]).read_text())
config = AutoConfig.from_pretrained(said.pop("model_name_or_path"))
tokens = small_llama.Tokens(Namespace(vocab=config.vocab_size, seq=said.pop("max_length")))
model = AutoModelForCausalLM.from_config(config, attn_implementation=said.pop("attn_implementation"))
Trainer(model=model, args=TrainingArguments(**said), train_dataset=tokens).train()
