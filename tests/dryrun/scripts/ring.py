"""ring-flash-attn in transformers' Llama: each rank has a part of the tokens, and all-gathers keys and values head by head."""

import sys

import torch
import torch.distributed as dist
from ring_flash_attn import substitute_hf_flash_attn, update_ring_flash_attn_params
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

length, sequences = int(sys.argv[1]), 4
dist.init_process_group("nccl")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(rank)
substitute_hf_flash_attn(dist.group.WORLD, heads_k_stride=1)
config = LlamaConfig(
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=8,
    vocab_size=32000,
)
model = LlamaForCausalLM._from_config(config, attn_implementation="flash_attention_2").cuda()
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
for block in model.model.layers:
    fully_shard(block, mp_policy=policy)
fully_shard(model, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
starts = torch.arange(sequences + 1, dtype=torch.int32, device="cuda") * (length // sequences)
share = slice(rank * length // ranks, (rank + 1) * length // ranks)
for _ in range(5):
    tokens = torch.randint(0, 32000, (1, length), device="cuda")[:, share]
    places = torch.arange(length, device="cuda").remainder(length // sequences)[None, share]
    update_ring_flash_attn_params(starts, dist.group.WORLD)
    logits = model(input_ids=tokens, position_ids=places, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
