"""A transformer with its own attention, in fp32, under DDP; --again recomputes its layers in the backward."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

LAYERS, HIDDEN, HEADS, VOCAB, ROWS, SEQ = 3, 128, 4, 1024, 2, 64


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False), nn.Linear(4 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x):
        q, k, v = (one.view(ROWS, SEQ, HEADS, -1).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        attended = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        x = x + self.out(attended.transpose(1, 2).reshape(ROWS, SEQ, HIDDEN))
        return x + self.down(functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if "--again" in sys.argv else layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


if __name__ == "__main__":
    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    model = nn.parallel.DistributedDataParallel(Model().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    aside = torch.cuda.Stream()
    for _ in range(5):
        loss = model(torch.randint(0, VOCAB, (ROWS, SEQ), device=device))
        loss.backward()
        optimizer.step()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            doubled = loss.detach() * 2
            done = torch.cuda.Event()
            done.record()
        done.wait()
        optimizer.zero_grad()
