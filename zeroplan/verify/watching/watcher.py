"""What a training loop tells whoever watches it: where it is, and whose tensors are whose."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from zeroplan.ledger import Kind, Phase


class Watcher(AbstractContextManager["Watcher"], Protocol):
    """Who is told where the loop is and whose tensors are whose; a :class:`~zeroplan.verify.watching.tracker.Tracker` is one."""

    def enter(self, phase: Phase, step: int) -> None:
        """Begin a phase of a step."""
        ...

    def name_modules(self, root: nn.Module) -> None:
        """Learn the names of a module's parts."""
        ...

    def claim(self, kind: Kind, tensors: Iterable[torch.Tensor | None]) -> None:
        """Say what these tensors are for."""
        ...

    def gradients_are(self, kind: Kind) -> None:
        """Say what the gradients are that autograd hands to parameters."""
        ...

    def labelled(self, kind: Kind) -> AbstractContextManager[None]:
        """Say what is asked for inside."""
        ...

    def looking_away(self) -> AbstractContextManager[None]:
        """Say that what is asked for inside is no part of the run."""
        ...
