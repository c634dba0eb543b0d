"""FSDP2 as torch's documentation shows it: meta device, fused AdamW, clipping, an average loss for the log."""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

layers, hidden, seq = (int(text) for text in sys.argv[1:4])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
mesh = init_device_mesh("cuda", (dist.get_world_size(),))
config = LlamaConfig(
    hidden_size=hidden, intermediate_size=hidden * 3, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=8,
    vocab_size=4096, use_cache=False, tie_word_embeddings=False,
)  # fmt: skip
with torch.device("meta"):
    model = LlamaForCausalLM(config)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in model.model.layers:
    fully_shard(block, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
model.to_empty(device=device)
model.init_weights()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
for step in range(100):
    tokens = torch.randint(0, config.vocab_size, (2, seq), device=device)
    output = model(input_ids=tokens, labels=tokens)
    loss = output.loss
    del output
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    average = loss.detach().clone()
    dist.all_reduce(average, op=dist.ReduceOp.AVG)
    print(f"step {step}: loss {average.item():.2f}, {torch.cuda.max_memory_allocated():,} bytes")
