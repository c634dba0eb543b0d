"""A user's own model and loop: DDP with autocast, or FSDP2; the fp32 loss is outside the model, and the logits stay alive."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--fsdp", action="store_true")
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--seq", type=int, default=192)
parser.add_argument("--layers", type=int, default=6)
parser.add_argument("--hidden", type=int, default=256)
said = parser.parse_args()
VOCABULARY, LONGEST = 4096, 1024


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = hidden // 64
        self.before, self.after = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        q, k, v = (one.view(batch, length, self.heads, 64).transpose(1, 2) for one in self.qkv(self.before(x)).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.down(functional.gelu(self.up(self.after(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, said.hidden)
        self.positions = nn.Parameter(torch.zeros(LONGEST, said.hidden))
        self.blocks = nn.ModuleList(Block(said.hidden) for _ in range(said.layers))
        self.norm, self.head = nn.LayerNorm(said.hidden), nn.Linear(said.hidden, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        assert ids.size(1) <= LONGEST
        x = self.tokens(ids) + self.positions[: ids.size(1)]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
model = Model().to(device)
if said.fsdp:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    trained = fully_shard(model, mp_policy=policy)
else:
    trained = DistributedDataParallel(model, device_ids=[device], gradient_as_bucket_view=True)
optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-4)
for _ in range(9):
    rows = torch.randint(VOCABULARY, (said.batch, said.seq + 1), device=device)
    ids, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=not said.fsdp):
        logits = trained(ids)
        loss = functional.cross_entropy(logits.view(said.batch * said.seq, VOCABULARY).float(), targets.view(-1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
