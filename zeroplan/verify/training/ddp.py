"""Trains with ``DistributedDataParallel`` in a plain loop, with or without ``ZeroRedundancyOptimizer``."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket, Reducer
from torch.nn.parallel import DistributedDataParallel

from zeroplan.ledger import Kind, Phase
from zeroplan.spec.recipe import LOMO, DdpOptions, RecipeSpec
from zeroplan.verify.training.engine import COMPUTE, Engine, labelled
from zeroplan.verify.training.optimizers import lomo, make_optimizer, stepping_in_backward, trained, zero_redundancy
from zeroplan.verify.training.workload import Workload
from zeroplan.verify.watching.watcher import Watcher

_LEARNING_RATE = 1e-3


class Ddp(Engine):
    """``DistributedDataParallel``, alone or with ``ZeroRedundancyOptimizer``; mixed precision by autocast.

    A single rank has nothing to reduce, so its module is wrapped only if the recipe asks for it.
    """

    kept: Kind | None = Kind.GRADIENTS

    def __init__(self, work: Workload, recipe: RecipeSpec) -> None:
        self._wrapper = _wrapped(work, recipe.ddp) if recipe.wraps_one_rank or dist.get_world_size() > 1 else None
        self._work, self._recipe = work, recipe
        self._device = next(work.module.parameters()).device.type
        self.handed_on = Kind.UNSHARDED_GRADIENTS if recipe.ddp.gradient_as_bucket_view else Kind.GRADIENTS
        parameters = trained(work.module)
        sharded = recipe.zero_stage == 1
        if recipe.optimizer in LOMO:
            self.optimizer = lomo(work.module, recipe)
        elif recipe.ddp.step_in_backward:
            self.optimizer = stepping_in_backward(parameters, recipe)
        else:
            self.optimizer = zero_redundancy(parameters, recipe) if sharded else make_optimizer(parameters, recipe, work.blocks)

    def reduce_by_hook(self) -> None:
        """Make DDP reduce buckets by a hook, since the reducer's C++ cannot read a fake process group's result."""
        if self._wrapper is not None:
            self._wrapper.register_comm_hook(None, reduce_bucket)

    def micro_step(self, enter: Callable[[Phase], None], *, last: bool) -> None:
        """Run one forward and backward pass; DDP reduces gradients in the step's last one, or in all if the recipe says so."""
        model = self._wrapper or self._work.module
        syncs = last or self._recipe.sync_every_micro_batch
        with nullcontext() if syncs or self._wrapper is None else self._wrapper.no_sync():
            enter(Phase.FORWARD)
            with autocast(self._recipe, self._device):
                output = model(**self._work.batch)
            loss = self._work.loss(output)
            if not self._recipe.keep_logits:
                del output
            enter(Phase.BACKWARD)
            if self._recipe.optimizer in LOMO:
                self.optimizer.fused_backward(loss, _LEARNING_RATE)  # type: ignore[attr-defined]
            else:
                loss.backward()  # type: ignore[no-untyped-call]

    def optimizer_step(self) -> None:
        """Update the parameters, unless the backward has updated them."""
        if self._recipe.optimizer not in LOMO:
            super().optimizer_step()

    def labels(self, watcher: Watcher) -> AbstractContextManager[None]:
        """Label the buckets that DDP's reducer rebuilds in the second forward; its constructor makes the first ones."""
        return labelled(watcher, Reducer, "_rebuild_buckets", Kind.REDUCE)


def _wrapped(work: Workload, options: DdpOptions) -> DistributedDataParallel:
    """DDP with the recipe's options.

    In a fake process group the reducer's C++ cannot pin its map of used parameters. DDP's Python then copies the output, as it does
    for unused parameters from the second step on.
    """
    unused, static, fake = options.find_unused_parameters, options.static_graph, dist.get_backend().startswith("fake")
    wrapper = DistributedDataParallel(
        work.module,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
        bucket_cap_mb=options.bucket_cap_mb,
        find_unused_parameters=unused and not fake,
        static_graph=static and not fake,
    )
    if fake:
        wrapper.find_unused_parameters = unused and not static
    return wrapper


def reduce_bucket(_: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook that reduces the bucket before it returns."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    dist.all_reduce(bucket.buffer())
    future.set_result(bucket.buffer())
    return future


def autocast(recipe: RecipeSpec, device: str) -> AbstractContextManager[object]:
    """The autocast context of a plain loop with mixed precision."""
    if not recipe.precision.endswith("mixed"):
        return nullcontext()
    return torch.autocast(device, dtype=COMPUTE[recipe.precision])
