"""Run the engine's own code on fake tensors and a fake process group: any model, any number of ranks, no memory.

Torch believes in GPUs that are not there (:mod:`zeroplan.verify.fake_cuda`), as it does for a dry run of a user's own script.
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
from zeroplan.verify.watching.timeline import Timeline, collectives, initialisation, steps_measured
from zeroplan.verify.watching.tracker import Tracker

_FEW_LAYERS = 4
"""With so many layers, and one more, every layer of a longer model has its like: a first, a last, and some between."""
_COUNT_ELEMENTS = ("deepspeed",)
"""Engines whose buckets, windows of reuse and flat groups end after so many elements, wherever in a layer that is: few layers
may look alike, and many do otherwise."""
_NO_SCALER = ("no gradient scaler was run: it reads values, and what it holds is a few numbers",)
_ALWAYS: tuple[str, ...] = (
    "collectives moved no data: the process group is fake",
    "weights are not initialised, dropout is off",
    ("CUDA's allocator is a model of it: from a card that holds what initialisation left and never runs out, with cuBLAS's "
     "workspaces"),
)  # fmt: skip
_CPU_ADAM = (
    ("torch's fused optimizer ran on the host in place of DeepSpeedCPUAdam, with zero_force_ds_cpu_optimizer false: both keep "
     "momentum and variance in fp32 and take nothing more"),
)  # fmt: skip
_USED = ("DDP's map of used parameters was not made: its C++ cannot pin fake memory; it takes four bytes per tensor",)
_NVME = ("what goes to NVMe moved no data: DeepSpeed's own swapping ran with a stand-in for its asynchronous reads and writes",)


def simulate(
    job: JobSpec, *, rank: int = 0, steps: int = 2, all_layers: bool = True, say: Callable[[str], None] | None = None,
    make: Callable[[], Workload] | None = None, least_room: bool = False,
) -> Measurement:  # fmt: skip
    """Measure a job without memory or GPU; the last step is the steady state. ``say`` is told how far it is.

    ``make`` builds another workload than the job's own model, which is run as it is. ``least_room`` also looks for the smallest
    room in which the allocator goes through the run.

    Without ``all_layers`` a few are run and the rest extended from them (:mod:`zeroplan.verify.watching.extend`), or all after
    all where they are not alike. DDP and DeepSpeed settle in the third step. DeepSpeed always runs all layers. Torch believes in
    CUDA for the rest of the process, so simulate in one that does nothing else
    (:func:`zeroplan.verify.processes.launch.launch`, with fake tensors).
    Raises :class:`~zeroplan.errors.MeasurementError` for engines whose code fake tensors cannot go through.
    """
    began, job = time.perf_counter(), as_installed(job)
    recording = _from_few_layers(job, rank, steps) if make is None and not all_layers and _layers_are_alike(job) else None
    remarks = _remarks(job.recipe)
    if recording is not None:
        remarks += (f"few layers were run and extended to {job.model.num_hidden_layers}: layers are alike",)
    else:
        recording = _recorded(job, rank, steps, say, make)
    workspace_bytes, _ = workspace(job.cluster.gpu)
    replays = Replays.of(recording, workspace_bytes=workspace_bytes)
    timeline = Timeline(recording, counted=replays.default.allocated)
    return Measurement(
        job=job,
        backend="simulate",
        tensors="fake",
        kernels="cuda",
        process_group="fake",
        rank=rank,
        environment=environment(),
        initialisation=initialisation(timeline),
        steps=steps_measured(timeline),
        collectives=collectives(recording),
        allocator=replays.measured(
            recording,
            workspace_bytes=workspace_bytes,
            room_bytes=allocator_room(job.mesh, job.cluster.gpu),
            least_room=least_room,
        ),
        nvme_bytes=_on_nvme(job.recipe),
        remarks=remarks,
        seconds=time.perf_counter() - began,
    )


def _layers_are_alike(job: JobSpec) -> bool:
    """Whether a few may tell of all."""
    recipe = job.recipe
    some_recomputed = recipe.recompute_layers is not None
    cut = job.mesh.pp > 1  # stages have few layers, and more of them cut elsewhere
    return not (recipe.engine in _COUNT_ELEMENTS or _hands_out_tensors(job) or some_recomputed or cut)


def _remarks(recipe: RecipeSpec) -> tuple[str, ...]:
    unscaled = recipe.precision == "fp16-mixed" and recipe.engine != "deepspeed"  # which has a scaler of its own
    maps = recipe.engine == "ddp" and (recipe.ddp.find_unused_parameters or recipe.ddp.static_graph)
    return (*_ALWAYS, *(_NO_SCALER if unscaled else ()), *(_USED if maps else ()), *_stands_for(recipe))


def _stands_for(recipe: RecipeSpec) -> tuple[str, ...]:
    """DeepSpeed's own optimizer for the CPU is C++ that takes addresses, which fake tensors do not have."""
    takes_the_step = recipe.engine == "deepspeed" and recipe.deepspeed.offload_optimizer != "none"
    on_nvme = _NVME if _swaps(recipe) else ()
    return on_nvme + (
        _CPU_ADAM
        if takes_the_step and recipe.optimizer in ("adamw", "adam") and recipe.optimizer_impl in (None, "fused")
        else ()
    )


