"""Trains small networks under torch.compile; writes the bytes that each forward keeps for its backward to a file."""

import json
import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy, silu
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """Attention from single operators, and a gated layer: chains of pointwise operators between matrix products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up, self.down = (nn.Linear(width, 2 * width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(torch.softmax(q @ k.transpose(1, 2), dim=-1) @ v)
        return x + self.down(silu(self.gate(x)) * self.up(x))


class Net(nn.Module):
    """Blocks, a head and the loss; with ``recompute`` each block is recomputed in the backward."""

    def __init__(self, *, recompute: bool, width: int = 128, vocab: int = 1024) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab, bias=False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.recompute = recompute

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten())


def batch(device: str, length: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random tokens, which are also the labels."""
    tokens = torch.randint(0, 1024, (4, length), device=device)
    return tokens, tokens.clone()


def train(file: str) -> None:
    """Take two steps with each network."""
    left = {}
    for recompute in (False, True):
        net = Net(recompute=recompute).to("cuda")
        compiled = torch.compile(net)
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        for step in range(2):
            loss = None
            tokens, labels = batch("cuda")
            before = torch.cuda.memory_allocated()
            loss = compiled(tokens, labels)
            left[f"recompute {recompute}, step {step}"] = torch.cuda.memory_allocated() - before
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        del net, compiled, optimizer, loss
        torch._dynamo.reset()
    with open(file, "w") as out:
        json.dump(left, out)


if __name__ == "__main__":
    train(sys.argv[1])
