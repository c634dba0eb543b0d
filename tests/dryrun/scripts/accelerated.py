"""A training loop with accelerate: DDP, or FSDP2 with --fsdp; gradient accumulation, clipping, a scheduler, a gathered loss."""

import small_llama
import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader
from transformers import get_scheduler

small_llama.parser.add_argument("--fsdp", action="store_true")
size = small_llama.parser.parse_args()
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"]
)
accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2, fsdp_plugin=plugin if size.fsdp else None)
model = small_llama.model(size)
loader = DataLoader(small_llama.Tokens(size), batch_size=4, shuffle=True, num_workers=2, pin_memory=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
scheduler = get_scheduler("linear", optimizer, num_warmup_steps=1, num_training_steps=100)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
model.train()
for batch in loader:
    with accelerator.accumulate(model):
        output = model(**batch)
        accelerator.backward(output.loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    accelerator.print(accelerator.gather_for_metrics(output.loss.detach().repeat(4)).mean().item())
accelerator.wait_for_everyone()
accelerator.save_state("state")
