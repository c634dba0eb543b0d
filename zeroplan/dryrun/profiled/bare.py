"""Takes a script's model out of its engine: removes wrapper and hooks, and makes parameters whole again.

It changes the model, so it runs after the script has ended. The script's own changes stay: adapters, other kernels, accelerate's
``forward``, checkpointing.
"""

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from zeroplan.errors import MeasurementError

_ENGINES = ("torch.distributed", "torch.nn.parallel", "deepspeed", "zeroplan")
"""Hooks whose function is defined in these packages are removed."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def model_in(root: nn.Module) -> nn.Module:
    """The model inside one or several wrappers."""
    return wrappers(root)[-1]


def wrappers(root: nn.Module) -> list[nn.Module]:
    """The wrappers of a model, outermost first, then the model itself."""
    found = [root]
    while (inside := _inside(found[-1])) is not None:
        found.append(inside)
    return found


def _inside(module: nn.Module) -> nn.Module | None:
    """The module inside an engine's, a library's or a compiler's wrapper; None without a wrapper."""
    kinds = [cls.__name__ for cls in type(module).__mro__]
    attribute = next((name for kind, name in _WRAPPERS.items() if kind in kinds), None)
    inside = None if attribute is None else getattr(module, attribute)
    return inside if isinstance(inside, nn.Module) else None


_WRAPPERS = {
    "DistributedDataParallel": "module", "FullyShardedDataParallel": "module", "DeepSpeedEngine": "module",
    "_FabricModule": "_forward_module", "OptimizedModule": "_orig_mod",
}  # fmt: skip
"""Class names of wrappers, whose libraries may be absent, and their attribute with the module."""


def bare(root: nn.Module) -> nn.Module:
    """The model without its engine. Raises MeasurementError if the model is split over several ranks."""
    model = model_in(root)
    _refuse(model)
    flat = dict(_parameters_in_flat_ones(root))
    _without_wrappers(model)
    whole: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.__class__ = type(module).__bases__[1]  # fully_shard had made it an FSDPLinear(FSDPModule, Linear)
        _without_hooks(module)
        module._parameters = {
            name: None if one is None else whole.setdefault(id(one), _whole(one)) for name, one in module._parameters.items()
        }
        for name, shape in flat.get(id(module), {}).items():
            module.__dict__.pop(name, None)
            module._parameters[name] = whole.setdefault(shape.key, shape.made())
    return model


class _Flattened:
    """A parameter that FSDP1 put into a flat one: its shape, dtype and identity."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, key: int, *, trained: bool) -> None:
        self._shape, self._dtype, self._trained = shape, dtype, trained
        self.key = key

    def made(self) -> nn.Parameter:
        """A whole parameter."""
        return nn.Parameter(torch.empty(self._shape, dtype=self._dtype, device="cuda"), requires_grad=self._trained)


def _parameters_in_flat_ones(root: nn.Module) -> Iterator[tuple[int, dict[str, _Flattened]]]:
    """The parameters that FSDP1 flattened, by module (torch 2.13, ``_flat_param.py``, ``FlatParameter._init_metadata``)."""
    found: dict[int, dict[str, _Flattened]] = {}
    for module in root.modules():
        handle = getattr(module, "_handle", None) if isinstance(module, FullyShardedDataParallel) else None
        flat = getattr(handle, "flat_param", None)
        if flat is None:
            continue
        keys: dict[tuple[int, str], _Flattened] = {}
        for at, (info, shape) in enumerate(zip(flat._param_infos, flat._shapes, strict=True)):
            one = _Flattened(shape, flat.dtype, id(flat) + at, trained=flat.requires_grad)
            found.setdefault(id(info.module), {})[info.param_name] = keys[id(info.module), info.param_name] = one
        for info in flat._shared_param_infos:
            found.setdefault(id(info.module), {})[info.param_name] = keys[id(info.prim_module), info.prim_param_name]
    yield from found.items()


def _without_wrappers(model: nn.Module) -> None:
    """Replace FSDP1's wrappers by the parts they wrap."""
    for module in list(model.modules()):
        for name, part in module._modules.items():
            if isinstance(part, FullyShardedDataParallel):
                module._modules[name] = part.module


def _without_hooks(module: nn.Module) -> None:
    for kind in _HOOKS:
        hooks = getattr(module, kind)
        for key in [key for key, hook in hooks.items() if _defined_in(hook).startswith(_ENGINES)]:
            del hooks[key]


def _defined_in(hook: Callable[..., object]) -> str:
    function = getattr(hook, "func", hook)  # of functools.partial
    function = getattr(function, "__func__", function)
    return str(getattr(function, "__module__", type(hook).__module__))


def _whole(one: nn.Parameter) -> nn.Parameter:
    """A parameter with its shape before sharding, without values."""
    shape = getattr(one, "ds_shape", one.shape)
    return nn.Parameter(torch.empty(tuple(shape), dtype=one.dtype, device="cuda"), requires_grad=one.requires_grad)


def _refuse(model: nn.Module) -> None:
    if any(cls.__name__ == "LightningModule" for cls in type(model).__mro__):
        raise MeasurementError("Lightning calls training_step instead of the model's forward, and that cannot be rerun")
    for name, one in model.named_parameters():
        mesh = one.device_mesh if isinstance(one, DTensor) else None
        names = () if mesh is None else mesh.mesh_dim_names or ()
        split = [dim for dim in names if dim.startswith(("tp", "cp", "ep", "pp", "tensor", "context", "expert", "pipeline"))]
        if split:
            raise MeasurementError(
                f"its parameter {name!r} is split over ranks of another kind than data parallel ({split[0]})"
            )
