"""The engines themselves, unmodified, behind one small face: a micro-step, an optimizer step, gradients cleared.

One training loop (:func:`train`) serves them all. Only labels are put around the engines' functions, from outside, so that the
watcher knows what a buffer is for.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket, Reducer
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from zeroplan.engines.optimizers import implementation
from zeroplan.errors import MeasurementError
from zeroplan.ledger import Kind, Phase
from zeroplan.spec.job import JobSpec
from zeroplan.spec.recipe import Precision, RecipeSpec
from zeroplan.verify.replaced import replaced
from zeroplan.verify.training.experts import ExpertMeshes, divide_by_nothing, placement
from zeroplan.verify.training.workload import Workload
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


# --- FSDP2 -------------------------------------------------------------------------------------------------------------


class Fsdp2:
    """``fully_shard`` around every block and around the whole, as in PyTorch's own examples."""

    handed_on = Kind.UNSHARDED_GRADIENTS
    kept: Kind | None = Kind.GRADIENTS

    def __init__(
        self, work: Workload, recipe: RecipeSpec, mesh: DeviceMesh, *, experts: ExpertMeshes | None = None
    ) -> None:  # fmt: skip
        policy, reshard = mixed_precision(recipe), resharding(recipe)
        offload = CPUOffloadPolicy() if recipe.fsdp2.cpu_offload else OffloadPolicy()
        for block in work.blocks:
            where = None if experts is None else placement(block, mesh, experts)
            fully_shard(
                block,
                mesh=mesh,
                mp_policy=policy,
                reshard_after_forward=reshard,
                offload_policy=offload,
                shard_placement_fn=where,
            )
        self._model: FSDPModule = fully_shard(
            work.module, mesh=mesh, mp_policy=policy, reshard_after_forward=False, offload_policy=offload
        )
        if next(work.module.parameters()).is_meta:
            give_memory(work.module, "cpu" if recipe.fsdp2.cpu_offload else mesh.device_type)
        if experts is not None:
            divide_by_nothing(work.module)
        self._work, self._recipe = work, recipe
        self.optimizer = make_optimizer(trained(work.module), recipe)

    def micro_step(self, enter: Callable[[Phase], None], *, last: bool) -> None:
        """Run one forward and backward pass; gradients are reduced in the last of a step, or in each."""
        self._model.set_requires_gradient_sync(last or self._recipe.sync_every_micro_batch)
        forward_and_backward(self._work.module, self._work, enter, keep_logits=bool(self._recipe.keep_logits))

    def optimizer_step(self) -> None:
        """Update this rank's chunks."""
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad()

    def labels(self, watcher: Watcher) -> AbstractContextManager[None]:
        """Tell buffers apart by the function of FSDP2 that asks for them."""
        return fsdp2_labels(watcher)


def give_memory(module: nn.Module, device: str) -> None:
    """Memory for a sharded module that was built without any: this rank's chunks, with numbers in them."""
    module.to_empty(device=device)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local.normal_(0, 0.02) if local.is_floating_point() else local.zero_()


def forward_and_backward(
    module: nn.Module, work: Workload, enter: Callable[[Phase], None], *, keep_logits: bool
) -> None:  # fmt: skip
    """One forward and backward pass of a plain loop."""
    enter(Phase.FORWARD)
    output = module(**work.batch)
    if work.loss_goes_backward:
        enter(Phase.BACKWARD)
    loss = work.loss(output)
    if not keep_logits:
        del output
    if not work.loss_goes_backward:
        enter(Phase.BACKWARD)
    loss.backward()  # type: ignore[no-untyped-call]


def mixed_precision(recipe: RecipeSpec) -> MixedPrecisionPolicy:
    """The dtypes in which FSDP2 computes and reduces."""
    if not recipe.precision.endswith("mixed"):
        return MixedPrecisionPolicy()
    reduce_dtype = torch.float32 if recipe.fsdp2.reduce_dtype == "fp32" else None
    return MixedPrecisionPolicy(param_dtype=COMPUTE[recipe.precision], reduce_dtype=reduce_dtype)


def resharding(recipe: RecipeSpec) -> bool | int:
    """Whether blocks are sharded again after their forward, or over how many ranks."""
    chosen = recipe.fsdp2.reshard_after_forward
    return recipe.zero_stage == 3 if chosen is None else chosen


@contextmanager
def fsdp2_labels(watcher: Watcher) -> Iterator[None]:
    """Tell the tracker what FSDP2's buffers are for, by the function of FSDP2 that asks for them."""
    with ExitStack() as patches:
        for owner, name, kind in _FSDP2_LABELS:
            if hasattr(owner, name):
                patches.enter_context(labelled(watcher, owner, name, kind))
        patches.enter_context(_reduced_gradients(watcher))
        yield


#: Not every torch has each: 2.15 leaves it to autograd to accumulate in another dtype.
_FSDP2_LABELS: tuple[tuple[object, str, Kind], ...] = (
    (_fsdp_param_group, "foreach_all_gather", Kind.GATHER),
    (_fsdp_param_group, "foreach_reduce", Kind.REDUCE),
    (FSDPParam, "init_all_gather_outputs", Kind.UNSHARDED_PARAMETERS),
    (FSDPParam, "alloc_all_gather_outputs", Kind.UNSHARDED_PARAMETERS),
    (FSDPParam, "to_sharded_post_forward", Kind.UNSHARDED_PARAMETERS),
    (FSDPParam, "to_accumulated_grad_if_needed", Kind.UNSHARDED_GRADIENTS),
)


