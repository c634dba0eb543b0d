"""Keller Jordan's Muon, which all-gathers the updated weights, and Adam for the rest: ``keller_muon.py WIDTH LAYERS``."""

import os
import sys

import torch
import torch.distributed as dist
from muon import MuonWithAuxAdam
from transformers import LlamaConfig, LlamaForCausalLM

width, layers = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
sizes = {"hidden_size": width, "intermediate_size": 11 * width // 4, "num_attention_heads": width // 64}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers, num_key_value_heads=width // 64)).cuda()
hidden = [one for one in model.model.layers.parameters() if one.ndim >= 2]
rest = [one for one in model.parameters() if not any(one is other for other in hidden)]
optimizer = MuonWithAuxAdam([
    {"params": hidden, "use_muon": True, "lr": 0.02, "weight_decay": 0.01},
    {"params": rest, "use_muon": False, "lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.01},
])  # fmt: skip
for _ in range(4):
    tokens = torch.randint(0, 32000, (2, 512), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
