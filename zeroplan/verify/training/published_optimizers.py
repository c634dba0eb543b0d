"""Optimizers that torch lacks: Lion as its authors published it, and Muon combined with the AdamW that it needs."""

from collections.abc import Callable, Iterable

import torch
from torch import nn


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
