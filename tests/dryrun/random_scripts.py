"""Writes random training scripts from common parts: model, wrapper, precision, optimizer, clipping, logging, saving."""

from __future__ import annotations

import random
from typing import NamedTuple

MODELS = {
    "mlp": """
network = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(256), nn.Linear(256, 10))
data = TensorDataset(torch.randn(512, 64), torch.randint(0, 10, (512,)))
def loss_of(network, batch):
    return nn.functional.cross_entropy(network(batch[0]), batch[1])
""",
    "convolutions": """
network = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, stride=2),
    nn.GroupNorm(4, 32), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
)
data = TensorDataset(torch.randn(512, 3, 32, 32), torch.randint(0, 10, (512,)))
def loss_of(network, batch):
    output = network(batch[0])
    accuracy = (output.argmax(-1) == batch[1]).float().mean()
    return nn.functional.cross_entropy(output, batch[1], label_smoothing=0.1) + 0 * accuracy
""",
    "transformer layers": """
class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(500, 64)
        self.blocks = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2)
        self.head = nn.Linear(64, 500, bias=False)
    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1), device=tokens.device)
        return self.head(self.blocks(self.embedding(tokens), mask=mask, is_causal=True))
network = Network()
data = TensorDataset(torch.randint(0, 500, (512, 32)))
def loss_of(network, batch):
    return nn.functional.cross_entropy(network(batch[0]).flatten(0, 1), batch[0].flatten())
""",
    "llama": """
from transformers import LlamaConfig, LlamaForCausalLM
network = LlamaForCausalLM(LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=500,
))
if CHECKPOINTING:
    network.gradient_checkpointing_enable()
tokens = torch.randint(0, 500, (512, 32))
data = TensorDataset(tokens, tokens.masked_fill(torch.rand(512, 32) < 0.2, -100))
def loss_of(network, batch):
    return network(input_ids=batch[0], labels=batch[1]).loss
""",
}
WRAPPERS = {
    "none": "network = network.cuda()",
    "ddp": """
dist.init_process_group("nccl")
network = nn.parallel.DistributedDataParallel(network.cuda(), device_ids=[rank], **{options})
""",
    "fsdp2": """
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
network = network.cuda()
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
for module in list(network.modules()):
    if isinstance(module, (nn.TransformerEncoderLayer, nn.Conv2d)) or "DecoderLayer" in type(module).__name__:
        fully_shard(module, **{options})
fully_shard(network, **{options})
""",
}
OPTIONS = {
    "none": ("",),
    "ddp": ("{}", "{'find_unused_parameters': True}", "{'gradient_as_bucket_view': True}", "{'static_graph': True}"),
    "fsdp2": ("{}", "{'reshard_after_forward': False}", "{'mp_policy': MixedPrecisionPolicy(param_dtype=torch.bfloat16)}"),
}
OPTIMIZERS = (
    "torch.optim.AdamW(network.parameters(), lr=1e-3, fused=True)", "torch.optim.AdamW(network.parameters(), foreach=False)",
    "torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, nesterov=True)", "torch.optim.Adam(network.parameters())",
    "torch.optim.RMSprop(network.parameters(), centered=True)",
    "torch.optim.Adagrad(network.parameters())", "torch.optim.NAdam(network.parameters())",
    """torch.optim.AdamW([
    {'params': [p for p in network.parameters() if p.ndim > 1], 'weight_decay': 0.1},
    {'params': [p for p in network.parameters() if p.ndim <= 1], 'weight_decay': 0.0},
])""",
)  # fmt: skip
UNSHARDED = "torch.optim.Adafactor(network.parameters())"
"""In torch 2.13 Adafactor's operators do not accept the shards of FSDP2."""
SCHEDULERS = (
    "None", "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)",
    "torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100, cycle_momentum=False)",
    "torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))",
)  # fmt: skip
CLIPPINGS = (
    "pass", "nn.utils.clip_grad_norm_(network.parameters(), 1.0)", "nn.utils.clip_grad_value_(network.parameters(), 0.5)",
    "norm = nn.utils.clip_grad_norm_(network.parameters(), 1.0, foreach=False); assert norm.item() >= 0",
)  # fmt: skip
LOGS = (
    "pass", "print(step, loss.item())", "print(f'{step}: {float(loss):.3f}', torch.cuda.memory_summary()[:20])",
    "print(json.dumps({'step': step, 'loss': loss.detach().cpu().item(), 'peak': torch.cuda.max_memory_allocated()}))",
    "history.append(loss.detach()); print(torch.stack(history).mean().tolist())",
    "assert not torch.isnan(loss).any() and math.isfinite(loss.item())",
)  # fmt: skip
SAVINGS = (
    "pass", "torch.save({'model': network.state_dict(), 'optimizer': optimizer.state_dict(), 'step': step}, 'checkpoint.pt')",
    "from torch.distributed.checkpoint.state_dict import get_state_dict; torch.save(get_state_dict(network, optimizer), 'both.pt')",
)  # fmt: skip
EVALUATIONS = (
    "pass",
    """network.eval()
        with torch.no_grad():
            print("evaluation", loss_of(network, batch).item())
        network.train()""",
)  # fmt: skip
SCRIPT = """
import json, math, os
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

rank, history = int(os.environ.get("LOCAL_RANK", 0)), []
torch.cuda.set_device(rank)
torch.manual_seed({seed})
CHECKPOINTING = {checkpointing}
{model}
{wrapper}
optimizer = {optimizer}
scheduler = {scheduler}
scaler = torch.amp.GradScaler("cuda", enabled={scaled})
sampler = DistributedSampler(data) if dist.is_initialized() else None
loader = DataLoader(data, {batch}, shuffle=sampler is None, sampler=sampler, num_workers={workers}, pin_memory={pinned})
network.train()
step = number = 0
for epoch in range(100):
    for batch in loader:
        number += 1
        batch = [one.cuda(non_blocking=True) for one in batch]
        with torch.autocast("cuda", dtype={dtype}, enabled={autocast}):
            loss = loss_of(network, batch)
        scaler.scale(loss / {accumulate}).backward()
        if number % {accumulate}:
            continue
        scaler.unscale_(optimizer)
        {clipping}
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none={to_none})
        if scheduler is not None:
            scheduler.step()
        {log}
        step += 1
        {saving}
        {evaluation}
"""


