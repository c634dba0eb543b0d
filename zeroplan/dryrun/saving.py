"""Reports when a script saves state dicts, and keeps it from writing them; older files stay."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim.optimizer import Optimizer

from zeroplan.dryrun.loop import Loop
from zeroplan.dryrun.patches import Patch
from zeroplan.dryrun.replacements import note
from zeroplan.dryrun.unwritten import Unwritten, folder_read
from zeroplan.dryrun.without_bytes import write_module, write_pickle, write_safetensors
from zeroplan.ledger import Beside
from zeroplan.verify.replaced import put

_OF_FSDP1 = ("full_optim_state_dict", "sharded_optim_state_dict", "optim_state_dict")
_STATE_DICTS = ("get_model_state_dict", "get_optimizer_state_dict", "get_state_dict")
_OF_DEEPSPEED = ("save_16bit_model", "save_checkpoint", "_zero3_consolidated_16bit_state_dict")


def watch(loop: Loop, aside: Path) -> dict[str, Patch]:
    """Report saving to the loop, and return the patches to apply when libraries are imported.

    Data that the script writes over files from before the run goes into the folder ``aside``.
    """
    saving = _Saving(loop, Unwritten(lambda: loop.saves_now, aside))
    saving.of_torch()
    return {
        "safetensors.torch": saving.safetensors,
        "torch.distributed.checkpoint.state_dict": saving.state_dicts,
        "torch.distributed.checkpoint.state_dict_saver": saving.distributed,
        "torch.distributed.checkpoint.state_dict_loader": saving.loaded,
        "torch.distributed.checkpoint": saving.checkpoint,
        "deepspeed.runtime.engine": lambda module: saving.writes(module.DeepSpeedEngine, *_OF_DEEPSPEED),
        "transformers.modeling_utils": lambda module: saving.writes(module.PreTrainedModel, "save_pretrained"),
        "accelerate.accelerator": lambda module: saving.writes(module.Accelerator, "save_state"),
        "transformers.generation.utils": saving.generation,
    }


class _Saving:
    """Patches of functions that save or load."""

    def __init__(self, loop: Loop, unwritten: Unwritten) -> None:
        self.loop, self.unwritten = loop, unwritten

    def gathers(self, owner: object, *names: str) -> None:
        put(owner, **{name: self.loop.saving(getattr(owner, name)) for name in names if hasattr(owner, name)})

    def writes(self, owner: object, *names: str) -> None:
        put(owner, **{name: self.loop.saving(getattr(owner, name), writes=True) for name in names if hasattr(owner, name)})

    def of_torch(self) -> None:
        self.gathers(nn.Module, "state_dict")
        self.gathers(Optimizer, "state_dict")
        sharded = {name: staticmethod(self.loop.saving(getattr(FullyShardedDataParallel, name))) for name in _OF_FSDP1}
        put(FullyShardedDataParallel, **sharded)
        self.unwritten.watch()
        put(torch, save=self.unwritten.saves(torch.save, write=write_pickle), load=self.unwritten.loads(torch.load))
        self.writes(torch, "save")

    def safetensors(self, module: ModuleType) -> None:
        put(module, save_file=self.unwritten.saves(module.save_file, name="filename", write=write_safetensors))
        put(module, save_model=self.unwritten.saves(module.save_model, name="filename", write=write_module))
        self.writes(module, "save_file", "save_model")

    def distributed(self, module: ModuleType) -> None:
        for name in ("save", "async_save"):
            if hasattr(module, name):
                put(module, **{name: self.unwritten.saves_folder(getattr(module, name), ".metadata", "__0_0.distcp")})
        self.writes(module, "save", "async_save")

    def loaded(self, module: ModuleType) -> None:
        put(module, load=_loads_again(module.load, self.unwritten))

    def checkpoint(self, module: ModuleType) -> None:
        self.distributed(module)
        self.loaded(module)

    def state_dicts(self, module: ModuleType) -> None:
        self.gathers(module, *_STATE_DICTS)
        put(module, _init_optim_state=self.loop.beside(module._init_optim_state))  # it runs a step with zero gradients

    def generation(self, module: ModuleType) -> None:
        generates = self.loop.during(Beside.GENERATION, module.GenerationMixin.generate)
        put(module.GenerationMixin, generate=generates)


def _loads_again(load: Callable[..., object], unwritten: Unwritten) -> Callable[..., object]:
    """Wrap ``torch.distributed.checkpoint.load``: for a checkpoint of this run, loading in place changes nothing."""

    @wraps(load)
    def loads(state_dict: dict[str, Any], **kwargs: Any) -> object:  # noqa: ANN401
        folder = folder_read(kwargs)
        if folder is None or not unwritten.has_saved(Path(folder, ".metadata")):
            return load(state_dict, **kwargs)
        note("distributed checkpoints", "a checkpoint of this run is loaded without reading")
        for one in state_dict.values():
            if hasattr(one, "load_state_dict") and hasattr(one, "state_dict"):
                one.load_state_dict(one.state_dict())
        return None

    return loads
