"""Classifies what a script does beside its training steps: evaluation, generation, saving.

A forward without gradients counts as evaluation if the trained model is in evaluation mode; so does one with gradients, if the
model was trained in training mode. Such a part lasts until the next one begins, since a script keeps its results: logits of an
evaluation, a gathered state dict.
"""

import torch
from torch import nn

from zeroplan.dryrun.listener import Listener
from zeroplan.ledger import Beside, Phase


class BesideSteps:
    """Keeps the trained models, and decides which part of the run a call begins."""

    def __init__(self, tracker: Listener) -> None:
        self._tracker = tracker
        self._parts: set[int] = set()
        self._in_training_mode: set[int] = set()
        self._unproven: list[tuple[int, int]] = []
        self._before: Phase | Beside = Phase.INIT
        self._proven = True

    def meet(self, root: nn.Module) -> None:
        """Note the parts of a trained model."""
        self._parts |= {id(module) for module in root.modules()}

    def trains(self, root: nn.Module) -> None:
        """Note that a model is trained in its current mode."""
        if root.training and id(root) not in self._in_training_mode:
            self._in_training_mode |= {id(module) for module in root.modules()}

    def forward(self, module: nn.Module, now: Phase | Beside) -> Beside | None:
        """The part of the run that an outermost forward begins; None if it begins no part beside the steps."""
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
        """Assume an evaluation before the first step; ``settle`` corrects it if the model is never trained, as a teacher."""
        if module.training or not any(parameter.requires_grad for parameter in module.parameters()):
            return None
        self._unproven.append((len(self._tracker.spans), id(module)))
        return Beside.EVALUATION

    def turns_to_evaluation(self, module: nn.Module, now: Phase | Beside) -> bool:
        """Whether ``eval()`` of a module begins an evaluation, which allocates before its first forward."""
        return id(module) in self._parts and now not in (Phase.INIT, Phase.FORWARD, Phase.BACKWARD, Beside.EVALUATION)

    # --- parts that may turn out to be something else -------------------------------------------------------------------

    def begins(self, before: Phase | Beside) -> None:
        """Remember the current part before a possible evaluation or saving."""
        self._before, self._proven = before, False

    def proves(self) -> None:
        """Confirm the part: a forward ran, or something was written or gathered."""
        self._proven = True

    def ends(self) -> None:
        """Rename an unconfirmed part to the part before it.

        A state dict that is neither written nor gathered is no saving: a script may keep an average of the weights.
        """
        spans, calls = self._tracker.spans, self._tracker.calls
        if not self._proven and not (calls and calls[-1].span == len(spans) - 1):
            spans[-1] = spans[-1]._replace(phase=self._before)

    # --- afterwards -----------------------------------------------------------------------------------------------------

    def trained_after_all(self, *, step: int) -> None:
        """Turn an assumed evaluation into a training forward, because a backward follows."""
        self._tracker.spans[-1] = self._tracker.spans[-1]._replace(phase=Phase.FORWARD, step=step)

    def settle(self) -> None:
        """At the end of the run, rename evaluations of models that were never trained."""
        spans = self._tracker.spans
        for index, module in self._unproven:
            if module not in self._parts and index < len(spans):
                spans[index] = spans[index]._replace(phase=Phase.INIT)
