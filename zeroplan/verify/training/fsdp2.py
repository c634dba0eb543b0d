"""Trains with FSDP2 as in PyTorch's own examples, and labels its buffers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from zeroplan.ledger import Kind, Phase
from zeroplan.spec.recipe import Fsdp2Options, RecipeSpec
from zeroplan.verify.failures import NotHereError
from zeroplan.verify.replaced import replaced
from zeroplan.verify.training.adapters import unwrapped
from zeroplan.verify.training.engine import COMPUTE, Engine, Requesting, all_labelled
from zeroplan.verify.training.experts import ExpertMeshes, disable_gradient_division, placement
from zeroplan.verify.training.modules import last_norm
from zeroplan.verify.training.optimizers import make_optimizer, stepping_in_backward, trained
from zeroplan.verify.training.workload import Workload
from zeroplan.verify.watching.watcher import Watcher


class Fsdp2(Engine):
    """Trains with ``fully_shard`` on every block and on the whole module, as in PyTorch's own examples."""

    handed_on = Kind.UNSHARDED_GRADIENTS
    kept: Kind | None = Kind.GRADIENTS

    def __init__(
        self, work: Workload, recipe: RecipeSpec, mesh: DeviceMesh, *, experts: ExpertMeshes | None = None
    ) -> None:  # fmt: skip
        self._model = shard(work.module, work.blocks, recipe, mesh, experts)
        if next(work.module.parameters()).is_meta:
            allocate(work.module, "cpu" if recipe.fsdp2.cpu_offload else mesh.device_type)
        self._work, self._recipe = work, recipe
        parameters = trained(work.module)
        if recipe.fsdp2.step_in_backward:
            self.optimizer = stepping_in_backward(parameters, recipe)
        else:
            self.optimizer = make_optimizer(parameters, recipe, work.blocks)

    def micro_step(self, enter: Callable[[Phase], None], *, last: bool) -> None:
        """Run one forward and backward pass; FSDP2 reduces gradients in the step's last one, or in all if the recipe says so."""
        self._model.set_requires_gradient_sync(last or self._recipe.sync_every_micro_batch)
        forward_and_backward(self._work.module, self._work, enter, keep_logits=bool(self._recipe.keep_logits))

    def labels(self, watcher: Watcher) -> AbstractContextManager[None]:
        """Label buffers by the function of FSDP2 that requests them."""
        return fsdp2_labels(watcher)


def shard(
    module: nn.Module, blocks: Iterable[nn.Module], recipe: RecipeSpec, mesh: DeviceMesh, experts: ExpertMeshes | None
) -> FSDPModule:  # fmt: skip
    """Apply ``fully_shard`` to every block and to the whole module, over the ranks of a mesh."""
    policy, offload = mixed_precision(recipe), CPUOffloadPolicy() if recipe.fsdp2.cpu_offload else OffloadPolicy()
    blocks = list(blocks)
    if recipe.float8_recipe is not None:
        _run_in_float8(blocks, recipe.float8_recipe, recipe.fsdp2)
    for block in blocks:
        fully_shard(
            block, mesh=mesh, mp_policy=policy, offload_policy=offload,
            reshard_after_forward=False if recipe.fsdp2.keeps_last and block is blocks[-1] else resharding(recipe),
            shard_placement_fn=None if experts is None else placement(block, mesh, experts),
        )  # fmt: skip
    if recipe.fsdp2.gathers_ahead:
        _gather_ahead(blocks, recipe.fsdp2)
    if recipe.fsdp2.ends_apart:
        sharded = partial(fully_shard, mesh=mesh, mp_policy=policy, offload_policy=offload)
        _shard_ends(module, sharded, again=resharding(recipe))
    whole: FSDPModule = fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False, offload_policy=offload)
    if experts is not None:
        disable_gradient_division(module)
    return whole


def _gather_ahead(blocks: Sequence[nn.Module], options: Fsdp2Options) -> None:
    """Let every block gather the next ones in the forward, and the previous ones in the backward, as NeMo AutoModel does."""
    for at, block in enumerate(blocks):
        if ahead := list(blocks[at + 1 : at + 1 + options.forward_prefetch]):
            block.set_modules_to_forward_prefetch(ahead)  # type: ignore[operator]  # an FSDPModule
        if below := list(reversed(blocks[max(0, at - options.backward_prefetch) : at])):
            block.set_modules_to_backward_prefetch(below)  # type: ignore[operator]  # as above


