"""Runs the engine's own code on fake tensors and a fake process group: any model, any number of ranks, no memory.

:mod:`zeroplan.verify.fake_cuda` makes torch see GPUs that do not exist, as in a dry run of a user's script.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from torch._subclasses.fake_tensor import DataDependentOutputException

from zeroplan.engines.device import allocator_room, workspace
from zeroplan.errors import MeasurementError
from zeroplan.measurement import Measurement
from zeroplan.spec.job import JobSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.verify.environment import environment
from zeroplan.verify.fake_cuda.installed import CUDA, install_node
from zeroplan.verify.release import as_installed
from zeroplan.verify.training.causal_model import layer_period
from zeroplan.verify.training.run import run
from zeroplan.verify.training.workload import Workload, placed
from zeroplan.verify.watching.extend import NotAlikeError, extended
from zeroplan.verify.watching.host import HostMemory
from zeroplan.verify.watching.recording import Recording
from zeroplan.verify.watching.replay import Replays
from zeroplan.verify.watching.timeline import Timeline, collectives, first_micro_batches, initialisation, steps_measured
from zeroplan.verify.watching.tracker import Tracker

_FEW_LAYERS = 4
"""Least layers of the shorter of two runs. Every layer of a long model, first, last or between, has an equal in both."""
_COUNT_ELEMENTS = ("deepspeed", "megatron")
"""Engines that fill buckets and flat groups up to a number of elements: a run of few layers fills them differently."""
_NO_SCALER = ("the gradient scaler did not run, since it reads values; it holds a few numbers only",)
_ALWAYS: tuple[str, ...] = (
    "collectives moved no data: the process group is fake",
    "weights are not initialised, dropout is off outside adapters",
    ("the allocator's figures come from a model of CUDA's allocator, on a GPU that holds what initialisation left and never runs "
    "out, with cuBLAS's workspaces"),
)  # fmt: skip
_CPU_ADAM = (
    ("torch's fused optimizer replaced DeepSpeedCPUAdam on the host, with zero_force_ds_cpu_optimizer false: both keep "
    "momentum and variance in fp32 and need nothing more"),
)  # fmt: skip
_APEX = (
    "Apex's kernels have stand-ins that request what they do: causal softmax, norms under sequence parallelism, gradients added "
    "by products; torch's fused Adam for its own; a function that torch.compile would fuse requests its result alone"
)
_USED = ("DDP's map of used parameters was not made: its C++ cannot pin fake memory; it has four bytes per tensor",)
_NVME = ("DeepSpeed swapped to NVMe without moving data: a stand-in replaced its asynchronous reads and writes",)


def simulate(
    job: JobSpec, *, rank: int = 0, steps: int = 2, all_layers: bool = True, say: Callable[[str], None] | None = None,
    make: Callable[[], Workload] | None = None, least_room: bool = False,
) -> Measurement:  # fmt: skip
    """Measure a job without memory or GPU; the last step is the steady state. ``say`` receives the progress.

    ``make`` builds another workload than the job's own model and runs it unchanged. ``least_room`` also searches for the smallest
    room in which the allocator can serve the run.

    Without ``all_layers`` a few layers are run and the result is extended if layers are alike; DeepSpeed always runs all. DDP and
    DeepSpeed reach their steady state in the third step. Torch sees fake GPUs for the rest of the process, so use a separate one
    (``launch``). Raises :class:`~zeroplan.errors.MeasurementError` for engines whose code cannot run on fake tensors.
    """
    began, job = time.perf_counter(), as_installed(job)
    extended = _from_few_layers(job, rank, steps) if make is None and not all_layers and _layers_are_alike(job) else None
    recording = _recorded(job, rank, steps, say, make) if extended is None else extended
    workspace_bytes, _ = workspace(job.cluster.gpu)
    replays = Replays.of(recording, workspace_bytes=workspace_bytes)
    timeline = Timeline(recording, counted=replays.default.allocated)
    return Measurement(
        job=job,
        backend="simulate",
        tensors="fake",
        kernels=job.cluster.kernels,
        process_group="fake",
        rank=rank,
        environment=environment(),
        initialisation=initialisation(timeline),
        first_micro_batches=first_micro_batches(timeline),
        steps=steps_measured(timeline),
        collectives=collectives(recording),
        allocator=replays.measured(
            recording,
            workspace_bytes=workspace_bytes,
            room_bytes=allocator_room(job.mesh, job.cluster.gpu),
            least_room=least_room,
        ),
        nvme_bytes=_on_nvme(job.recipe),
        remarks=_remarks(job, extended=extended is not None),
        seconds=time.perf_counter() - began,
    )


def _layers_are_alike(job: JobSpec) -> bool:
    """Whether a run of a few layers determines the memory of all layers."""
    recipe = job.recipe
    some_recomputed = recipe.recompute_layers is not None
    cut = job.mesh.pp > 1  # more layers would be split into stages at other places
    return not (recipe.engine in _COUNT_ELEMENTS or _layers_not_alike(job) or some_recomputed or cut)


def _remarks(job: JobSpec, *, extended: bool) -> tuple[str, ...]:
    few = f"few layers were run, and the result was extended to {job.model.num_hidden_layers}"
    return (*_of_recipe(job.recipe), *((few,) if extended else ()))


def _of_recipe(recipe: RecipeSpec) -> tuple[str, ...]:
    unscaled = recipe.precision == "fp16-mixed" and recipe.engine not in _COUNT_ELEMENTS  # they have scalers of their own
    maps = recipe.engine == "ddp" and (recipe.ddp.find_unused_parameters or recipe.ddp.static_graph)
    if recipe.engine == "megatron":
        return (_ALWAYS[0], "weights are not initialised", _ALWAYS[2], _APEX)
    return (*_ALWAYS, *(_NO_SCALER if unscaled else ()), *(_USED if maps else ()), *_replaced_parts(recipe))


def _replaced_parts(recipe: RecipeSpec) -> tuple[str, ...]:
    """Remarks on replaced parts: DeepSpeed's CPU optimizer, whose C++ needs real addresses, and its NVMe I/O."""
    steps_on_cpu = recipe.engine == "deepspeed" and recipe.deepspeed.offload_optimizer != "none"
    on_nvme = _NVME if _swaps(recipe) else ()
    return on_nvme + (
        _CPU_ADAM if steps_on_cpu and recipe.optimizer in ("adamw", "adam") and recipe.optimizer_impl in (None, "fused") else ()
    )


