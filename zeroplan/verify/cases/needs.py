"""How much GPU memory does a run need, and how much does this machine's GPU have?"""

import ctypes
from dataclasses import replace

from zeroplan.engines.device import outside, total_band
from zeroplan.estimator import Estimate
from zeroplan.spec.hardware import ByteFigure
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec

_DRIVER = "libcuda.so.1"
_OK = 0
#: The ``source`` of a memory size read from the driver instead of the catalogue.
OF_THE_DRIVER = "the driver of the card at hand"


def needed_bytes(answer: Estimate, *, alone: bool) -> int:
    """The peak plus the memory outside the allocator. [bytes]

    ``alone`` is one rank of a fake process group, which has no communicators.
    """
    if not alone:
        return answer.least_bytes
    return answer.peak_bytes + int(total_band(outside(MeshSpec(), answer.job.cluster.gpu)).expected_bytes)


def card_bytes() -> int | None:
    """Total memory of the first visible GPU by its driver; None without driver or GPU. [bytes]

    Calls the driver's library directly, without torch, and creates no context.
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
    """The job with its GPU's memory set to the memory at hand. [bytes]"""
    gpu = job.cluster.gpu
    if gpu is None or n_bytes in (None, gpu.memory_bytes.value):
        return job
    memory = ByteFigure(value=n_bytes, source=OF_THE_DRIVER)
    return replace(job, cluster=replace(job.cluster, gpu=replace(gpu, memory_bytes=memory)))
