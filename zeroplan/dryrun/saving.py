"""Where a script saves: state dicts, and what writes them. Nothing is written, and files from before the run stay."""

from pathlib import Path
from types import ModuleType

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim.optimizer import Optimizer

from zeroplan.dryrun.loop import Loop
from zeroplan.dryrun.patches import Patch
from zeroplan.dryrun.unwritten import Unwritten
from zeroplan.ledger import Beside
from zeroplan.verify.replaced import put

_OF_FSDP1 = ("full_optim_state_dict", "sharded_optim_state_dict", "optim_state_dict")
_STATE_DICTS = ("get_model_state_dict", "get_optimizer_state_dict", "get_state_dict")
_OF_DEEPSPEED = ("save_16bit_model", "save_checkpoint", "_zero3_consolidated_16bit_state_dict")


def watch(loop: Loop, aside: Path) -> dict[str, Patch]:
    """Have the loop hear of saving, and return what is to be done as libraries are imported.

    What the script writes over files from before the run goes into the folder ``aside``.
    """
    unwritten = Unwritten(lambda: loop.saves_now, aside)

    def gathers(owner: object, *names: str) -> None:
        put(owner, **{name: loop.saving(getattr(owner, name)) for name in names if hasattr(owner, name)})

    def writes(owner: object, *names: str) -> None:
        put(owner, **{name: loop.saving(getattr(owner, name), writes=True) for name in names if hasattr(owner, name)})

    def safetensors(module: ModuleType) -> None:
        put(module, save_file=unwritten.saves(module.save_file, name="filename"))
        put(module, save_model=unwritten.saves(module.save_model, name="filename"))
        writes(module, "save_file", "save_model")

    def distributed(module: ModuleType) -> None:
        put(module, save=unwritten.saves(module.save, name="checkpoint_id"))
        writes(module, "save", "async_save")

    def state_dicts(module: ModuleType) -> None:
        gathers(module, *_STATE_DICTS)
        put(module, _init_optim_state=loop.beside(module._init_optim_state))  # it takes a step with gradients of zero

    gathers(nn.Module, "state_dict")
    gathers(Optimizer, "state_dict")
    put(FullyShardedDataParallel,
        **{name: staticmethod(loop.saving(getattr(FullyShardedDataParallel, name))) for name in _OF_FSDP1})  # fmt: skip
    unwritten.watch()
    put(torch, save=unwritten.saves(torch.save))
    writes(torch, "save")
    return {
        "safetensors.torch": safetensors,
        "torch.distributed.checkpoint.state_dict": state_dicts,
        "torch.distributed.checkpoint.state_dict_saver": distributed,
        "torch.distributed.checkpoint": distributed,
        "deepspeed.runtime.engine": lambda module: writes(module.DeepSpeedEngine, *_OF_DEEPSPEED),
        "transformers.modeling_utils": lambda module: writes(module.PreTrainedModel, "save_pretrained"),
        "accelerate.accelerator": lambda module: writes(module.Accelerator, "save_state"),
        "transformers.generation.utils": lambda module: put(
            module.GenerationMixin, generate=loop.during(Beside.GENERATION, module.GenerationMixin.generate)
        ),
    }
