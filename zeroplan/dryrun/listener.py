"""Who is told where a script is and whose tensors are whose: a tracker of fake tensors, or what counts on a real GPU."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import nn

from zeroplan.ledger import Beside, Kind, Phase
from zeroplan.verify.watching.recording import Block, Call, Span


class Listener(Protocol):
    """Takes what the loop says, as far as it can use it. ``blocks`` and ``calls`` are empty where single ones are not seen."""

    spans: list[Span]

    @property
    def blocks(self) -> Sequence[Block]:
        """What was asked for so far."""
        ...

    @property
    def calls(self) -> Sequence[Call]:
        """The collectives so far."""
        ...

    def enter(self, phase: Phase | Beside, step: int, *, collect: bool = True) -> None:
        """Begin a part of the run."""
        ...

    def learn_modules(self, root: nn.Module) -> None:
        """Learn the names of a model's parts."""
        ...

    def own(self, tensors: Iterable[torch.Tensor]) -> None:
        """Say that these are a model's own."""
        ...

    def claim(self, kind: Kind, tensors: Iterable[torch.Tensor | None], *, over: bool = True) -> None:
        """Say what these tensors are for."""
        ...

    def updated(self, tensors: Iterable[torch.Tensor]) -> None:
        """Learn what an optimizer has updated: parameters, or copies of them that belong to the optimizer."""
        ...

    def gradients_are(self, kind: Kind) -> None:
        """Say what the gradients are that autograd hands to parameters."""
        ...
