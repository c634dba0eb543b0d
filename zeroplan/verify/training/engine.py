"""The engines themselves, unmodified, behind one small face: a micro-step, an optimizer step, gradients cleared.

One training loop (:func:`train`) serves them all. Only labels are put around the engines' functions, from outside, so that the
watcher knows what a buffer is for.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from zeroplan.ledger import Kind, Phase
from zeroplan.spec.job import JobSpec
from zeroplan.spec.recipe import Precision, RecipeSpec
from zeroplan.verify.replaced import replaced
from zeroplan.verify.watching.watcher import Watcher


class Engine(Protocol):
    """What the training loop asks of an engine."""

    optimizer: torch.optim.Optimizer
    handed_on: Kind
    """What the gradients are that autograd hands to parameters."""
    kept: Kind | None
    """What the gradients are that parameters have after a pass; None where they are what autograd has handed on."""

    def micro_step(self, enter: Callable[[Phase], None], *, last: bool) -> None:
        """Run one forward and backward pass; ``enter`` is told when each begins."""
        ...

    def optimizer_step(self) -> None:
        """Update the parameters."""
        ...

    def zero_grad(self) -> None:
        """Drop the gradients."""
        ...

    def labels(self, watcher: Watcher, /) -> AbstractContextManager[None]:
        """Tell the watcher what the engine's own buffers are for, as long as this is open."""
        ...


def train(engine: Engine, watcher: Watcher, *, module: nn.Module, steps: int, accumulate: int) -> None:
    """Take ``steps`` optimizer steps of ``accumulate`` micro-batches each, and tell the watcher where it is."""
    watcher.gradients_are(engine.handed_on)
    for step in range(steps):
        for micro in range(accumulate):
            engine.micro_step(lambda phase, step=step: watcher.enter(phase, step), last=micro == accumulate - 1)  # type: ignore[misc]
            if engine.kept is not None:
                watcher.claim(engine.kept, (parameter.grad for parameter in module.parameters()))
        watcher.enter(Phase.STEP, step)
        engine.optimizer_step()
        watcher.claim(Kind.OPTIMIZER_STATE, _states(engine.optimizer))
        engine.zero_grad()
    watcher.enter(Phase.INIT, steps)


def _states(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """What an optimizer holds; ``ZeroRedundancyOptimizer`` holds it in the one it wraps."""
    holder = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    for state in holder.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def stored_dtype(recipe: RecipeSpec) -> torch.dtype:
    """The dtype in which a module is handed to the engine."""
    if recipe.precision == "bf16" or (recipe.engine == "deepspeed" and recipe.precision == "bf16-mixed"):
        return torch.bfloat16
    if recipe.engine == "deepspeed" and recipe.precision == "fp16-mixed":
        return torch.float16
    return torch.float32


def weights_dtype(job: JobSpec) -> torch.dtype:
    """The dtype in which the job's model is handed to the engine: where it is frozen, that in which it computes."""
    return stored_dtype(job.recipe) if job.model.adapter is None else COMPUTE[job.recipe.precision]


COMPUTE: dict[Precision, torch.dtype] = {
    "bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32,
}  # fmt: skip


#: Functions of an engine, each by its owner and name, and what they ask memory for.
Asking = tuple[tuple[object, str, Kind], ...]


@contextmanager
def all_labelled(watcher: Watcher, asking: Asking) -> Iterator[None]:
    """Say what for these functions ask for memory, as long as this is open; versions that lack one do without it."""
    with ExitStack() as patches:
        for owner, name, kind in asking:
            if hasattr(owner, name):
                patches.enter_context(labelled(watcher, owner, name, kind))
        yield


def labelled(watcher: Watcher, owner: object, name: str, kind: Kind) -> AbstractContextManager[None]:
    """Say what for a function of an engine asks for memory, as long as this is open."""
    original: Callable[..., object] = getattr(owner, name)

    def asking(*args: object, **kwargs: object) -> object:
        with watcher.labelled(kind):
            return original(*args, **kwargs)

    return replaced(owner, name, asking)
