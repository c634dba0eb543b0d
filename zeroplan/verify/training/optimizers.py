"""Builds a recipe's optimizer: torch's own, or one published elsewhere."""

from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from zeroplan.engines.optimizers import implementation_of
from zeroplan.errors import MeasurementError
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.verify.failures import NotHereError
from zeroplan.verify.training.published_optimizers import Lion, MuonAndAdamW

_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], Mapping[str, float]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-3}),
    "adam": (torch.optim.Adam, {"lr": 1e-3}),
    "sgd": (torch.optim.SGD, {"lr": 1e-3}),
    "sgd-momentum": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-3}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3}),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-3}),
    "lion": (Lion, {"lr": 1e-4}),
}
_MUON, _EIGHT_BITS = "muon", "adamw-8bit"


def trained(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters for an optimizer: those that are not frozen."""
    return (parameter for parameter in module.parameters() if parameter.requires_grad)


def make_optimizer(
    parameters: Iterator[nn.Parameter], recipe: RecipeSpec, blocks: Iterable[nn.Module] = ()
) -> torch.optim.Optimizer:
    """The optimizer with default arguments and the recipe's implementation; Muon updates matrices of the ``blocks``."""
    if recipe.optimizer == _MUON and blocks:
        return MuonAndAdamW(parameters, blocks, lr=1e-3)
    how = _implementation(recipe)
    cls, arguments = _optimizer_class(recipe)
    return cls(parameters, **arguments, **how)  # type: ignore[arg-type]  # each class has its own


def zero_redundancy(parameters: Iterator[nn.Parameter], recipe: RecipeSpec) -> torch.optim.Optimizer:
    """The same inside ``ZeroRedundancyOptimizer``, which gives each rank some of the parameters."""
    cls, arguments = _optimizer_class(recipe)
    return ZeroRedundancyOptimizer(parameters, optimizer_class=cls, **{**arguments, **_implementation(recipe)})  # type: ignore[arg-type]


def _optimizer_class(recipe: RecipeSpec) -> tuple[type[torch.optim.Optimizer], Mapping[str, float]]:
    if recipe.optimizer == _EIGHT_BITS:
        return _eight_bits(), {"lr": 1e-3}
    if recipe.optimizer not in _OPTIMIZERS:
        measured = ", ".join((*_OPTIMIZERS, _EIGHT_BITS, f"{_MUON} under fsdp2 and ddp at stage 0"))
        raise MeasurementError(f"optimizer {recipe.optimizer!r} cannot be run here; use one of {measured}")
    return _OPTIMIZERS[recipe.optimizer]


def _eight_bits() -> type[torch.optim.Optimizer]:
    if find_spec("bitsandbytes") is None:
        raise NotHereError("adamw-8bit needs bitsandbytes, which is not installed; install bitsandbytes 0.50 or later")
    from zeroplan.verify.training.eight_bits import AdamW8bit  # noqa: PLC0415  it imports bitsandbytes

    return AdamW8bit


def _implementation(recipe: RecipeSpec) -> dict[str, bool]:
    chosen = implementation_of(recipe)
    if recipe.optimizer == "lion":
        if chosen == "fused":
            raise MeasurementError("DeepSpeed's FusedLion is a kernel for GPUs; run Lion with --optimizer-impl forloop")
        return {}
    if recipe.optimizer == _EIGHT_BITS:
        return {}
    return {"fused": True} if chosen == "fused" else {"foreach": chosen == "foreach"}
