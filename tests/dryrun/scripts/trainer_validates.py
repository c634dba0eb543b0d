"""Trainer with evaluation and saving after the first step; because of its metrics it keeps all logits on the GPU."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        row = torch.arange(128) + i
        return {"input_ids": row, "labels": row}


config = LlamaConfig(
    hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, vocab_size=8192
)
arguments = TrainingArguments(
    output_dir="out", per_device_train_batch_size=2, per_device_eval_batch_size=4, eval_strategy="steps", eval_steps=1,
    save_steps=1, save_total_limit=1, max_steps=3, report_to="none", disable_tqdm=True, bf16=True,
)  # fmt: skip
trainer = Trainer(
    model=LlamaForCausalLM(config), args=arguments, train_dataset=Tokens(), eval_dataset=Tokens(),
    compute_metrics=lambda _: {"accuracy": 1.0},
)  # fmt: skip
trainer.train()
