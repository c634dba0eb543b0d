"""A small Llama in a plain loop: DDP with autocast (``ddp``), or DeepSpeed with the ZeRO stage that the command line names."""

import os
import sys

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

layers, hidden, seq = 3, 256, 256
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
config = LlamaConfig(
    hidden_size=hidden, intermediate_size=hidden * 3, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=8,
    vocab_size=4096, use_cache=False, tie_word_embeddings=False,
)  # fmt: skip
batch = torch.randint(0, config.vocab_size, (2, seq), device=device)


def with_ddp() -> None:
    dist.init_process_group("nccl")
    model = torch.nn.parallel.DistributedDataParallel(LlamaForCausalLM(config).to(device), device_ids=[device.index])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(9):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            output = model(input_ids=batch, labels=batch)
        loss = output.loss
        del output
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def with_deepspeed(stage: int) -> None:
    import deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0, "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }  # fmt: skip
    model = LlamaForCausalLM(config).bfloat16()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    for _ in range(9):
        output = engine(input_ids=batch, labels=batch)
        loss = output.loss
        del output
        engine.backward(loss)
        engine.step()


if sys.argv[1] == "ddp":
    with_ddp()
else:
    with_deepspeed(int(sys.argv[1]))
