"""Lightning's Trainer with DDP; with --fsdp it uses FSDP, with --fabric Lightning's Fabric and FSDP."""

import lightning
import small_llama
import torch
from lightning.fabric.strategies import FSDPStrategy as FabricFSDP
from lightning.pytorch.strategies import FSDPStrategy
from torch.utils.data import DataLoader
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

small_llama.parser.add_argument("--fsdp", action="store_true")
small_llama.parser.add_argument("--fabric", action="store_true")
size = small_llama.parser.parse_args()
loader = DataLoader(small_llama.Tokens(size), batch_size=4, num_workers=2, pin_memory=True)


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = small_llama.model(size)

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def fabric() -> None:
    strategy = FabricFSDP(auto_wrap_policy={LlamaDecoderLayer})
    here = lightning.Fabric(accelerator="cuda", devices=8, strategy=strategy, precision="bf16-mixed")
    here.launch()
    with here.init_module(empty_init=False):
        model = small_llama.model(size)
    model = here.setup(model)
    optimizer = here.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-4))
    for batch in here.setup_dataloaders(loader):
        loss = model(**batch).loss
        here.backward(loss)
        here.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()


if size.fabric:
    fabric()
else:
    strategy = FSDPStrategy(auto_wrap_policy={LlamaDecoderLayer}) if size.fsdp else "ddp"
    trainer = lightning.Trainer(
        accelerator="gpu",
        devices=8,
        strategy=strategy,
        precision="bf16-mixed",
        max_steps=5,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Module(), loader)
