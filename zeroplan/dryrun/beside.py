"""What does a script do outside its training steps: evaluation, generation, or saving?

A forward of the trained model in evaluation mode counts as evaluation; with gradients on, only if the model was trained in training
mode. The part lasts until the next one begins, since the script keeps its results: logits of an evaluation, a gathered state
dict.
"""

import torch
from torch import nn

from zeroplan.dryrun.listener import Listener
from zeroplan.ledger import Beside, Phase


class BesideSteps:
    """Knows the trained models, and decides which part of the run a call begins."""

    def __init__(self, tracker: Listener) -> None:
        self._tracker = tracker
        self._parts: set[int] = set()
        self._in_training_mode: set[int] = set()
        self._unproven: list[tuple[int, int]] = []
        self._before: Phase | Beside = Phase.INIT
        self._proven = True

    def meet(self, root: nn.Module) -> None:
        """Remember the modules of a trained model."""
        self._parts |= {id(module) for module in root.modules()}

    def trains(self, root: nn.Module) -> None:
        """Remember whether a model is trained in training mode."""
        if root.training and id(root) not in self._in_training_mode:
            self._in_training_mode |= {id(module) for module in root.modules()}

    def forward(self, module: nn.Module, now: Phase | Beside) -> Beside | None:
        """The part that an outermost forward begins; None if it belongs to a training step."""
        if now is Phase.FORWARD:
            return None
        if torch.is_grad_enabled():
            return Beside.EVALUATION if not module.training and id(module) in self._in_training_mode else None
        if not self._parts:
            return self._perhaps(module)
        if id(module) not in self._parts:
            return None
        return Beside.NO_GRAD if module.training else Beside.EVALUATION

    def _perhaps(self, module: nn.Module) -> Beside | None:
        """Assume an evaluation before the first step; ``settle`` corrects that for models never trained, such as a teacher."""
        if module.training or not any(parameter.requires_grad for parameter in module.parameters()):
            return None
        self._unproven.append((len(self._tracker.spans), id(module)))
        return Beside.EVALUATION

    def turns_to_evaluation(self, module: nn.Module, now: Phase | Beside) -> bool:
        """Whether ``eval()`` begins an evaluation, which may allocate before its first forward."""
        return id(module) in self._parts and now not in (Phase.INIT, Phase.FORWARD, Phase.BACKWARD, Beside.EVALUATION)

    # --- parts to be confirmed ------------------------------------------------------------------------------------------

    def begins(self, before: Phase | Beside) -> None:
        """Begin a possible evaluation or saving; remember the part before it."""
        self._before, self._proven = before, False

    def proves(self) -> None:
        """Confirm the part: a forward ran, or something was written or gathered."""
        self._proven = True

    def ends(self) -> None:
        """Give an unconfirmed part the name of the part before it.

        A state dict that is neither written nor gathered is no saving: the script may average weights.
        """
        spans, calls = self._tracker.spans, self._tracker.calls
        if not self._proven and not (calls and calls[-1].span == len(spans) - 1):
            spans[-1] = spans[-1]._replace(phase=self._before)

    # --- afterwards -----------------------------------------------------------------------------------------------------

    def trained_after_all(self, *, step: int) -> None:
        """Rename an assumed evaluation to a training forward, because a backward follows."""
        self._tracker.spans[-1] = self._tracker.spans[-1]._replace(phase=Phase.FORWARD, step=step)

    def settle(self) -> None:
        """At the end of the run, rename evaluations of models that were never trained."""
        spans = self._tracker.spans
        for index, module in self._unproven:
            if module not in self._parts and index < len(spans):
                spans[index] = spans[index]._replace(phase=Phase.INIT)
