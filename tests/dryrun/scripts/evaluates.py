"""Eight blocks as wide as Llama 3.1 8B's under FSDP2: three steps, then an evaluation that keeps the logits of its batches."""

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
config = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=8,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
)
with torch.device("meta"):
    model = LlamaForCausalLM(config)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in model.model.layers:
    fully_shard(block, mp_policy=policy)
fully_shard(model, mp_policy=policy)
model.to_empty(device=device)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)


def train(tokens):
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def evaluate(batches):
    model.eval()
    with torch.no_grad():
        kept = [model(input_ids=tokens, use_cache=False).logits.float() for tokens in batches]
    model.train()
    return torch.cat(kept)


for _ in range(3):
    train(torch.randint(0, config.vocab_size, (1, 4096), device=device))
evaluate(torch.randint(0, config.vocab_size, (2, 2, 4096), device=device))
