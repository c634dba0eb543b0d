"""Runs and watches one training run: on real or fake tensors, in a real process group or as one rank of a fake one."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import lru_cache
from typing import cast

import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from zeroplan.errors import MeasurementError
from zeroplan.ledger import Kind
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.verify.fake_cuda.fake_tensors import fake_tensors
from zeroplan.verify.fake_parts.engine import fake_parts_of_engine
from zeroplan.verify.replaced import replaced
from zeroplan.verify.training.activations_away import offloading_from
from zeroplan.verify.training.adapters import quantisation_tensors, unwrapped
from zeroplan.verify.training.context_parallel import ContextParallel, with_positions
from zeroplan.verify.training.ddp import Ddp
from zeroplan.verify.training.engine import Engine, train, weights_dtype
from zeroplan.verify.training.experts import dispatched, even_routing
from zeroplan.verify.training.fsdp2 import Fsdp2
from zeroplan.verify.training.meshes import mesh_of
from zeroplan.verify.training.tensor_parallel import TensorParallel, split
from zeroplan.verify.training.workload import Workload, workload
from zeroplan.verify.watching.watcher import Watcher


def run(
    job: JobSpec, watcher: Watcher, *, rank: int = 0, steps: int = 2, fake: bool = True, device: str = "cpu",
    make: Callable[[], Workload] | None = None,
) -> None:  # fmt: skip
    """Train as one rank of a fake process group, on fake or real tensors.

    Fake tensors may be on a fake GPU (:mod:`zeroplan.verify.fake_cuda`). ``make`` builds another workload than the job's own model.
    """
    fakes = fake_tensors(watcher, device, strided=job.mesh.tp > 1) if fake else nullcontext()
    visits = even_routing(job) if job.mesh.ep > 1 else nullcontext()
    with fake_ranks(job, rank, device) as mesh, fake_parts_of_engine(job.recipe, device), fakes, visits:
        observe(job, watcher, mesh, steps=steps, make=make)


def observe(
    job: JobSpec, watcher: Watcher, mesh: DeviceMesh, *, steps: int, make: Callable[[], Workload] | None = None
) -> None:
    """Build model and engine and train, in the existing process group."""
    with warnings.catch_warnings(), watcher, _real_meshes(watcher):
        warnings.simplefilter("ignore")
        if job.recipe.engine == "megatron":
            _observe_megatron(job, watcher, steps=steps)
            return
        if job.mesh.pp > 1:
            _observe_pipeline(job, watcher, mesh, steps=steps)
            return
        work = make() if make is not None else workload(job, dtype=weights_dtype(job), device=mesh.device_type)
        if job.mesh.tp > 1:
            work = split(work, mesh, seq_len=job.batch.seq_len, along_sequence=job.recipe.fsdp2.sequence_parallel)
        if job.mesh.cp > 1:
            work = with_positions(work, seq_len=job.batch.seq_len)
        watcher.name_modules(unwrapped(work.module))
        watcher.claim(Kind.ACTIVATIONS, work.batch.values())
        engine = _build(job, work, mesh, watcher)
        watcher.claim(Kind.PARAMETERS, (*work.module.parameters(), *work.module.buffers(), *quantisation_tensors(work.module)))
        with engine.labels(watcher), offloading_from(mesh.device_type, watcher):
            train(engine, watcher, module=work.module, steps=steps, accumulate=job.batch.grad_accum_steps)
        watcher.claim(Kind.PARAMETERS, quantisation_tensors(work.module))  # biases are cast in the first forward


def _observe_pipeline(job: JobSpec, watcher: Watcher, mesh: DeviceMesh, *, steps: int) -> None:
    """Run all micro-batches of a step through this rank's stages by a pipeline schedule."""
    from zeroplan.verify.training.pipelined import Pipelined  # noqa: PLC0415  only a pipeline imports torch's pipelining

    engine = Pipelined(job, mesh, watcher)
    with engine.labels(watcher), offloading_from(mesh.device_type, watcher):
        train(engine, watcher, module=engine.module, steps=steps, accumulate=1)


