"""FSDP2 with eight wide Llama blocks. Arguments: ``blocks`` and ``loss`` compile these parts, ``evaluate`` adds an evaluation."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank() % 8)
config = LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=8, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128256, use_cache=False,
)  # fmt: skip
with torch.device("meta"):
    model = LlamaForCausalLM(config)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model.model.layers:
    if "blocks" in sys.argv:
        layer.compile()
    fully_shard(layer, mp_policy=policy)
fully_shard(model, mp_policy=policy)
model.to_empty(device="cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the next token's cross-entropy, in fp32."""
    return cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def batch(sequences: int) -> torch.Tensor:
    """Return random tokens."""
    return torch.randint(0, config.vocab_size, (sequences, 4096), device="cuda")


if "loss" in sys.argv:
    loss_of = torch.compile(loss_of)
for _ in range(3):
    ids = batch(1)
    loss_of(model(input_ids=ids).logits, ids).backward()
    optimizer.step()
    optimizer.zero_grad()
    if "evaluate" in sys.argv:
        model.eval()
        with torch.no_grad():
            kept = [model(input_ids=batch(4)).logits.float() for _ in range(2)]
        del kept
        model.train()