def _on_nvme(recipe: RecipeSpec) -> int | None:
    """What the run has written; None where nothing goes to NVMe."""
    if not _swaps(recipe):
        return None
    from zeroplan.verify.pretended.nvme import left  # noqa: PLC0415  it imports DeepSpeed

    return left()


def _swaps(recipe: RecipeSpec) -> bool:
    options = recipe.deepspeed
    return recipe.engine == "deepspeed" and "nvme" in (options.offload_optimizer, options.offload_param)


def _hands_out_tensors(job: JobSpec) -> bool:
    """Whether ranks get whole tensors, the largest first: what one gets of more layers does not follow from a few.

    Nor do so many frozen blocks.
    """
    return (job.recipe.engine == "ddp" and job.recipe.zero_stage == 1) or job.model.frozen is not None


def _recorded(
    job: JobSpec, rank: int, steps: int, say: Callable[[str], None] | None = None, make: Callable[[], Workload] | None = None
) -> Recording:  # fmt: skip
    install_node(job.cluster)
    tracker = Tracker(device=CUDA, say=say, host=HostMemory() if job.recipe.offloads else None)
    with _values_are_not_there(job) if make is None else nullcontext():
        run(job, tracker, rank=rank, steps=steps, device=CUDA, make=None if make is None else lambda: placed(make, CUDA))
    return tracker.recording


@contextmanager
def _values_are_not_there(job: JobSpec) -> Iterator[None]:
    """Say in one line that something reads a number out of a tensor, as Adafactor does of every norm."""
    try:
        yield
    except DataDependentOutputException as error:
        names = f"optimizer {job.recipe.optimizer!r} or engine {job.recipe.engine!r}"
        raise MeasurementError(
            f"{names} reads values, which fake tensors do not have ({error}); run a small model with --backend cpu"
        ) from error


def _from_few_layers(job: JobSpec, rank: int, steps: int) -> Recording | None:
    """The recording of all layers, written down from two with few; None where there are no more, or they are not alike."""
    few, period = _few_layers(job.model), layer_period(job.model)
    times = (job.model.num_hidden_layers - few) // period
    if times <= 1:
        return None
    shorter, longer = (_recorded(_with_layers(job, layers), rank, steps) for layers in (few, few + period))
    try:
        return extended(shorter, longer, times)
    except NotAlikeError:
        return None


def _few_layers(model: ModelSpec) -> int:
    """All dense first layers, a few of the others, and as many more as leave whole periods out."""
    dense, period = model.moe.num_dense_layers if model.moe is not None else 0, layer_period(model)
    least = dense + max(_FEW_LAYERS, 2 * period + 1)
    return least + (model.num_hidden_layers - least) % period


def _with_layers(job: JobSpec, layers: int) -> JobSpec:
    return replace(job, model=replace(job.model, num_hidden_layers=layers))
