"""Expert parallelism: transformers dispatches tokens, and FSDP2 shards experts over a second mesh, as in torchtitan.

The dispatch is transformers' own (``ep_dispatch_experts``, ``AllToAllEP``): every rank sends each pair of token and expert to the
expert's rank, which returns the result. ``fully_shard`` shards experts' weights over the ranks with the same experts, all other
weights over all ranks.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.tensor import DTensor, Shard

from zeroplan.errors import MeasurementError
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.recipe import EVEN
from zeroplan.verify.replaced import replaced
from zeroplan.verify.training.meshes import TENSOR

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult

    from zeroplan.verify.watching.watcher import Watcher

Placement = Callable[[nn.Parameter], "ShardPlacementResult"]
#: Names that older libraries lack: FSDP2's placement of a parameter, and transformers' dispatch of tokens.
_PLACEMENT, _DISPATCH = "ShardPlacementResult", "transformers.distributed.expert_parallel"


class ExpertMeshes(NamedTuple):
    """Device meshes of ranks with the same experts, which shard them, and of ranks with different experts."""

    sharded: DeviceMesh
    """Ranks with the same experts; two dimensions with replicas."""
    dispatched: DeviceMesh
    alike: DeviceMesh
    """Tensor-parallel ranks, which have the same tokens; a single rank without tensor parallelism."""


def dispatched(job: JobSpec, model: nn.Module, mesh: DeviceMesh, watcher: "Watcher") -> ExpertMeshes | None:
    """Split the job's experts over its ranks and return the meshes; None without expert parallelism."""
    if job.mesh.ep == 1:
        return None
    first = next(model.parameters())
    if not isinstance(first.to_local() if isinstance(first, DTensor) else first, FakeTensor):
        raise MeasurementError("experts on several ranks need fake tensors, with an even routing; use --backend simulate")
    if not hasattr(_fsdp_common, _PLACEMENT) or find_spec(_DISPATCH) is None:
        raise MeasurementError("experts on several ranks need torch 2.13 and transformers 5.23, or newer ones")
    with watcher.not_recording():
        meshes = expert_meshes(job.mesh, mesh)
    dispatch(model, meshes)
    return meshes


def expert_meshes(mesh: MeshSpec, ranks: DeviceMesh) -> ExpertMeshes:
    """The meshes of experts: neighbouring ranks have different experts."""
    replicas, names, device = mesh.dp_replicate, ("pp", "dp_replicate", "efsdp", "ep"), ranks.device_type
    with unset_fake_temporarily():
        ways = mesh.pp, replicas, mesh.dp_shard * mesh.cp * mesh.tp // mesh.ep, mesh.ep
        whole = init_device_mesh(device, ways, mesh_dim_names=names)
        alike = (
            ranks[TENSOR]
            if mesh.tp > 1
            else init_device_mesh(device, (mesh.world_size, 1), mesh_dim_names=("dp", TENSOR))[TENSOR]
        )
    sharded = whole["efsdp"] if replicas == 1 else whole["dp_replicate", "efsdp"]
    return ExpertMeshes(sharded, whole["ep"], alike)


def dispatch(model: nn.Module, meshes: ExpertMeshes) -> None:
    """Give this rank its experts, and route tokens to them."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism  # noqa: PLC0415  takes seconds

    own: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]  # peft wraps it
    plan = own._expand_parallel_plan(own.ep_plan)
    apply_expert_parallelism(own, meshes.dispatched, meshes.alike, plan, ep_implementation="all_to_all")


def placement(block: nn.Module, mesh: DeviceMesh, meshes: ExpertMeshes) -> Placement | None:
    """FSDP2's placement of a block's parameters: experts over the ranks with the same experts, along dim 1 if they are too few.

    None for a block without experts. Source: torchtitan, distributed/fsdp.py, apply_fsdp_to_decoder.
    """
    experts = {parameter for name, parameter in block.named_parameters() if ".experts." in f".{name}"}
    if not experts:
        return None
    ranks = meshes.sharded.size(-1) * meshes.dispatched.size()
    dim = 1 if any(ranks > parameter.shape[0] for parameter in experts) else 0
    theirs = _fsdp_common.ShardPlacementResult(placement=Shard(dim), mesh_info=_info(meshes.sharded))
    others = _fsdp_common.ShardPlacementResult(placement=Shard(0), mesh_info=_info(mesh))
    return lambda parameter: theirs if parameter in experts else others


def disable_gradient_division(model: nn.Module) -> None:
    """Make FSDP2 sum gradients, since experts are reduced over fewer ranks; the loss then divides by all tokens.

    Source: torchtitan, distributed/fsdp.py, disable_fsdp_gradient_division.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)


def _info(mesh: DeviceMesh) -> FSDPMeshInfo:
    if mesh.ndim == 1:
        return FSDPMeshInfo(mesh=mesh, shard_mesh_dim=0)
    return HSDPMeshInfo(mesh=mesh, replicate_mesh_dim=0, shard_mesh_dim=1)


# --- token counts, which fake tensors lack ----------------------------------------------------------------------------------


def even_routing(job: JobSpec) -> AbstractContextManager[None]:
    """Replace the tokens per rank, which the router decides: this rank sends an even split and receives imbalance times that."""
    from transformers.distributed import expert_parallel  # noqa: PLC0415  takes seconds

    assert job.model.moe is not None  # noqa: S101  a job without experts has nothing to dispatch
    tokens = job.batch.micro_batch_size * (job.batch.seq_len // (job.mesh.cp * job.mesh.tp))
    pairs = tokens * job.model.moe.num_experts_per_tok
    sizes = [(pairs + rank) // job.mesh.ep for rank in range(job.mesh.ep)]
    came = -(-pairs * job.recipe.imbalance_in_thousandths // EVEN)
    return replaced(expert_parallel, "torch", _Torch([sizes, [(came + rank) // job.mesh.ep for rank in range(job.mesh.ep)]]))


class _Torch(ModuleType):
    """torch, except for ``stack``, whose result is read as token counts."""

    def __init__(self, sizes: list[list[int]]) -> None:
        super().__init__("torch")
        self._sizes = sizes

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)

    def stack(self, counts: list[torch.Tensor]) -> "_Counts":
        """The stacked counts of sent and received pairs, whose ``tolist`` returns the assumed sizes."""
        return _Counts(torch.stack(counts), self._sizes)


class _Counts(NamedTuple):
    stacked: torch.Tensor
    sizes: list[list[int]]

    def tolist(self) -> list[list[int]]:
        """How many tokens each rank sends and receives."""
        return self.sizes
