"""Experts on ranks of their own: transformers' dispatch of tokens, and FSDP2 with a second mesh, as torchtitan has it.

The dispatch is transformers' own (``ep_dispatch_experts``, ``AllToAllEP``): every rank sends each pair of a token and an expert to
the rank that has the expert, which sends the result back. ``fully_shard`` takes each block whole, the experts' weights on the ranks
that have the same ones, everything else on all.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.tensor import Shard

from zeroplan.errors import MeasurementError
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.verify.replaced import replaced

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult

    from zeroplan.verify.watching.watcher import Watcher

Placement = Callable[[nn.Parameter], "ShardPlacementResult"]
#: What of the libraries' own older ones lack: where a parameter goes, and the dispatch of tokens.
_PLACEMENT, _DISPATCH = "ShardPlacementResult", "transformers.distributed.expert_parallel"


class ExpertMeshes(NamedTuple):
    """Ranks as experts see them: those that have the same ones and share them out, and those that have others."""

    sharded: DeviceMesh
    """With replicas in two dimensions."""
    dispatched: DeviceMesh
    alone: DeviceMesh
    """One rank: no other has the same tokens."""


def dispatched(job: JobSpec, model: nn.Module, mesh: DeviceMesh, watcher: "Watcher") -> ExpertMeshes | None:
    """Split the job's experts over its ranks, and say which those are; None where every rank has them all."""
    if job.mesh.ep == 1:
        return None
    if not isinstance(next(model.parameters()), FakeTensor):
        raise MeasurementError("experts on several ranks run on fake tensors only, evenly visited; use --backend simulate")
    if not hasattr(_fsdp_common, _PLACEMENT) or find_spec(_DISPATCH) is None:
        raise MeasurementError("experts on several ranks need torch 2.13 and transformers 5.23, or newer ones")
    with watcher.looking_away():
        meshes = expert_meshes(job.mesh, mesh.device_type)
    dispatch(model, meshes)
    return meshes


def expert_meshes(mesh: MeshSpec, device: str) -> ExpertMeshes:
    """Arrange the ranks for experts: neighbours have different ones."""
    replicas, names = mesh.dp_replicate, ("pp", "dp_replicate", "efsdp", "ep")
    with unset_fake_temporarily():
        ways = mesh.pp, replicas, mesh.dp_shard * mesh.cp // mesh.ep, mesh.ep
        whole = init_device_mesh(device, ways, mesh_dim_names=names)
        alone = init_device_mesh(device, (mesh.world_size, 1), mesh_dim_names=("dp", "tp"))
    sharded = whole["efsdp"] if replicas == 1 else whole["dp_replicate", "efsdp"]
    return ExpertMeshes(sharded, whole["ep"], alone["tp"])


def dispatch(model: nn.Module, meshes: ExpertMeshes) -> None:
    """Give this rank its experts, and let tokens come to them."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism  # noqa: PLC0415  takes seconds

    plan = model._expand_parallel_plan(model.ep_plan)  # type: ignore[operator]  # a transformers model
    apply_expert_parallelism(
        model, meshes.dispatched, meshes.alone, cast("dict[str, str]", plan), ep_implementation="all_to_all"
    )


def placement(block: nn.Module, mesh: DeviceMesh, meshes: ExpertMeshes) -> Placement | None:
    """Where FSDP2 shards a block's parameters: experts among those ranks that have the same, along dim 1 where they are too few.

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


def divide_by_nothing(model: nn.Module) -> None:
    """Sum gradients, the experts' over fewer ranks than the others', and leave it to the loss to divide by all tokens.

    Source: torchtitan, distributed/fsdp.py, disable_fsdp_gradient_division.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)


def _info(mesh: DeviceMesh) -> FSDPMeshInfo:
    if mesh.ndim == 1:
        return FSDPMeshInfo(mesh=mesh, shard_mesh_dim=0)
    return HSDPMeshInfo(mesh=mesh, replicate_mesh_dim=0, shard_mesh_dim=1)


# --- what fake tensors cannot say -------------------------------------------------------------------------------------------


def evenly_visited(job: JobSpec) -> AbstractContextManager[None]:
    """Answer how many tokens come and go, which a router's choice says: as many from and to every rank."""
    from transformers.distributed import expert_parallel  # noqa: PLC0415  takes seconds

    assert job.model.moe is not None  # noqa: S101  a job without experts has nothing to dispatch
    pairs = job.batch.micro_batch_size * (job.batch.seq_len // job.mesh.cp) * job.model.moe.num_experts_per_tok
    sizes = [(pairs + rank) // job.mesh.ep for rank in range(job.mesh.ep)]
    return replaced(expert_parallel, "torch", _Torch(sizes))


class _Torch(ModuleType):
    """torch, but for the counts that are stacked to be read."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__("torch")
        self._sizes = sizes

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)

    def stack(self, counts: list[torch.Tensor]) -> "_Counts":
        """Stack them, and know what they are."""
        return _Counts(torch.stack(counts), [self._sizes for _ in counts])


class _Counts(NamedTuple):
    stacked: torch.Tensor
    sizes: list[list[int]]

    def tolist(self) -> list[list[int]]:
        """Say how many each rank sends and gets."""
        return self.sizes
