"""Reads values from tensors: masks and counts, which a dry run knows, and losses and choices, which it does not know."""

import json
import sys

import torch
from torch import nn
from torch.profiler import ProfilerActivity

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 100)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
seen = []
for _ in range(4):
    tokens = torch.arange(512).remainder(100).view(4, 128).pin_memory().to("cuda:0", non_blocking=True)
    labels = tokens.clone()
    labels[:, :100] = -100
    keep = labels != -100
    logits = model(tokens)
    loss = nn.functional.cross_entropy(logits[keep], labels[keep])
    highest = logits.max(-1).values
    overflow, found = torch.isinf(highest.detach()).any(), torch.zeros(1, device="cuda")
    torch._amp_foreach_non_finite_check_and_unscale_([highest.detach()], found, torch.ones(1, device="cuda"))
    seen.append({
        "kept": int(keep.sum()), "shape": list(logits[keep].shape), "last": labels[keep].tolist()[-1], "loss": loss.item(),
        "nan": bool(torch.isnan(loss)), "finite": bool(torch.isfinite(loss).all()), "positive": len(logits[highest > 0]),
        "listed": [torch.tensor([loss, loss.detach()]).shape[0], torch.tensor([[keep.sum(), labels[0, 101]]]).tolist()],
        "overflow": [overflow.byte().view(1)[0].item(), overflow.float().cpu().item(), found.item()],
        "total": torch.cuda.get_device_properties(0).total_memory, "name": torch.cuda.get_device_name(),
        "allocated": torch.cuda.memory_allocated(), "summary": torch.cuda.memory_summary(),
        "free": torch.cuda.mem_get_info()[0] < torch.cuda.mem_get_info()[1],
        "drawn": list(torch.distributions.Categorical(logits=highest.detach()).sample().shape),
    })  # fmt: skip
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profile:
        loss.backward()
    seen[-1]["profiled"] = [one.key for one in profile.key_averages()]
    optimizer.step()
    optimizer.zero_grad()
    with open(sys.argv[1], "w") as file:
        json.dump(seen, file)
