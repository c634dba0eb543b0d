"""TRL: supervised fine-tuning from a checkpoint on disk; --lora adds an adapter, --dpo trains on preferences."""

import tempfile
from pathlib import Path

import small_llama
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

small_llama.parser.add_argument("--checkpoint", required=True)
small_llama.parser.add_argument("--lora", action="store_true")
small_llama.parser.add_argument("--dpo", action="store_true")
size = small_llama.parser.parse_args()


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(["one two three four five six"], trainers.WordLevelTrainer(special_tokens=["<unk>", "</s>"]))
    fast = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>", pad_token="</s>")
    fast.chat_template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} </s>{% endfor %}"
    return fast


common = {
    "output_dir": str(Path(tempfile.gettempdir()) / "out"), "per_device_train_batch_size": 4, "bf16": True, "max_length": 256,
    "report_to": "none", "max_steps": 5, "gradient_checkpointing": True,
}  # fmt: skip
lora = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM") if size.lora else None
if size.dpo:
    rows = [{"prompt": "one two " * (i % 7 + 1), "chosen": "three " * (i % 3 + 1), "rejected": "four five"} for i in range(64)]
    model = AutoModelForCausalLM.from_pretrained(size.checkpoint)
    trainer = DPOTrainer(
        model=model,
        args=DPOConfig(**common),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
        peft_config=lora,
    )
else:
    rows = [
        {
            "messages": [
                {"role": "user", "content": "one " * (i % 7 + 1)},
                {"role": "assistant", "content": "two " * (i % 5 + 3)},
            ]
        }
        for i in range(64)
    ]
    trainer = SFTTrainer(
        model=size.checkpoint, args=SFTConfig(**common), train_dataset=Dataset.from_list(rows), processing_class=tokenizer(),
        peft_config=lora,
    )  # fmt: skip
trainer.train()
trainer.save_model()
