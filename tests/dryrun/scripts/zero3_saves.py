"""DeepSpeed ZeRO-3, which saves the gathered weights and a checkpoint after the first step."""

import deepspeed
import torch
from torch import nn

model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
settings = {
    "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
}  # fmt: skip
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
for step in range(3):
    loss = engine(torch.randn(2, 512, device=engine.device, dtype=torch.bfloat16)).float().mean()
    engine.backward(loss)
    engine.step()
    if step == 0:
        engine.save_16bit_model("weights")
        engine.save_checkpoint("checkpoint")