def _observe_megatron(job: JobSpec, watcher: Watcher, *, steps: int) -> None:
    """Run all micro-batches of a step by Megatron-Core's schedule."""
    from zeroplan.verify.fake_parts.megatron import fake_parts_of_megatron  # noqa: PLC0415  few machines have Megatron-Core
    from zeroplan.verify.training.megatron import Megatron, megatron_ranks  # noqa: PLC0415

    with fake_parts_of_megatron(watcher), megatron_ranks(job):
        engine = Megatron(job, watcher)
        with engine.labels(watcher):
            train(engine, watcher, module=engine.module, steps=steps, accumulate=1)


def _build(job: JobSpec, work: Workload, mesh: DeviceMesh, watcher: Watcher) -> Engine:
    if job.recipe.engine == "fsdp2":
        if job.mesh.cp > 1:
            beside, experts = nullcontext if job.mesh.tp == 1 else loss_parallel, dispatched(job, work.module, mesh, watcher)
            return ContextParallel(work, job, mesh, beside=beside, experts=experts)
        if job.mesh.tp > 1:
            return TensorParallel(work, job, mesh, experts=dispatched(job, work.module, mesh, watcher))
        return Fsdp2(work, job.recipe, mesh, experts=dispatched(job, work.module, mesh, watcher))
    if job.recipe.engine == "fsdp1":
        from zeroplan.verify.training.fsdp1 import Fsdp1  # noqa: PLC0415  only its jobs import it

        return Fsdp1(work, job.recipe, mesh)
    if job.recipe.engine == "ddp":
        with watcher.labelled(Kind.REDUCE):  # the reducer makes its buckets in its constructor
            engine = Ddp(work, job.recipe)
        if dist.get_backend().startswith(_FAKE):
            engine.reduce_by_hook()
        return engine
    if job.recipe.engine == "deepspeed":
        from zeroplan.verify.training.deepspeed import DeepSpeed  # noqa: PLC0415  it patches torch for good

        return DeepSpeed(work, job)
    raise MeasurementError(f"engine {job.recipe.engine!r} cannot be run here; use fsdp1, fsdp2, ddp or deepspeed")


_FAKE = "fake"


@contextmanager
def fake_ranks(job: JobSpec, rank: int, device: str) -> Iterator[DeviceMesh]:
    """One rank of the job's mesh under torch's fake process group, which moves no data."""
    dist.init_process_group(_FAKE, rank=rank, world_size=job.mesh.world_size, store=FakeStore())
    if job.mesh.tp > 1:
        _forget_other_meshes(job.mesh, rank)
    try:
        yield mesh_of(job, device)
    finally:
        dist.destroy_process_group()


@lru_cache(maxsize=1)
def _forget_other_meshes(_: MeshSpec, __: int) -> None:
    """Clear DTensor's cache when mesh or rank changes: it finds entries by ranks, and they refer to destroyed groups."""
    from torch.distributed.tensor import debug  # noqa: PLC0415  only tensor parallelism needs it

    debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


@contextmanager
def _real_meshes(watcher: Watcher) -> Iterator[None]:
    """Keep the rank tensors of meshes real, since FSDP2 and DTensor read them; the record leaves them out."""

    def arranged(original: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **kwargs: object) -> object:
            with unset_fake_temporarily(), watcher.not_recording():
                return original(*args, **kwargs)

        return run

    with ExitStack() as patches:
        for owner, name in ((_fully_shard, "_get_post_forward_mesh_info"), (DeviceMesh, "__init__")):
            patches.enter_context(replaced(owner, name, arranged(getattr(owner, name))))
        mesh = cast("property", DeviceMesh.mesh)
        patches.enter_context(replaced(DeviceMesh, "mesh", property(arranged(cast("Callable[..., object]", mesh.fget)))))
        yield
