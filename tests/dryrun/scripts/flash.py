"""A Llama with the attention that the command line names; unless it is sdpa, each step also calls flash-attn's functions."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    hidden_size=512, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, vocab_size=4096,
    use_cache=False,
)  # fmt: skip
model = LlamaForCausalLM._from_config(config, attn_implementation=sys.argv[1], dtype=torch.bfloat16).cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in range(4):
    tokens = torch.randint(0, 4096, (2, 512), device="cuda")
    model(input_ids=tokens, labels=tokens).loss.backward()
    if sys.argv[1] != "sdpa":
        from flash_attn import flash_attn_qkvpacked_func, flash_attn_varlen_func
        from flash_attn.bert_padding import pad_input, unpad_input

        mask = torch.ones(2, 512, dtype=torch.int64, device="cuda")
        mask[1, 300:] = 0
        packed = torch.randn(2, 512, 3, 8, 60, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        flash_attn_qkvpacked_func(packed, causal=True).sum().backward()
        assert packed.grad.shape == packed.shape
        left, places, starts, longest, _lengths = unpad_input(packed[:, :, 0], mask)
        assert left.shape == (812, 8, 60)
        assert longest == 512
        out = flash_attn_varlen_func(left, left, left, starts, starts, longest, longest, causal=True)
        assert pad_input(out, places, 2, 512).shape == (2, 512, 8, 60)
        del packed, left, out, mask, places, starts
    optimizer.step()
    optimizer.zero_grad()
