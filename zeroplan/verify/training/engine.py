"""The interface of the engines, and one training loop for all of them: micro-steps, optimizer step, ``zero_grad``.

The engines run unmodified. Labels around their functions tell the watcher the kind of each buffer.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from zeroplan.ledger import Kind, Phase
from zeroplan.spec.job import JobSpec
from zeroplan.spec.recipe import Precision, RecipeSpec
from zeroplan.verify.replaced import replaced
from zeroplan.verify.watching.watcher import Watcher


class Engine(ABC):
    """The functions that the training loop calls. By default they use torch's optimizer directly."""

    optimizer: torch.optim.Optimizer
    handed_on: Kind
    """The kind of gradients that autograd passes to parameters."""
    kept: Kind | None
    """The kind of gradients that parameters hold after a pass; None if it is the same."""

    @abstractmethod
    def micro_step(self, enter: Callable[[Phase], None], *, last: bool) -> None:
        """Run one forward and backward pass; ``enter`` is called when each begins."""

    def optimizer_step(self) -> None:
        """Update the parameters of this rank; ``ZeroRedundancyOptimizer`` then receives the others."""
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad()

    @abstractmethod
    def labels(self, watcher: Watcher, /) -> AbstractContextManager[None]:
        """Label the engine's own buffers for the watcher inside the block."""


def train(engine: Engine, watcher: Watcher, *, module: nn.Module, steps: int, accumulate: int) -> None:
    """Run ``steps`` optimizer steps of ``accumulate`` micro-batches each, and report phases and kinds to the watcher."""
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
    """An optimizer's states; ``ZeroRedundancyOptimizer`` keeps them in the optimizer it wraps."""
    holder = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    for state in holder.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def stored_dtype(recipe: RecipeSpec) -> torch.dtype:
    """The dtype in which an engine receives a module."""
    if recipe.precision == "bf16" or (recipe.engine == "deepspeed" and recipe.precision == "bf16-mixed"):
        return torch.bfloat16
    if recipe.engine == "deepspeed" and recipe.precision == "fp16-mixed":
        return torch.float16
    return torch.float32


def weights_dtype(job: JobSpec) -> torch.dtype:
    """The dtype in which an engine receives the job's model; weights frozen beside adapters are in the compute dtype by default."""
    return stored_dtype(job.recipe) if job.model.frozen_as_trained else COMPUTE[job.recipe.precision]


COMPUTE: dict[Precision, torch.dtype] = {
    "bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32,
}  # fmt: skip


#: Functions of an engine, each by owner and name, and the kind of memory they request.
Requesting = tuple[tuple[object, str, Kind], ...]


@contextmanager
def all_labelled(watcher: Watcher, asking: Requesting) -> Iterator[None]:
    """Label the requests of these functions inside the block; skip functions that this version lacks."""
    with ExitStack() as patches:
        for owner, name, kind in asking:
            if hasattr(owner, name):
                patches.enter_context(labelled(watcher, owner, name, kind))
        yield


def labelled(watcher: Watcher, owner: object, name: str, kind: Kind) -> AbstractContextManager[None]:
    """Label the requests of one function of an engine inside the block."""
    original: Callable[..., object] = getattr(owner, name)

    def asking(*args: object, **kwargs: object) -> object:
        with watcher.labelled(kind):
            return original(*args, **kwargs)

    return replaced(owner, name, asking)
