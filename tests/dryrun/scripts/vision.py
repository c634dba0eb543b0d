"""Qwen2-VL with one picture per sequence, in a plain loop: ``vision.py WIDTH LAYERS``."""

import sys

import torch
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

width, layers = int(sys.argv[1]), int(sys.argv[2])
eighth = width // 8 // 8  # an eighth of a head; rotary embeddings rotate half a head's channels
config = Qwen2VLConfig(
    text_config={
        "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 4096,
        "rope_scaling": {"type": "mrope", "mrope_section": [eighth, eighth * 3 // 2, eighth * 3 // 2]},
    },
    vision_config={
        "depth": layers, "embed_dim": width // 2, "hidden_size": width, "num_heads": 4, "mlp_ratio": 2, "in_channels": 3,
        "patch_size": 14,
    },
    image_token_id=5, video_token_id=6, vision_start_token_id=7, vision_end_token_id=8,
)  # fmt: skip
model = Qwen2VLForConditionalGeneration(config).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    tokens = torch.randint(10, 4000, (1, 200))
    tokens[0, 10], tokens[0, 11:75] = 7, 5
    pictures, sizes = torch.randn(256, 3 * 2 * 14 * 14).cuda(), torch.tensor([[1, 16, 16]]).cuda()
    kinds = (tokens == 5).int().cuda()
    tokens = tokens.cuda()
    model(input_ids=tokens, labels=tokens, pixel_values=pictures, image_grid_thw=sizes, mm_token_type_ids=kinds).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
