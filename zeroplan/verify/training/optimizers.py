"""Builds a recipe's optimizer: torch's own, or one published elsewhere."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from zeroplan.engines.optimizers import implementation_of
from zeroplan.errors import MeasurementError
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.verify.failures import NotHereError


class Lion(torch.optim.Optimizer):
    """Lion, one tensor after the other, with the temporaries of the authors' own code.

    Source: Chen et al. 2023, arXiv:2302.06675, algorithm 2; google/automl, ``lion/lion_pytorch.py``, ``Lion.step``, whose names are
    kept: ``update`` of one tensor stays alive until the next one is made.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        del closure
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.mul_(1 - group["lr"] * group["weight_decay"])
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                exp_avg = state["exp_avg"]
                update = exp_avg * beta1 + p.grad * (1 - beta1)
                p.add_(update.sign_(), alpha=-group["lr"])
                exp_avg.mul_(beta2).add_(p.grad, alpha=1 - beta2)


class MuonAndAdamW(torch.optim.Optimizer):
    """``torch.optim.Muon`` for the matrices of the blocks and ``torch.optim.AdamW`` for the rest, as Muon's documentation says.

    AdamW runs with ``foreach``, its default on CUDA.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], blocks: Iterable[nn.Module], lr: float) -> None:
        in_blocks = {id(one) for block in blocks for one in block.parameters() if one.ndim == 2}
        given = list(parameters)
        super().__init__(given, {})
        self._muon = torch.optim.Muon([one for one in given if id(one) in in_blocks], lr=lr)
        self._adamw = torch.optim.AdamW([one for one in given if id(one) not in in_blocks], lr=lr, foreach=True)
        self._muon.state = self._adamw.state = self.state  # both optimizers share one state

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Run both optimizers' steps."""
        del closure
        self._muon.step()  # type: ignore[no-untyped-call]
        self._adamw.step()


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
    """The trainable parameters of a module."""
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


def stepping_in_backward(parameters: Iterator[nn.Parameter], recipe: RecipeSpec) -> torch.optim.Optimizer:
    """The first of one optimizer per parameter, each of which steps inside the backward; they share its state.

    Its later ``step`` finds no gradients. Source: PyTorch's tutorial on the optimizer's step inside the backward.
    """
    each = {one: make_optimizer(iter((one,)), recipe) for one in parameters}
    first = next(iter(each.values()))

    def step(parameter: torch.Tensor) -> None:
        optimizer = each[parameter]  # type: ignore[index]  # hooks are called with the parameters they are of
        optimizer.step()
        optimizer.zero_grad()

    for parameter, optimizer in each.items():
        optimizer.state = first.state
        parameter.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]
    return first


def lomo(module: nn.Module, recipe: RecipeSpec) -> torch.optim.Optimizer:
    """LOMO or AdaLomo of lomo_optim, which updates weights in hooks of the backward; ``fused_backward`` runs it."""
    if find_spec("lomo_optim") is None:
        raise NotHereError(f"{recipe.optimizer} needs lomo_optim, which is not installed; install lomo-optim 0.1.1")
    cls = getattr(import_module("lomo_optim"), {"lomo": "Lomo", "adalomo": "AdaLomo"}[recipe.optimizer])
    made: torch.optim.Optimizer = cls(module)
    return made


def zero_redundancy(parameters: Iterator[nn.Parameter], recipe: RecipeSpec) -> torch.optim.Optimizer:
    """The recipe's optimizer inside ``ZeroRedundancyOptimizer``, which gives each rank some of the parameters."""
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
