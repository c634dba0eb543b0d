"""The interface to which a script's loop reports: implemented by the tracker of fake tensors and by a real GPU's counter."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import nn

from zeroplan.ledger import Beside, Kind, Phase
from zeroplan.verify.watching.recording import Block, Call, Span


class Listener(Protocol):
    """Receives phases and kinds of tensors. A real GPU's counter cannot see single blocks, so its lists stay empty."""

    spans: list[Span]

    @property
    def blocks(self) -> Sequence[Block]:
        """The blocks of memory that were allocated so far."""
        ...

    @property
    def calls(self) -> Sequence[Call]:
        """The collectives so far."""
        ...

    def enter(self, phase: Phase | Beside, step: int, *, collect: bool = True) -> None:
        """Begin a phase. With ``collect``, Python's garbage collector runs first."""
        ...

    def learn_modules(self, root: nn.Module) -> None:
        """Remember the names of a model's modules."""
        ...

    def own(self, tensors: Iterable[torch.Tensor]) -> None:
        """Label the parameters and buffers of a model."""
        ...

    def claim(self, kind: Kind, tensors: Iterable[torch.Tensor | None], *, over: bool = True) -> None:
        """Label tensors; with ``over=False`` only those that have no label yet."""
        ...

    def updated(self, tensors: Iterable[torch.Tensor]) -> None:
        """Label the tensors that an optimizer updates: parameters or master copies."""
        ...

    def gradients_are(self, kind: Kind) -> None:
        """Set the label of the gradients that autograd gives to parameters from now on."""
        ...
