"""TRL's trainers other than SFT and DPO, with the Llama of a checkpoint: ``trl_others.py CHECKPOINT grpo|reward|distillation``."""

import sys
import tempfile
from pathlib import Path

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

checkpoint, method = sys.argv[1:3]
words = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "one": 2, "two": 3, "three": 4}, unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>", pad_token="</s>")
common = {
    "output_dir": str(Path(tempfile.gettempdir()) / "out"), "per_device_train_batch_size": 4, "bf16": True, "report_to": "none",
    "max_steps": 5, "gradient_checkpointing": False,
}  # fmt: skip
prompts = Dataset.from_list([{"prompt": "one two " * (i % 7 + 1)} for i in range(64)])
if method == "grpo":
    from trl import GRPOConfig, GRPOTrainer

    trainer = GRPOTrainer(
        model=checkpoint, reward_funcs=lambda completions, **_: [float(len(one)) for one in completions], train_dataset=prompts,
        args=GRPOConfig(**common, num_generations=4, max_completion_length=128, beta=0.1), processing_class=tokenizer,
    )  # fmt: skip
elif method == "reward":
    from trl import RewardConfig, RewardTrainer

    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=1)
    model.config.pad_token_id = 1
    pairs = Dataset.from_list([{"chosen": "one two " * (i % 7 + 1), "rejected": "three " * (i % 5 + 1)} for i in range(64)])
    trainer = RewardTrainer(model=model, args=RewardConfig(**common), train_dataset=pairs, processing_class=tokenizer)
else:
    from trl import DistillationConfig, DistillationTrainer

    trainer = DistillationTrainer(
        model=checkpoint, teacher_model=AutoModelForCausalLM.from_pretrained(checkpoint), train_dataset=prompts,
        args=DistillationConfig(**common, max_completion_length=128), processing_class=tokenizer,
    )  # fmt: skip
trainer.train()
