"""Wraps a model in FSDP1 (``FullyShardedDataParallel``) as accelerate does, and labels its buffers."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    _runtime_utils,
)
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.utils.checkpoint import checkpoint

from zeroplan.ledger import Kind, Phase
from zeroplan.spec.recipe import Fsdp1Options, RecipeSpec
from zeroplan.verify.fake_parts.addresses import addresses, devices_follow_data
from zeroplan.verify.training.ddp import autocast
from zeroplan.verify.training.engine import COMPUTE, Engine, Requesting, all_labelled
from zeroplan.verify.training.fsdp2 import forward_and_backward
from zeroplan.verify.training.optimizers import make_optimizer, trained
from zeroplan.verify.training.workload import Workload
from zeroplan.verify.watching.watcher import Watcher


class Fsdp1(Engine):
    """Trains with ``FullyShardedDataParallel`` around every block and around the whole module."""

    handed_on = Kind.UNSHARDED_GRADIENTS
    kept: Kind | None = Kind.GRADIENTS

    def __init__(self, work: Workload, recipe: RecipeSpec, mesh: DeviceMesh) -> None:
        with devices_follow_data():
            self._model = shard(work, recipe, mesh)
        self._work, self._recipe = work._replace(module=self._model), recipe
        if recipe.fsdp1.checkpoints_units:
            _checkpoint(self._model, work.blocks)
        self.optimizer = make_optimizer(trained(self._model), recipe, work.blocks)

    def micro_step(self, enter: Callable[[Phase], None], *, last: bool) -> None:
        """Run one forward and backward pass; FSDP1 reduces gradients in the step's last one, or in all if the recipe says so."""
        quiet = nullcontext() if last or self._recipe.sync_every_micro_batch else self._model.no_sync()
        with quiet, self._casting():
            forward_and_backward(self._model, self._work, enter, keep_logits=bool(self._recipe.keep_logits))

    def _casting(self) -> AbstractContextManager[object]:
        """Autocast for models with adapters, whose inputs peft casts to fp32; accelerate autocasts every model."""
        adapted = any(".lora_" in name for name, _ in self._work.module.named_modules())
        return autocast(self._recipe, "cuda") if adapted else nullcontext()

    def labels(self, watcher: Watcher) -> AbstractContextManager[None]:
        """Label buffers by the function of FSDP1 that requests them."""
        return _watched(watcher)


@contextmanager
def _watched(watcher: Watcher) -> Iterator[None]:
    with addresses(), devices_follow_data(), all_labelled(watcher, _REQUESTING):
        yield


def shard(work: Workload, recipe: RecipeSpec, mesh: DeviceMesh) -> FullyShardedDataParallel:
    """The module with ``FullyShardedDataParallel`` around every block and the whole, sharded over the ranks of a mesh."""
    options, replicated = recipe.fsdp1, mesh.ndim > 1
    return FullyShardedDataParallel(
        work.module,
        process_group=None if replicated else mesh.get_group(),
        device_mesh=mesh if replicated else None,
        sharding_strategy=strategy(recipe, replicated=replicated),
        auto_wrap_policy=partial(lambda_auto_wrap_policy, lambda_fn=_units(work, options)),
        cpu_offload=CPUOffload(offload_params=options.cpu_offload),
        mixed_precision=mixed_precision(recipe),
        backward_prefetch=_PREFETCH[options.backward_prefetch],
        forward_prefetch=options.forward_prefetch,
        limit_all_gathers=options.limit_all_gathers,
        use_orig_params=options.use_orig_params,
        device_id=torch.device(mesh.device_type, 0) if mesh.device_type == "cuda" else None,
    )


def _checkpoint(model: FullyShardedDataParallel, blocks: tuple[nn.Module, ...]) -> None:
    """Checkpoint every block's FSDP unit with ``use_reentrant=True``, as the Trainer did."""
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        if unit.module in blocks:
            unit.forward = partial(_called_again, unit.forward)  # type: ignore[method-assign]


def _called_again(forward: Callable[..., object], *args: object, **kwargs: object) -> object:
    return checkpoint(partial(forward, **kwargs), *args, use_reentrant=True, preserve_rng_state=False)


def _units(work: Workload, options: Fsdp1Options) -> Callable[[nn.Module], bool]:
    """Whether a module becomes an FSDP unit: blocks, and with ``wraps_adapters`` also peft's trained adapter layers."""
    blocks = {id(block) for block in work.blocks}

    adapters = {
        id(module) for name, module in work.module.named_modules() if ".lora_" in name and _has_a_trained_weight(module)
    }
    return lambda module: id(module) in blocks or (options.wraps_adapters and id(module) in adapters)


def _has_a_trained_weight(module: nn.Module) -> bool:
    """The condition of ``peft.utils.other.fsdp_auto_wrap_policy``."""
    weight = getattr(module, "weight", None)
    return not list(module.children()) and weight is not None and bool(weight.requires_grad)


def strategy(recipe: RecipeSpec, *, replicated: bool) -> ShardingStrategy:
    """FSDP1's strategy: FULL_SHARD for stage 3, else SHARD_GRAD_OP; the hybrid ones with replicas."""
    if recipe.zero_stage == 3:
        return ShardingStrategy.HYBRID_SHARD if replicated else ShardingStrategy.FULL_SHARD
    return ShardingStrategy._HYBRID_SHARD_ZERO2 if replicated else ShardingStrategy.SHARD_GRAD_OP


def mixed_precision(recipe: RecipeSpec) -> MixedPrecision | None:
    """The dtypes in which FSDP1 computes and reduces."""
    if not recipe.precision.endswith("mixed"):
        return None
    param_dtype = COMPUTE[recipe.precision]
    return MixedPrecision(
        param_dtype=param_dtype,
        reduce_dtype=torch.float32 if recipe.fsdp1.reduce_dtype == "fp32" else param_dtype,
        buffer_dtype=param_dtype,
    )


_PREFETCH = {
    "backward_pre": BackwardPrefetch.BACKWARD_PRE, "backward_post": BackwardPrefetch.BACKWARD_POST, "no_prefetch": None,
}  # fmt: skip
_REQUESTING: Requesting = (
    (FlatParamHandle, "_use_low_precision_shard", Kind.GATHER),
    (FlatParamHandle, "_alloc_padded_unsharded_flat_param", Kind.UNSHARDED_PARAMETERS),
    (_runtime_utils, "_reduce_grad", Kind.REDUCE),
)
