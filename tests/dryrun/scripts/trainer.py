"""transformers' Trainer: plain, DDP, FSDP or DeepSpeed, set by its own flags; --lora adds an adapter of peft."""

from dataclasses import dataclass

import small_llama
from transformers import HfArgumentParser, Trainer, TrainingArguments


@dataclass
class Size:
    layers: int = 4
    hidden: int = 512
    vocab: int = 32000
    seq: int = 512
    lora: bool = False


size, arguments = HfArgumentParser((Size, TrainingArguments)).parse_args_into_dataclasses()
model = small_llama.model(size)
if size.lora:
    from peft import LoraConfig, get_peft_model

    model.enable_input_require_grads()
    model = get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
trainer = Trainer(model=model, args=arguments, train_dataset=small_llama.Tokens(size))
trainer.train()
trainer.save_model()
