"""apex's Adam, whose step allocates only its states.

Source: apex of July 2026, ``apex/optimizers/fused_adam.py``; its kernel allocates nothing (``csrc/multi_tensor_adam.cu``).
"""

from collections.abc import Callable
from typing import Any

import torch

from zeroplan.dryrun.replacements import note


class FusedAdam(torch.optim.Optimizer):
    """``apex.optimizers.FusedAdam``: two fp32 states per parameter, and master copies with ``master_weights``."""

    def __init__(
        self, params: Any, lr: float = 1e-3, bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999),  # noqa: ANN401, FBT001, FBT002
        eps: float = 1e-8, adam_w_mode: bool = True, weight_decay: float = 0.0, amsgrad: bool = False,  # noqa: ARG002, FBT001, FBT002
        set_grad_none: bool = True, capturable: bool = False, master_weights: bool = False,  # noqa: FBT001, FBT002
    ) -> None:  # fmt: skip
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant.")
        if master_weights and not capturable:
            raise RuntimeError("Master weights is currently only supported with the capturable version.")
        note("apex's FusedAdam", "its states; its kernel allocates nothing else")
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self.set_grad_none, self.capturable, self.master_weights = set_grad_none, capturable, master_weights
        self.param_groups_master = [
            {"params": [one.clone().detach().float() if master_weights else None for one in group["params"]]}
            for group in self.param_groups
        ]

    def zero_grad(self, set_to_none: bool | None = None) -> None:  # noqa: FBT001
        """Clear gradients by the constructor's setting, unless overridden."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def step(self, closure: Callable[[], Any] | None = None, **_: object) -> Any:  # noqa: ANN401
        """Run a step; the first one makes the states."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for one in group["params"]:
                state = self.state[one]
                if one.grad is not None and not state:
                    for name in ("exp_avg", "exp_avg_sq"):
                        state[name] = torch.zeros_like(one.data).float()
        return loss


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)
    raise ImportError(f"apex.optimizers.{name} is not supported in a dry run; install apex, or use FusedAdam")


__all__ = ["FusedAdam"]
