"""In which phase is a script's training loop? Follows it by torch's own hooks, and reports the phases to a listener.

A forward is a call of an outermost module with gradients on and trainable parameters, in either mode: ``from_pretrained`` returns
a model in evaluation mode, and not every loop changes that. A backward is an outermost ``torch.autograd.backward``, a step an
outermost ``optimizer.step``. A step ends when the next forward begins, because several optimizers may run and the loop clears
gradients afterwards. After the last requested step zeroplan stops the script. If the script ends by itself, its last step ends
when the first of its models and optimizers is freed. Evaluation, generation and saving are separate parts (``beside.py``).
"""

import time
import weakref
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zeroplan.dryrun.beside import BesideSteps
from zeroplan.dryrun.listener import Listener
from zeroplan.dryrun.profiled.observer import Observer
from zeroplan.ledger import Beside, Kind, Phase
from zeroplan.script_run import Ended
from zeroplan.verify.nested import tensors_in
from zeroplan.verify.replaced import put

_PATIENCE = 10
"""Give up after this many times the requested steps if an optimizer never reaches them."""


class StepsDone(BaseException):
    """All requested optimizer steps are done. Not an ``Exception``, which scripts catch."""


class Loop:
    """Reports the phases of a training loop to a listener."""

    def __init__(
        self, tracker: Listener, steps: int, observer: Observer | None = None, *, ends_at: float | None = None
    ) -> None:
        self._tracker, self._steps, self._observer, self._ends_at = tracker, steps, observer, ends_at
        self._beside = BesideSteps(tracker)
        self.deaf = False
        """Whether the script has ended, so that hooks do nothing."""
        self._phase: Phase | Beside = Phase.INIT
        self._modules = self._backwards = self._engines = self._optimizers = self._others = 0
        self._stepped = self._over = False
        self._steps_of: Counter[int] = Counter()
        """Steps of every optimizer, by its ``id``."""
        self._freed_optimizers: list[weakref.ref[Optimizer]] = []
        """Weak references to the script's optimizers, to notice when one is freed."""
        self.ended: Ended = "script ended"
        """Why the run ended."""
        self._roots: set[int] = set()
        self._models: list[weakref.ref[nn.Module]] = []
        self.steps_done = 0
        self.end_now: Callable[[], None] = lambda: None
        """Ends the process with the answer."""

    @property
    def completed(self) -> int:
        """The number of optimizer steps done, including one that ends only at the next forward."""
        return self.steps_done + self._stepped

    def watch(self) -> None:
        """Register the hooks, for the rest of the process."""
        register_module_forward_pre_hook(self._forward_begins)
        register_module_forward_hook(self._forward_ends, always_call=True)
        register_optimizer_step_pre_hook(self._step_begins)
        register_optimizer_step_post_hook(self._step_ends)
        put(nn.Module, eval=self._at_evaluation(nn.Module.eval))
        torch.autograd.backward = self.in_backward(torch.autograd.backward)

    def finish(self, *, collect: bool = False) -> None:
        """End the run: later requests belong to no step.

        Without ``collect``, Python frees reference cycles after this end.
        """
        if self.completed and not self._over:
            self._over = True
            self._leave()
            self._tracker.enter(Phase.INIT, self.completed, collect=collect)
            self._beside.settle()

    def _on_freed(self, _: object) -> None:
        """End the last step just before Python frees a model or optimizer of the script."""
        if not self.deaf and not self._over and self.completed >= self._steps and self._phase is not Beside.AFTER:
            self._leave()
            self._phase = Beside.AFTER
            self._tracker.enter(Beside.AFTER, self.completed, collect=False)

    def _enter(self, phase: Phase | Beside) -> None:
        self._leave()
        self._phase = phase
        self._tracker.enter(phase, self.steps_done)

    def _leave(self) -> None:
        if self._phase in (Beside.SAVING, Beside.EVALUATION):
            self._beside.ends()

    def _enter_provisionally(self, phase: Beside) -> None:
        """Enter a part of the run that ``beside.py`` may rename later."""
        before = self._phase
        self._enter(phase)
        self._beside.begins(before)

    @property
    def stopped(self) -> bool:
        """Whether the script was stopped."""
        return self.ended != "script ended"

    def _stop(self, ended: Ended) -> None:
        self.finish(collect=True)
        self.ended = ended
        raise StepsDone

    # --- beside the steps -----------------------------------------------------------------------------------------------

    @property
    def _is_busy(self) -> bool:
        """Whether a pass, a step or another part is running, inside which no part begins; or the run has ended."""
        within = self._modules or self._backwards or self._optimizers or self._engines or self._others
        return self.deaf or self._over or bool(within)

    @property
    def saves_now(self) -> bool:
        """Whether the script is saving."""
        return self._phase is Beside.SAVING

    def _at_evaluation(self, turn: Callable[..., nn.Module]) -> Callable[..., nn.Module]:

        def traced(module: nn.Module) -> nn.Module:
            if not self._is_busy and self._beside.turns_to_evaluation(module, self._phase):
                self._enter_provisionally(Beside.EVALUATION)
            return turn(module)

        return traced

    def during(self, phase: Beside, run: Callable[..., object]) -> Callable[..., object]:
        """Wrap a function so that its calls outside a pass or step become a part of the run."""

        @wraps(run)
        def ran(*args: object, **kwargs: object) -> object:
            if self._is_busy:
                return run(*args, **kwargs)
            before = self._phase
            if before is not phase:
                self._enter(phase)
            self._others += 1
            try:
                return run(*args, **kwargs)
            finally:
                self._others -= 1
                if before is Beside.EVALUATION and phase is Beside.GENERATION:
                    self._enter(before)
                    self._beside.proves()

        return ran

    def saving(self, run: Callable[..., object], *, writes: bool = False) -> Callable[..., object]:
        """Wrap a function that makes or writes a state dict; before the first step it counts as loading."""
        saves = self.during(Beside.SAVING, run)

        @wraps(run)
        def saved(*args: object, **kwargs: object) -> object:
            if self._phase is Phase.INIT or self._is_busy:
                return run(*args, **kwargs)
            if self._phase is not Beside.SAVING:
                self._enter_provisionally(Beside.SAVING)
            before = len(self._tracker.blocks)
            result = saves(*args, **kwargs)
            if writes or len(self._tracker.blocks) > before:
                self._beside.proves()
            return result

        return saved

    # --- forward --------------------------------------------------------------------------------------------------------

    def _forward_begins(self, module: nn.Module, _args: object) -> None:
        if self.deaf:
            return
        if self._over:  # the script caught StepsDone and continues
            self.end_now()
        self._modules += 1
        if self._backwards and self._observer is not None:
            self._observer.recomputes = True
        if self._modules > 1 or self._backwards or self._others:
            return
        if self._ends_at is not None and self.completed and time.perf_counter() > self._ends_at:
            self._stop("time over")
        if (beside := self._beside.forward(module, self._phase)) is not None:
            if beside is not self._phase:
                self._enter(beside)
            self._beside.proves()
        elif torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters()):
            self._trains(module)

    def begin_passes(self) -> None:
        """Begin a training step's passes, since the loop may allocate before the first forward."""
        if torch.is_grad_enabled() and not self._is_busy:
            self._begin_forward()

    def _begin_forward(self) -> None:
        if self._phase is not Phase.FORWARD:
            self._next_step()
            self._enter(Phase.FORWARD)

    def _trains(self, module: nn.Module) -> None:
        self._begin_forward()
        if id(module) not in self._roots:
            self._learn_model(module)
        self._beside.trains(module)

    def _learn_model(self, root: nn.Module) -> None:
        self._roots.add(id(root))
        self._beside.meet(root)
        self._tracker.learn_modules(root)
        self._tracker.own((*nn.Module.parameters(root), *nn.Module.buffers(root)))
        self._models.append(weakref.ref(root, self._on_freed))
        if self._observer is not None:
            self._observer.meet(root)
        if _reduces_elsewhere(root):
            self._tracker.gradients_are(Kind.UNSHARDED_GRADIENTS)

    def _forward_ends(self, *_: object) -> None:
        self._modules -= 1

    # --- backward -------------------------------------------------------------------------------------------------------

    def in_backward(self, backward: Callable[..., None]) -> Callable[..., None]:
        """Wrap autograd's backward as the backward of the step."""

        def begins(*args: object, **kwargs: object) -> None:
            if self.deaf:
                backward(*args, **kwargs)
                return
            self._backwards += 1
            if self._backwards == 1:
                if self._phase is Beside.EVALUATION:
                    self._beside.trained_after_all(step=self.completed)
                    self._next_step()
                self._enter(Phase.BACKWARD)
                if self._observer is not None:
                    self._observer.backward_begins(list(tensors_in(args[:1] or kwargs.get("tensors"))), self._root())
            try:
                backward(*args, **kwargs)
            finally:
                self._backwards -= 1
                if not self._backwards:
                    self._claim_gradients()

        return begins

    def _root(self) -> nn.Module | None:
        return self._models[0]() if self._models else None

    def _claim_gradients(self) -> None:
        models: list[nn.Module] = [model for one in self._models if (model := one()) is not None]
        self._tracker.claim(Kind.GRADIENTS, (parameter.grad for model in models for parameter in model.parameters()))

    # --- the optimizer's step -------------------------------------------------------------------------------------------

    def _step_begins(
        self, _optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._optimizers += 1  # an optimizer may call others
        if self._observer is not None:
            self._observer.step_begins()
        if self._engines or self._optimizers > 1:
            return None
        if self._phase is not Phase.STEP:
            self._enter(Phase.STEP)
        closure = kwargs.get("closure") or next((one for one in args[1:] if callable(one)), None)
        if not callable(closure):
            return None
        return args[:1], {**kwargs, "closure": self._closed(closure)}

    def _closed(self, closure: Callable[..., object]) -> Callable[..., object]:
        """Wrap an optimizer's closure, which runs forward and backward inside the step, and return to the step after it."""

        def closed(*args: object, **kwargs: object) -> object:
            result = closure(*args, **kwargs)
            self._enter(Phase.STEP)
            return result

        return closed

    def _step_ends(self, optimizer: Optimizer, *_: object) -> None:
        self._tracker.claim(Kind.OPTIMIZER_STATE, tensors_in(optimizer.state), over=False)
        self._tracker.updated(tensors_in([group.get("params") for group in optimizer.param_groups]))
        own = [value for name, value in vars(optimizer).items() if name not in ("state", "param_groups", "defaults")]
        self._tracker.claim(Kind.OPTIMIZER_STATE, tensors_in(own), over=False)  # such as master copies
        self._optimizers -= 1
        if not self._engines and not self._optimizers:
            self._stepped = True
            if id(optimizer) not in self._steps_of:
                self._freed_optimizers.append(weakref.ref(optimizer, self._on_freed))
            self._steps_of[id(optimizer)] += 1
        self._observe_step(optimizer)

    def _observe_step(self, optimizer: Optimizer | None) -> None:
        if self._observer is not None:
            self._observer.step_ended(optimizer, self._root(), last=self.completed >= self._steps)

    def within_engine(self, step: Callable[..., object], *, counts: Callable[[object], bool]) -> Callable[..., object]:
        """Wrap an engine's own step, which may run several optimizers; ``counts`` returns whether a call is an optimizer step."""

        def stepped(engine: object, *args: object, **kwargs: object) -> object:
            if not counts(engine):
                return step(engine, *args, **kwargs)
            self._enter(Phase.STEP)
            self._engines += 1
            try:
                return step(engine, *args, **kwargs)
            finally:
                self._engines -= 1
                self._stepped = True
                self._observe_step(None)

        return stepped

    def beside(self, make: Callable[..., object]) -> Callable[..., object]:
        """Wrap an engine's function whose optimizer step only makes states and does not count."""

        def made(*args: object, **kwargs: object) -> object:
            self._engines += 1
            try:
                return make(*args, **kwargs)
            finally:
                self._engines -= 1

        return made

    def _next_step(self) -> None:
        if not self._stepped:
            return
        self.steps_done, self._stepped = self.steps_done + 1, False
        if self._enough():
            self._stop("steps taken")

    def _enough(self) -> bool:
        """Whether every optimizer has done the requested steps; a GAN's two optimizers alternate."""
        if self._ends_at is not None:
            return False
        every = all(count >= self._steps for count in self._steps_of.values())
        return self.steps_done >= self._steps * (1 if every else _PATIENCE)


def _reduces_elsewhere(root: nn.Module) -> bool:
    """Whether the engine reduces gradients into other tensors: shards, or views of buckets."""
    if isinstance(root, DistributedDataParallel):
        return bool(root.gradient_as_bucket_view)
    return any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in root.modules())