def _run_in_float8(blocks: Iterable[nn.Module], recipe: str, options: Fsdp2Options) -> None:
    """Replace the linear layers of the blocks by torchao's, as torchtitan does before it shards."""
    if find_spec("torchao") is None:
        raise NotHereError("float8_recipe needs torchao, which is not installed; install torchao 0.18 or later")
    if recipe in ("mxfp8", "nvfp4"):
        raise NotHereError(f"float8_recipe {recipe!r} has kernels that run on Blackwell alone; verify tensorwise or rowwise")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # noqa: PLC0415  few jobs have it

    config = Float8LinearConfig.from_recipe_name(recipe)
    if options.float8_all_gather:
        config = replace(config, enable_fsdp_float8_all_gather=True)
    for block in blocks:
        convert_to_float8_training(block, config=config)


def _shard_ends(module: nn.Module, sharded: Callable[..., object], *, again: bool | int) -> None:
    """Make separate units of the embedding, and of the last norm with the head, which stays gathered until its backward.

    Source: accelerate 1.15, accelerate/utils/fsdp_utils.py, ``fsdp2_prepare_model``. A tied head stays in the root's unit. A
    stage of a pipeline has an identity instead of modules of other stages.
    """
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()  # type: ignore[operator]
    here = [not isinstance(end, nn.Identity) for end in (embedding, head)]
    if all(here) and embedding.weight is head.weight:
        return
    if here[0]:
        sharded(embedding, reshard_after_forward=again)
    if here[1]:
        sharded([last_norm(unwrapped(module)), head], reshard_after_forward=False)


def allocate(module: nn.Module, device: str) -> None:
    """Allocate this rank's shards of a module built on the meta device, and fill them with numbers."""
    module.to_empty(device=device)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local.normal_(0, 0.02) if local.is_floating_point() else local.zero_()


def forward_and_backward(
    module: nn.Module, work: Workload, enter: Callable[[Phase], None], *, keep_logits: bool
) -> None:  # fmt: skip
    """Run one forward and backward pass of a plain loop."""
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
    """The dtypes in which FSDP2 computes and reduces; both are set, since torch's defaults changed between releases."""
    if not recipe.precision.endswith("mixed"):
        return MixedPrecisionPolicy()
    param_dtype = COMPUTE[recipe.precision]
    reduce_dtype = torch.float32 if recipe.fsdp2.reduce_dtype == "fp32" else param_dtype
    return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)


def resharding(recipe: RecipeSpec) -> bool | int:
    """``reshard_after_forward`` for blocks: whether to reshard, or over how many ranks."""
    chosen = recipe.fsdp2.reshard_after_forward
    return recipe.zero_stage == 3 if chosen is None else chosen


@contextmanager
def fsdp2_labels(watcher: Watcher) -> Iterator[None]:
    """Label FSDP2's buffers by the function that requests them."""
    with all_labelled(watcher, _REQUESTING), _reduced_gradients(watcher):
        yield


#: Not every torch release has all: since 2.15 autograd accumulates in another dtype.
_REQUESTING: Requesting = (
    (_fsdp_param_group, "foreach_all_gather", Kind.GATHER),
    (_fsdp_param_group, "foreach_reduce", Kind.REDUCE),
    (FSDPParamGroup, "wait_for_unshard", Kind.UNSHARDED_PARAMETERS),  # with a single rank FSDP2 casts and copies here
    (FSDPParam, "init_all_gather_outputs", Kind.UNSHARDED_PARAMETERS),
    (FSDPParam, "alloc_all_gather_outputs", Kind.UNSHARDED_PARAMETERS),
    (FSDPParam, "to_sharded_post_forward", Kind.UNSHARDED_PARAMETERS),
    (FSDPParam, "to_accumulated_grad_if_needed", Kind.UNSHARDED_GRADIENTS),
)


def _reduced_gradients(watcher: Watcher) -> AbstractContextManager[None]:
    """Give unsharded gradients their kind when FSDP2 reduces them."""
    name = "foreach_reduce"
    original: Callable[..., object] = getattr(_fsdp_param_group, name)

    def reduce(parameters: object, gradients: list[torch.Tensor], *args: object, **kwargs: object) -> object:
        watcher.claim(Kind.UNSHARDED_GRADIENTS, gradients)
        return original(parameters, gradients, *args, **kwargs)

    return replaced(_fsdp_param_group, name, reduce)
