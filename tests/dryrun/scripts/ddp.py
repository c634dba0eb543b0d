"""DDP with autocast, a gradient scaler, clipping, a sampler, and a saved checkpoint."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    dist.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    data = TensorDataset(torch.rand(512, 256), torch.randint(0, 10, (512,)))
    loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data), num_workers=2, pin_memory=True)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.LayerNorm(1024), nn.Linear(1024, 10)).to(rank)
    wrapped = DistributedDataParallel(model, device_ids=[rank])
    wrapped.buffers = []  # an attribute that Megatron-Core's wrapper has
    generator = torch.cuda.default_generators[rank]
    generator.set_state(generator.get_state())
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for features, labels in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.cross_entropy(wrapped(features.to(rank, non_blocking=True)), labels.to(rank))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        with dist._coalescing_manager():
            for buffer in (torch.zeros(4, device=rank), torch.zeros(8, device=rank)):
                dist.all_reduce(buffer)
        torch.save(model.state_dict(), "checkpoint.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
