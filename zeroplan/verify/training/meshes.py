"""How a job's ranks are arranged, and which of them share parameters out."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zeroplan.errors import MeasurementError
from zeroplan.spec.job import JobSpec
from zeroplan.verify.fake_cuda.installed import CUDA

#: The mesh dimensions of the context-parallel and of the tensor-parallel ranks: neighbours.
CONTEXT, TENSOR = "context", "tensor"
_SHARD_AND_CONTEXT = "shard and context"


def mesh_of(job: JobSpec, device: str = "cpu") -> DeviceMesh:
    """The job's ranks as engines take them, as torchtitan arranges them.

    Pipeline stages outermost; then one dimension, or replicas of a sharded group; each a row where ranks share its work.
    """
    mesh = job.mesh
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
    """Those that have other tokens and the same part of the model, in a mesh with names; with replicas in two dimensions."""
    name = "shard"
    if job.mesh.cp > 1:
        name = _SHARD_AND_CONTEXT
        among = mesh["shard", CONTEXT]._flatten(name)
    else:
        among = mesh[name]
    return among if job.mesh.dp_replicate == 1 else mesh["replicate", name]


def context_ranks(job: JobSpec, mesh: DeviceMesh) -> DeviceMesh:
    """Those that share sequences. Raises MeasurementError on real tensors."""
    if mesh.device_type != CUDA:  # of real positions, cut, transformers would make a mask, which the ring does not take
        raise MeasurementError(f"cp={job.mesh.cp} is run on fake tensors alone; use --backend simulate")
    return mesh[CONTEXT]
