"""The interface through which a training loop reports its phase and the kinds of its tensors."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from zeroplan.ledger import Kind, Phase


class Watcher(AbstractContextManager["Watcher"], Protocol):
    """Receives a loop's phases and the kinds of its tensors; :class:`~zeroplan.verify.watching.tracker.Tracker` is one."""

    def enter(self, phase: Phase, step: int) -> None:
        """Begin a phase of a step."""
        ...

    def name_modules(self, root: nn.Module) -> None:
        """Note the names of a module's parts."""
        ...

    def claim(self, kind: Kind, tensors: Iterable[torch.Tensor | None]) -> None:
        """Give tensors a kind."""
        ...

    def gradients_are(self, kind: Kind) -> None:
        """Set the kind of gradients that autograd passes to parameters."""
        ...

    def labelled(self, kind: Kind) -> AbstractContextManager[None]:
        """Give all requests inside the block this kind."""
        ...

    def not_recording(self) -> AbstractContextManager[None]:
        """Do not record requests inside the block."""
        ...
