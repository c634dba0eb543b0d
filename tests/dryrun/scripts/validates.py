"""A plain loop with FSDP2: validation after the first step, and a full state dict at the end, which rank 0 saves."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl")
model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(4))).to(device)
for block in model:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def validate():
    model.eval()
    with torch.no_grad():
        kept = [model(torch.randn(64, 512, device=device)) for _ in range(6)]
    model.train()
    return torch.cat(kept).mean()


for step in range(4):
    loss = model(torch.randn(8, 512, device=device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 0:
        validate()
weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=False))
if dist.get_rank() == 0:
    torch.save(weights, "weights.pt")