def labelled(watcher: Watcher, owner: object, name: str, kind: Kind) -> AbstractContextManager[None]:
    """Say what for a function of an engine asks for memory, as long as this is open."""
    original: Callable[..., object] = getattr(owner, name)

    def asking(*args: object, **kwargs: object) -> object:
        with watcher.labelled(kind):
            return original(*args, **kwargs)

    return replaced(owner, name, asking)


def _reduced_gradients(watcher: Watcher) -> AbstractContextManager[None]:
    """What goes into a reduction are whole gradients."""
    name = "foreach_reduce"
    original: Callable[..., object] = getattr(_fsdp_param_group, name)

    def reduce(parameters: object, gradients: list[torch.Tensor], *args: object, **kwargs: object) -> object:
        watcher.claim(Kind.UNSHARDED_GRADIENTS, gradients)
        return original(parameters, gradients, *args, **kwargs)

    return replaced(_fsdp_param_group, name, reduce)


# --- DDP ---------------------------------------------------------------------------------------------------------------


class Ddp:
    """``DistributedDataParallel``, alone or with ``ZeroRedundancyOptimizer``; mixed precision by autocast.

    A single rank has nothing to reduce, and nobody wraps it, unless its gradients are to be views of buckets.
    """

    kept: Kind | None = Kind.GRADIENTS

    def __init__(self, work: Workload, recipe: RecipeSpec) -> None:
        views = recipe.ddp.gradient_as_bucket_view
        wrapped = views or dist.get_world_size() > 1
        self._wrapper = DistributedDataParallel(work.module, gradient_as_bucket_view=views) if wrapped else None
        self._work, self._recipe = work, recipe
        self._device = next(work.module.parameters()).device.type
        self.handed_on = Kind.UNSHARDED_GRADIENTS if recipe.ddp.gradient_as_bucket_view else Kind.GRADIENTS
        sharded = recipe.zero_stage == 1
        self.optimizer = (_zero_redundancy if sharded else make_optimizer)(trained(work.module), recipe)

    def hand_buckets_back(self) -> None:
        """Reduce buckets by a hook: the reducer's C++ cannot read what a fake process group returns."""
        if self._wrapper is not None:
            self._wrapper.register_comm_hook(None, _reduced_at_once)

    def micro_step(self, enter: Callable[[Phase], None], *, last: bool) -> None:
        """Run one forward and backward pass; without reduction in all but the last, where the recipe says so."""
        model = self._wrapper or self._work.module
        with nullcontext() if last or self._recipe.sync_every_micro_batch else self._no_sync():
            enter(Phase.FORWARD)
            with autocast(self._recipe, self._device):
                output = model(**self._work.batch)
            loss = self._work.loss(output)
            if not self._recipe.keep_logits:
                del output
            enter(Phase.BACKWARD)
            loss.backward()  # type: ignore[no-untyped-call]

    def _no_sync(self) -> AbstractContextManager[object]:
        return nullcontext() if self._wrapper is None else self._wrapper.no_sync()

    def optimizer_step(self) -> None:
        """Update all parameters, or this rank's and hear of the others'."""
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad()

    def labels(self, watcher: Watcher) -> AbstractContextManager[None]:
        """Tell the buckets that the reducer makes in the second forward; the first ones are made with the engine."""
        return labelled(watcher, Reducer, "_rebuild_buckets", Kind.REDUCE)


def _reduced_at_once(_: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    dist.all_reduce(bucket.buffer())
    future.set_result(bucket.buffer())
    return future


def autocast(recipe: RecipeSpec, device: str) -> AbstractContextManager[object]:
    """The context in which a plain loop computes in mixed precision."""
    if not recipe.precision.endswith("mixed"):
        return nullcontext()
    return torch.autocast(device, dtype=COMPUTE[recipe.precision])


# --- optimizers --------------------------------------------------------------------------------------------------------

_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], Mapping[str, float]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-3}),
    "adam": (torch.optim.Adam, {"lr": 1e-3}),
    "sgd": (torch.optim.SGD, {"lr": 1e-3}),
    "sgd-momentum": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-3}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3}),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-3}),
}


def trained(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that an optimizer is given: those that are not frozen."""
    return (parameter for parameter in module.parameters() if parameter.requires_grad)


def make_optimizer(parameters: Iterator[nn.Parameter], recipe: RecipeSpec) -> torch.optim.Optimizer:
    """Build torch's optimizer with its default arguments and the recipe's implementation."""
    cls, arguments = _optimizer_class(recipe)
    return cls(parameters, **arguments, **_implementation(recipe))  # type: ignore[arg-type]  # each class has its own


def _zero_redundancy(parameters: Iterator[nn.Parameter], recipe: RecipeSpec) -> torch.optim.Optimizer:
    cls, arguments = _optimizer_class(recipe)
    return ZeroRedundancyOptimizer(parameters, optimizer_class=cls, **{**arguments, **_implementation(recipe)})  # type: ignore[arg-type]


def _optimizer_class(recipe: RecipeSpec) -> tuple[type[torch.optim.Optimizer], Mapping[str, float]]:
    if recipe.optimizer not in _OPTIMIZERS:
        raise MeasurementError(f"optimizer {recipe.optimizer!r} cannot be run here; measured are {', '.join(_OPTIMIZERS)}")
    return _OPTIMIZERS[recipe.optimizer]


def _implementation(recipe: RecipeSpec) -> dict[str, bool]:
    chosen = implementation(recipe.optimizer, recipe.optimizer_impl, on_host=recipe.fsdp2.cpu_offload)
    return {"fused": True} if chosen == "fused" else {"foreach": chosen == "foreach"}
