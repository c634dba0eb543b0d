"""A large Llama under FSDP2 in a plain loop. Arguments: LAYERS WIDTH MLP VOCABULARY, or the folder of a checkpoint to load."""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
if len(sys.argv) > 2:
    layers, hidden, mlp, vocab = map(int, sys.argv[1:5])
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers, num_attention_heads=hidden // 128,
        num_key_value_heads=8, vocab_size=vocab, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
else:
    model = LlamaForCausalLM.from_pretrained(sys.argv[1])
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in model.model.layers:
    fully_shard(block, mp_policy=policy)
fully_shard(model, mp_policy=policy, reshard_after_forward=False)
model.to_empty(device=device) if len(sys.argv) > 2 else model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in range(3):
    tokens = torch.randint(0, model.config.vocab_size, (1, 2048), device=device)
    model(input_ids=tokens, labels=tokens).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
