"""torch's own Muon for the matrices of a small Llama, and AdamW for the rest."""

import torch
from small_llama import model as small_llama
from small_llama import parser

model = small_llama(parser.parse_args()).cuda()
matrices = [one for name, one in model.named_parameters() if one.dim() == 2 and "layers" in name]
others = [one for one in model.parameters() if not any(one is other for other in matrices)]
optimizers = torch.optim.Muon(matrices), torch.optim.AdamW(others)
for _ in range(4):
    tokens = torch.randint(0, 1000, (2, 512), device="cuda")
    model(input_ids=tokens, labels=tokens).loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
