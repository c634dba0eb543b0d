"""GPU memory that a buffer of DeepEP allocates outside torch's allocator (``csrc/legacy/buffer.hpp``)."""

from collections.abc import Iterator

from zeroplan.engines.deep_ep import PEERS
from zeroplan.numeric import round_up
from zeroplan.script_run import OutsideBuffer
from zeroplan.units import MIB

_WORKSPACE = 32 * MIB
_PAGE = 2 * MIB
"""CUDA's allocation granularity. [bytes]"""
_HEAP_GROWS_BY = 512 * MIB
"""``NVSHMEM_CUMEM_GRANULARITY`` as DeepEP sets it. [bytes]"""
_SIGNALS = PEERS * (4 + 8 + 8)
"""Barrier signals, and pointers to all ranks' buffers and signals. [bytes]"""
_SOURCE = "DeepEP, csrc/legacy/buffer.hpp"


def allocations(num_nvl_bytes: int, num_rdma_bytes: int) -> Iterator[OutsideBuffer]:
    """A buffer's allocations: for NVLink by cudaMalloc, a workspace, and NVSHMEM's heap, which grows in large pieces."""
    yield _exactly("DeepEP's workspace", _WORKSPACE)
    if num_nvl_bytes:
        yield _exactly("DeepEP's buffer for NVLink", int(round_up(num_nvl_bytes + _SIGNALS, _PAGE)))
    if num_rdma_bytes:
        heap = int(round_up(num_rdma_bytes, _HEAP_GROWS_BY))
        yield OutsideBuffer(
            what="DeepEP's buffer for RDMA", low_bytes=num_rdma_bytes, expected_bytes=heap, high_bytes=heap + _HEAP_GROWS_BY,
            source=f"{_SOURCE}, and NVSHMEM's heap in pieces of 512 MiB (deep_ep/buffers/legacy.py); not measured",
        )  # fmt: skip


def _exactly(what: str, n_bytes: int) -> OutsideBuffer:
    return OutsideBuffer(what=what, low_bytes=n_bytes, expected_bytes=n_bytes, high_bytes=n_bytes, source=_SOURCE)
