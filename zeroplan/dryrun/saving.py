"""Where a script saves: state dicts, and what writes them. Nothing is written, and what was there before is not deleted."""

import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim.optimizer import Optimizer

from zeroplan.dryrun.loop import Loop
from zeroplan.dryrun.patches import Patch
from zeroplan.dryrun.stood_in import note
from zeroplan.ledger import Beside
from zeroplan.verify.fake_cuda.stand_ins import is_users
from zeroplan.verify.replaced import put

_OF_FSDP1 = ("full_optim_state_dict", "sharded_optim_state_dict", "optim_state_dict")
_STATE_DICTS = ("get_model_state_dict", "get_optimizer_state_dict", "get_state_dict")
_OF_DEEPSPEED = ("save_16bit_model", "save_checkpoint", "_zero3_consolidated_16bit_state_dict")


def watch(loop: Loop) -> dict[str, Patch]:
    """Have the loop hear of saving, and return what is to be done as libraries are imported."""

    def gathers(owner: object, *names: str) -> None:
        put(owner, **{name: loop.saving(getattr(owner, name)) for name in names if hasattr(owner, name)})

    def writes(owner: object, *names: str) -> None:
        put(owner, **{name: loop.saving(getattr(owner, name), writes=True) for name in names if hasattr(owner, name)})

    def state_dicts(module: ModuleType) -> None:
        gathers(module, *_STATE_DICTS)
        put(module, _init_optim_state=loop.beside(module._init_optim_state))  # it takes a step with gradients of zero

    gathers(nn.Module, "state_dict")
    gathers(Optimizer, "state_dict")
    put(FullyShardedDataParallel,
        **{name: staticmethod(loop.saving(getattr(FullyShardedDataParallel, name))) for name in _OF_FSDP1})  # fmt: skip
    writes(torch, "save")
    _delete_nothing_of_before(loop)
    return {
        "safetensors.torch": lambda module: writes(module, "save_file", "save_model"),
        "torch.distributed.checkpoint.state_dict": state_dicts,
        "torch.distributed.checkpoint.state_dict_saver": lambda module: writes(module, "save", "async_save"),
        "torch.distributed.checkpoint": lambda module: writes(module, "save", "async_save"),
        "deepspeed.runtime.engine": lambda module: writes(module.DeepSpeedEngine, *_OF_DEEPSPEED),
        "transformers.modeling_utils": lambda module: writes(module.PreTrainedModel, "save_pretrained"),
        "accelerate.accelerator": lambda module: writes(module.Accelerator, "save_state"),
        "transformers.generation.utils": lambda module: put(
            module.GenerationMixin, generate=loop.during(Beside.GENERATION, module.GenerationMixin.generate)
        ),
    }


def _delete_nothing_of_before(loop: Loop) -> None:
    """A library that saves may delete older checkpoints, which may be those of a real run."""
    began = time.time()

    def unless_older(delete: Callable[..., None]) -> Callable[..., None]:
        def deleted(path: str, *args: object, **kwargs: object) -> None:
            if loop.saves_now and not is_users(sys._getframe(1)) and _is_older(path, began):
                note("deleting of older checkpoints", "files from before this run stay")
                return
            delete(path, *args, **kwargs)

        return deleted

    put(shutil, rmtree=unless_older(shutil.rmtree))
    put(os, remove=unless_older(os.remove), unlink=unless_older(os.unlink))


def _is_older(path: object, began: float) -> bool:
    """Whether a file, or one in a folder, was written before; what is no path (a descriptor's, within a folder) is not."""
    if not isinstance(path, str | os.PathLike):
        return False
    whole = Path(path)
    files = [whole, *whole.rglob("*")] if whole.is_dir() else [whole]
    return any(file.is_file() and file.stat().st_mtime < began for file in files)
