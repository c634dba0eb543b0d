"""DeepSpeed's Ulysses for transformers (ALST) with ZeRO-3: ranks split the sequences, and the heads of attention."""

import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
from deepspeed.utils import groups
from transformers import AutoModelForCausalLM

checkpoint, length, ranks = sys.argv[1], 2048, 4
deepspeed.init_distributed(dist_backend="nccl")
parallel = UlyssesSPAttentionHF.register_with_transformers(
    model_name_or_path=checkpoint, core_attn_implementation="sdpa", sequence_parallel_size=ranks, micro_batch_size=1,
    seq_length=length, seq_length_is_variable=True,
)  # fmt: skip
model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="sdpa")
settings = {
    "train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": ranks, "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 1_000_000},
    "optimizer": {"type": "Adam", "params": {"lr": 1e-5}},
}  # fmt: skip
engine, *_ = deepspeed.initialize(config=settings, model=model, model_parameters=model.parameters(), mpu=parallel)
tokens = [{"input_ids": torch.randint(0, 1000, (length,)), "position_ids": torch.arange(length)} for _ in range(64)]
for one in tokens:
    one["labels"] = one["input_ids"]
group = groups._get_sequence_parallel_group()
batches = UlyssesSPDataLoaderAdapter(
    torch.utils.data.DataLoader(tokens), sp_rank=groups._get_sequence_parallel_rank(), sp_group=group, sp_world_size=ranks,
    device=engine.device,
)  # fmt: skip
for found in batches:
    batch = {name: value.to(engine.device) for name, value in found.items()}
    labels = batch.pop("shift_labels")
    logits = engine(**batch, use_cache=False).logits
    loss = engine.module.loss_function(logits=logits, labels=None, shift_labels=labels, vocab_size=logits.size(-1))
    good = (labels != -100).sum()
    losses, counts = (dist.nn.functional.all_gather(one, group=group) for one in (loss, good))
    engine.backward(sum(one * count for one, count in zip(losses, counts, strict=True)) / sum(counts))
    engine.step()
