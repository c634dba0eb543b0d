"""Arranges a job's ranks in a device mesh, and selects the ranks that shard parameters or share sequences."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zeroplan.errors import MeasurementError
from zeroplan.spec.job import JobSpec
from zeroplan.verify.fake_cuda.installed import CUDA

#: Names of the mesh dimensions of context-parallel and tensor-parallel ranks, which are neighbours.
CONTEXT, TENSOR = "context", "tensor"
_SHARD_AND_CONTEXT = "shard and context"


def mesh_of(job: JobSpec, device: str = "cpu") -> DeviceMesh:
    """The job's device mesh, arranged as in torchtitan.

    Pipeline stages are outermost; then shards, or replicas of a sharded group; then context- or tensor-parallel ranks.
    """
    mesh = job.mesh
    if job.recipe.engine == "megatron":
        return init_device_mesh(device, (mesh.world_size,))  # Megatron makes its own groups
    split = {name: ways for name, ways in ((CONTEXT, mesh.cp), (TENSOR, mesh.tp)) if ways > 1}
    if mesh.pp > 1:
        replicas = {"replicate": mesh.dp_replicate} if mesh.dp_replicate > 1 else {}
        return _named(device, {"pp": mesh.pp, **replicas, "shard": mesh.dp_shard, **split})
    if not split and mesh.dp_replicate == 1:
        return init_device_mesh(device, (mesh.dp_shard,))
    return _named(device, {"replicate": mesh.dp_replicate, "shard": mesh.dp_shard, **split})


def _named(device: str, ways: dict[str, int]) -> DeviceMesh:
    return init_device_mesh(device, tuple(ways.values()), mesh_dim_names=tuple(ways))


def sharding_ranks(job: JobSpec, mesh: DeviceMesh) -> DeviceMesh:
    """The ranks over which FSDP shards this rank's part of the model; two dimensions with replicas."""
    name = "shard"
    if job.mesh.cp > 1:
        name = _SHARD_AND_CONTEXT
        among = mesh["shard", CONTEXT]._flatten(name)
    else:
        among = mesh[name]
    return among if job.mesh.dp_replicate == 1 else mesh["replicate", name]


def context_ranks(job: JobSpec, mesh: DeviceMesh) -> DeviceMesh:
    """The context-parallel ranks, which share sequences. Raises MeasurementError on real tensors."""
    if mesh.device_type != CUDA:  # from real positions transformers makes a mask, which ring attention does not accept
        raise MeasurementError(f"cp={job.mesh.cp} runs on fake tensors only; use --backend simulate")
    return mesh[CONTEXT]
