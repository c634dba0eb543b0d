"""What a script does beside its training steps: is it evaluation, generation, saving?

A forward without gradients of the trained model is evaluation where the model is in evaluation mode. So is one with gradients, of a
model that was trained in training mode. Such a part of the run lasts until the next begins, since a script keeps what it has made:
logits of an evaluation, a gathered state dict.
"""

import torch
from torch import nn

from zeroplan.dryrun.listener import Listener
from zeroplan.ledger import Beside, Phase


class BesideSteps:
    """Knows the trained models, and which part of the run a call begins."""

    def __init__(self, tracker: Listener) -> None:
        self._tracker = tracker
        self._parts: set[int] = set()
        self._in_training_mode: set[int] = set()
        self._unproven: list[tuple[int, int]] = []
        self._before: Phase | Beside = Phase.INIT
        self._proven = True

    def meet(self, root: nn.Module) -> None:
        """Learn the parts of a model that is trained."""
        self._parts |= {id(module) for module in root.modules()}

    def trains(self, root: nn.Module) -> None:
        """Learn that a model is trained in the mode that it is in."""
        if root.training and id(root) not in self._in_training_mode:
            self._in_training_mode |= {id(module) for module in root.modules()}

    def forward(self, module: nn.Module, now: Phase | Beside) -> Beside | None:
        """Which part of the run the forward of an outermost module is; None where that is not for it to say."""
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
        """Before the first step an evaluation is one if the model is trained later: a teacher may come first."""
        if module.training or not any(parameter.requires_grad for parameter in module.parameters()):
            return None
        self._unproven.append((len(self._tracker.spans), id(module)))
        return Beside.EVALUATION

    def turns_to_evaluation(self, module: nn.Module, now: Phase | Beside) -> bool:
        """Whether ``eval()`` of a module begins an evaluation: what it validates with is made before the first forward."""
        return id(module) in self._parts and now not in (Phase.INIT, Phase.FORWARD, Phase.BACKWARD, Beside.EVALUATION)

    # --- what may turn out to be none -----------------------------------------------------------------------------------

    def begins(self, before: Phase | Beside) -> None:
        """Remember what was going on before what may be an evaluation or a saving."""
        self._before, self._proven = before, False

    def proves(self) -> None:
        """Learn that it is one: a forward runs, or something is written or gathered."""
        self._proven = True

    def ends(self) -> None:
        """Name it for what was going on before, where it was none.

        A state dict that is neither written nor gathered is no saving: an average of the weights is kept, for example.
        """
        spans, calls = self._tracker.spans, self._tracker.calls
        if not self._proven and not (calls and calls[-1].span == len(spans) - 1):
            spans[-1] = spans[-1]._replace(phase=self._before)

    # --- afterwards -----------------------------------------------------------------------------------------------------

    def trained_after_all(self, *, step: int) -> None:
        """What looked like an evaluation was a training forward: a backward follows."""
        self._tracker.spans[-1] = self._tracker.spans[-1]._replace(phase=Phase.FORWARD, step=step)

    def settle(self) -> None:
        """The run is over: name what was not known to be an evaluation."""
        spans = self._tracker.spans
        for index, module in self._unproven:
            if module not in self._parts and index < len(spans):
                spans[index] = spans[index]._replace(phase=Phase.INIT)