def _on_nvme(recipe: RecipeSpec) -> int | None:
    """Bytes that the run wrote to NVMe; None without NVMe offload."""
    if not _swaps(recipe):
        return None
    from zeroplan.verify.fake_parts.nvme import left  # noqa: PLC0415  it imports DeepSpeed

    return left()


def _swaps(recipe: RecipeSpec) -> bool:
    options = recipe.deepspeed
    return recipe.engine == "deepspeed" and "nvme" in (options.offload_optimizer, options.offload_param)


def _layers_not_alike(job: JobSpec) -> bool:
    """Whether layers differ: ranks own whole tensors (DDP with ZeRO-1), or some blocks are frozen or of a vision tower."""
    apart = job.model.frozen is not None or job.model.vision is not None
    return (job.recipe.engine == "ddp" and job.recipe.zero_stage == 1) or apart


def _recorded(
    job: JobSpec, rank: int, steps: int, say: Callable[[str], None] | None = None, make: Callable[[], Workload] | None = None
) -> Recording:  # fmt: skip
    install_node(job.cluster)
    tracker = Tracker(device=CUDA, say=say, host=HostMemory() if job.recipe.offloads else None)
    with _explain_reads_of_values(job) if make is None else nullcontext():
        run(job, tracker, rank=rank, steps=steps, device=CUDA, make=None if make is None else lambda: placed(make, CUDA))
    return tracker.finished()


@contextmanager
def _explain_reads_of_values(job: JobSpec) -> Iterator[None]:
    """Turn torch's error about reading a fake tensor's value into one line with advice; Adafactor reads every norm."""
    try:
        yield
    except DataDependentOutputException as error:
        names = f"optimizer {job.recipe.optimizer!r} or engine {job.recipe.engine!r}"
        raise MeasurementError(
            f"{names} reads values, which fake tensors do not have ({error}); run a small model with --backend cpu"
        ) from error


def _from_few_layers(job: JobSpec, rank: int, steps: int) -> Recording | None:
    """The recording of all layers, extended from two short runs; None if the model is short or its layers differ."""
    few, period = _few_layers(job.model), layer_period(job.model)
    times = (job.model.num_hidden_layers - few) // period
    if times <= 1:
        return None
    models = (replace(job.model, num_hidden_layers=layers) for layers in (few, few + period))
    shorter, longer = (_recorded(replace(job, model=model), rank, steps) for model in models)
    try:
        return extended(shorter, longer, times)
    except NotAlikeError:
        return None


def _few_layers(model: ModelSpec) -> int:
    """Layers of the shorter run: the dense first ones and a few others, so that the rest are whole periods of layer kinds."""
    dense, period = model.moe.num_dense_layers if model.moe is not None else 0, layer_period(model)
    least = dense + max(_FEW_LAYERS, 2 * period + 1)
    return least + (model.num_hidden_layers - least) % period
