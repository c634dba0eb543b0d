"""A plain loop with the bitsandbytes optimizer that the command line names."""

import sys

import bitsandbytes
import torch
from torch import nn

model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)).to("cuda", torch.bfloat16)
optimizer = getattr(bitsandbytes.optim, sys.argv[1])(model.parameters(), lr=1e-4)
for _ in range(5):
    model(torch.randn(8, 1024, device="cuda", dtype=torch.bfloat16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
