"""A plain loop with torch's pipeline of a Llama under FSDP2, set by a JSON file; the stages infer the shapes."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from transformers import AutoConfig, AutoModelForCausalLM

job = json.loads(Path(sys.argv[1]).read_text())
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
mesh = init_device_mesh("cuda", (job["pp"], dist.get_world_size() // job["pp"]), mesh_dim_names=("pp", "shard"))
config = AutoConfig.for_model(**job["config"])
count, mine = len(job["cuts"]), job["stages_of_ranks"][mesh["pp"].get_local_rank()]
vocab = job["config"]["vocab_size"]


def part(number: int) -> nn.Module:
    """A stage: some of the layers, with the embedding in the first stage, and norm and head in the last."""
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=job["attention"]).train()
    start, stop = job["cuts"][number]
    whole.model.layers = whole.model.layers[start:stop]
    if number:
        whole.model.embed_tokens = nn.Identity()
    if number < count - 1:
        whole.model.norm, whole.lm_head = nn.Identity(), nn.Identity()
    run = whole.forward if number == count - 1 else whole.model

    def forward(given):
        positions = torch.arange(job["seq_len"], device=device).unsqueeze(0)
        out = run(**{"inputs_embeds" if number else "input_ids": given, "position_ids": positions})
        return out.logits if number == count - 1 else out.last_hidden_state

    whole.forward = forward
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*whole.model.layers, whole):
        shards_again = job["stage"] == 3 and module is not whole
        fully_shard(module, mesh=mesh["shard"], mp_policy=policy, reshard_after_forward=shards_again)
    return whole.to_empty(device=device)


def loss(logits, labels):
    return parts[-1].loss_function(logits=logits, labels=labels, vocab_size=vocab)


def tokens() -> torch.Tensor:
    return torch.randint(0, vocab, (job["micro_batches"] * job["micro_batch"], job["seq_len"]), device=device)


parts = nn.ModuleList(part(number) for number in mine)
stages = [
    PipelineStage(one, number, count, device, group=mesh["pp"].get_group()) for number, one in zip(mine, parts, strict=True)
]
schedule = getattr(schedules, job["schedule"])(
    stages if len(stages) > 1 else stages[0], n_microbatches=job["micro_batches"], loss_fn=loss, scale_grads=False
)
ids = (tokens(),) if 0 in mine else ()
labels = tokens() if count - 1 in mine else None
optimizer = torch.optim.AdamW(parts.parameters(), foreach=True)
for _ in range(9):
    schedule.step(*ids, target=labels, losses=None if labels is None else [], return_outputs=False)
    optimizer.step()
    optimizer.zero_grad()
