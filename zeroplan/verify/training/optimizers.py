"""torch's optimizers, as a recipe asks for them."""

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from zeroplan.engines.optimizers import implementation_of
from zeroplan.errors import MeasurementError
from zeroplan.spec.recipe import RecipeSpec

_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], Mapping[str, float]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-3}),
    "adam": (torch.optim.Adam, {"lr": 1e-3}),
    "sgd": (torch.optim.SGD, {"lr": 1e-3}),
    "sgd-momentum": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-3}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3}),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-3}),
}


def trained(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that an optimizer is given: those that are not frozen."""
    return (parameter for parameter in module.parameters() if parameter.requires_grad)


def make_optimizer(parameters: Iterator[nn.Parameter], recipe: RecipeSpec) -> torch.optim.Optimizer:
    """Build torch's optimizer with its default arguments and the recipe's implementation."""
    how = _implementation(recipe)
    cls, arguments = _optimizer_class(recipe)
    return cls(parameters, **arguments, **how)  # type: ignore[arg-type]  # each class has its own


def zero_redundancy(parameters: Iterator[nn.Parameter], recipe: RecipeSpec) -> torch.optim.Optimizer:
    """The same in ``ZeroRedundancyOptimizer``, which gives each rank some of the parameters."""
    cls, arguments = _optimizer_class(recipe)
    return ZeroRedundancyOptimizer(parameters, optimizer_class=cls, **{**arguments, **_implementation(recipe)})  # type: ignore[arg-type]


def _optimizer_class(recipe: RecipeSpec) -> tuple[type[torch.optim.Optimizer], Mapping[str, float]]:
    if recipe.optimizer not in _OPTIMIZERS:
        raise MeasurementError(f"optimizer {recipe.optimizer!r} cannot be run here; measured are {', '.join(_OPTIMIZERS)}")
    return _OPTIMIZERS[recipe.optimizer]


def _implementation(recipe: RecipeSpec) -> dict[str, bool]:
    chosen = implementation_of(recipe)
    return {"fused": True} if chosen == "fused" else {"foreach": chosen == "foreach"}