class Script(NamedTuple):
    """A script, the number of its GPUs, and the names of its parts."""

    code: str
    gpus: int
    parts: tuple[str, ...]


def random_script(seed: int) -> Script:
    """Return the script that a seed draws."""
    dice = random.Random(seed)  # noqa: S311  no secret
    model, wrapper, precision = dice.choice(tuple(MODELS)), dice.choice(tuple(WRAPPERS)), dice.choice(("fp32", "bf16", "fp16"))
    optimizer = dice.choice(OPTIMIZERS if wrapper == "fsdp2" else (*OPTIMIZERS, UNSHARDED))
    scheduler = dice.choice(SCHEDULERS)
    code = SCRIPT.format(
        seed=seed, checkpointing=dice.random() < 0.3, model=MODELS[model], optimizer=optimizer, scheduler=scheduler,
        wrapper=WRAPPERS[wrapper].replace("{options}", dice.choice(OPTIONS[wrapper])), scaled=precision == "fp16",
        dtype="torch.float16" if precision == "fp16" else "torch.bfloat16", autocast=precision != "fp32",
        batch=dice.choice((2, 4, 8)), workers=dice.choice((0, 2)), pinned=dice.random() < 0.5, accumulate=dice.choice((1, 1, 2, 3)),
        to_none=dice.random() < 0.7, clipping=dice.choice(CLIPPINGS), log=dice.choice(LOGS), saving=dice.choice(SAVINGS),
        evaluation=dice.choice(EVALUATIONS),
    )  # fmt: skip
    gpus = 1 if wrapper == "none" else dice.choice((1, 2, 8, 64))
    return Script(code, gpus, (model, wrapper, precision, optimizer.partition("(")[0], str(gpus)))
