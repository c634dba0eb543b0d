"""A diffusion transformer like Stable Diffusion 3's, in a plain loop with FSDP2: ``diffusion.py WIDTH LAYERS``."""

import os
import sys

import torch
import torch.distributed as dist
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from torch.distributed.fsdp import fully_shard

width, layers = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = SD3Transformer2DModel(
    sample_size=64, num_layers=layers, num_attention_heads=width // 64, attention_head_dim=64, caption_projection_dim=width,
    joint_attention_dim=4096, pooled_projection_dim=2048,
).to("cuda")  # fmt: skip
for block in model.transformer_blocks:
    fully_shard(block)
fully_shard(model)
noise = FlowMatchEulerDiscreteScheduler()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    latents, words, pooled = torch.randn(2, 16, 64, 64), torch.randn(2, 77, 4096), torch.randn(2, 2048)
    latents, words, pooled = (one.to("cuda") for one in (latents, words, pooled))
    at = torch.randint(0, noise.config.num_train_timesteps, (2,))
    sigma = noise.sigmas[at].to("cuda").view(-1, 1, 1, 1)
    noised = (1 - sigma) * latents + sigma * torch.randn_like(latents)
    with torch.autocast("cuda", torch.bfloat16):
        found = model(
            hidden_states=noised, timestep=noise.timesteps[at].to("cuda"), encoder_hidden_states=words,
            pooled_projections=pooled, return_dict=False,
        )[0]  # fmt: skip
    torch.nn.functional.mse_loss(found.float(), latents).backward()
    optimizer.step()
    optimizer.zero_grad()
