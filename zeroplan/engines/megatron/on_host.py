"""What does Megatron-Core's HybridDeviceOptimizer keep on the GPU and in host memory?

A share of the parameters is updated by the CPU, from copies in host memory. Read from Megatron-Core 0.16, not run on GPUs.
"""

from collections.abc import Iterator

from zeroplan.engines.account import Symbol
from zeroplan.engines.formulas import sized
from zeroplan.engines.megatron.muon import largest_matrices
from zeroplan.engines.megatron.parameters import table_of
from zeroplan.engines.megatron.rank import Rank, updated_by
from zeroplan.ledger import Kind, Line
from zeroplan.numeric import Int, ceil_div, maximum, minimum
from zeroplan.spec.described import Job

HYBRID = "Megatron-Core 0.16.1, core/optimizer/cpu_offloading/hybrid_optimizer.py, HybridDeviceOptimizer"
_PARTS = 10_000
"""The share in host memory is counted in whole parts of this many."""


def _tensors_on_host(rank: Rank, job: Job) -> Int:
    """Return how many of a rank's updated parameters are in host memory at least: whole tensors until the fraction is reached."""
    return updated_by(rank, job)[0] * int(job.recipe.megatron.optimizer_offload_fraction * _PARTS) // _PARTS


def states_on_gpu(rank: Rank, job: Job) -> tuple[Int, str]:
    """Return the number of parameters whose optimizer states are on this rank's GPU, and its formula."""
    share, named = updated_by(rank, job)
    if not job.recipe.megatron.optimizer_offload_fraction:
        return share, named
    return share - _tensors_on_host(rank, job), f"({named} - U_host)"


def host_lines(rank: Rank, job: Job) -> Iterator[Line]:
    """Yield what is in host memory: fp32 weights, pinned fp32 gradients, and both moments. [bytes]"""
    if job.recipe.megatron.optimizer_offload_fraction:
        on_host = _tensors_on_host(rank, job)
        yield sized(Kind.OPTIMIZER_STATE, 12, on_host, "fp32 weights, momentum and variance", HYBRID, "U_host")
        yield sized(Kind.GRADIENTS, 4, on_host, "fp32 gradients for the CPU's optimizer, pinned", HYBRID, "U_host")


def copied_back(rank: Rank, job: Job) -> Iterator[Line]:
    """Yield the fp32 copy on the GPU of the largest tensor that comes back from host memory: torch converts it there. [bytes]"""
    if job.recipe.megatron.optimizer_offload_fraction:
        most = _largest(rank, job)
        yield sized(Kind.OPTIMIZER_TEMPORARY, 4, most, "fp32 copy of the largest updated tensor", HYBRID, "U_back")


def _largest(rank: Rank, job: Job) -> Int:
    """Return the elements of a rank's largest tensor: at most the whole one, and at most all that the rank updates."""
    most = table_of(job)
    for (rows, columns), ranks in largest_matrices(job):
        most = maximum(most, ceil_div(rows * columns, ranks))
    return minimum(most, updated_by(rank, job)[0])


def symbols_on_host(rank: Rank, job: Job) -> Iterator[Symbol]:
    """Yield the symbols of these lines."""
    if job.recipe.megatron.optimizer_offload_fraction:
        yield Symbol("U_host", _tensors_on_host(rank, job), "parameters whose optimizer states are in host memory")
        yield Symbol("U_back", _largest(rank, job), "elements of the largest tensor that comes back from there")
