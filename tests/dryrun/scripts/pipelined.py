"""torch's pipeline of two stages, GPipe with four micro-batches; as in torchtitan, the stages infer the shapes."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("nccl")
rank, device = dist.get_rank(), torch.device("cuda", int(os.environ["LOCAL_RANK"]))
part = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).to(device)
stage = PipelineStage(part, rank, 2, device)
schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.AdamW(part.parameters())
for _ in range(4):
    data = torch.randn(64, 512, device=device)
    if rank == 0:
        schedule.step(data)
    else:
        schedule.step(target=data)
    optimizer.step()
    optimizer.zero_grad()
