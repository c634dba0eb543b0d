"""What a run needs of its card, and how much its card has: a verdict is about what was run, where it was run."""

import ctypes
from dataclasses import replace

from zeroplan.engines.device import outside, total_band
from zeroplan.estimator import Estimate
from zeroplan.spec.hardware import ByteFigure
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec

_DRIVER = "libcuda.so.1"
_OK = 0


def needed_bytes(answer: Estimate, *, alone: bool) -> int:
    """The peak, and what the card gives outside the allocator. [bytes]

    ``alone``, as one rank of a fake process group, a process has no communicators.
    """
    if not alone:
        return answer.least_bytes
    return answer.peak_bytes + int(total_band(outside(MeshSpec(), answer.job.cluster.gpu)).expected_bytes)


def card_bytes() -> int | None:
    """All memory of the first GPU that this process sees, as its driver says; None where there is no driver or no GPU. [bytes]

    The driver's library is asked, without torch; no context is made.
    """
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return None
    device, total = ctypes.c_int(), ctypes.c_size_t()
    if driver.cuInit(0) != _OK or driver.cuDeviceGet(ctypes.byref(device), 0) != _OK:
        return None
    if driver.cuDeviceTotalMem_v2(ctypes.byref(total), device) != _OK:
        return None
    return total.value


def on_a_card_of(job: JobSpec, n_bytes: int | None) -> JobSpec:
    """The job on the card that is there: of the GPU it names, with so much memory. [bytes]"""
    gpu = job.cluster.gpu
    if gpu is None or n_bytes in (None, gpu.memory_bytes.value):
        return job
    memory = ByteFigure(value=n_bytes, source="the driver of the card at hand")
    return replace(job, cluster=replace(job.cluster, gpu=replace(gpu, memory_bytes=memory)))
