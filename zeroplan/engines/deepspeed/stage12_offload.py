"""ZeRO-Offload at stages 1 and 2 of DeepSpeed, on the GPU and in host memory.

The weights and the reduce bucket stay on the GPU. DeepSpeed copies a reduced gradient to the host at once; before that it
computes its norm in fp64, and it casts the gradient to fp32. Over several micro-batches it sums gradients through a buffer on
the GPU, as large as the largest parameter.
"""

from functools import lru_cache

from zeroplan.engines.account import Symbol
from zeroplan.engines.deepspeed.gradients import sums_in_fp32
from zeroplan.engines.deepspeed.offload import offloads_optimizer
from zeroplan.engines.deepspeed.sources import SHARE, STAGE12
from zeroplan.engines.deepspeed.stage12_lines import Job
from zeroplan.engines.formulas import sized
from zeroplan.engines.pinned import beyond, beyond_symbol, block_bytes, rounding
from zeroplan.engines.rows import Row, largest_parameter
from zeroplan.ledger import Kind, Line
from zeroplan.numeric import Int, for_each_value, where

_BUFFER = f"{STAGE12}, temp_grad_buffer_for_gpu_offload"
_TAKEN = f"{STAGE12}, initialize_optimizer_states"
_ON_HOST = f"{STAGE12}, temp_grad_buffer_for_cpu_offload"
_WAY_THERE = f"{STAGE12}, param_buffer_of_bit16_for_cpu_offload_groups"


def way_back(job: Job) -> tuple[Line, ...]:
    """Return the GPU buffer through which gradients summed on the host come back. It always exists with offload."""
    if not offloads_optimizer(job.recipe):
        return ()
    reason = "buffer through which gradients summed on the host come back, as large as the largest parameter"
    return (sized(Kind.REDUCE, job.element, largest_parameter(job.whole), reason, _BUFFER, "G_big"),)


def host_lines(job: Job, states: tuple[Line, ...], temporary: tuple[Line, ...]) -> tuple[Line, ...]:
    """Return the host memory from the second step on, including the step's temporaries. [bytes]

    ``states``: weights of the shard and the optimizer's states; ``temporary``: temporaries of a step of torch's own optimizer.
    """
    if not offloads_optimizer(job.recipe):
        return ()
    element, share = job.element, job.partition
    buffer = "weights of this rank's share on their way to the GPU"
    one = "buffer for one gradient, as large as the largest parameter"
    return (
        *states,
        sized(Kind.GRADIENTS, job.master, share, "gradients of this rank's share, as the optimizer takes them", _TAKEN, SHARE),
        sized(Kind.PARAMETERS, element, share, buffer, _WAY_THERE, SHARE),
        sized(Kind.GRADIENTS, element, largest_parameter(job.whole), one, _ON_HOST, "G_big"),
        *_sums(job),
        *temporary,
        *((beyond(_beyond(job)),) if job.recipe.deepspeed.offload_optimizer_pin_memory else ()),
    )  # fmt: skip


def _sums(job: Job) -> tuple[Line, ...]:
    """Return gradients summed over micro-batches at stage 2. At stage 1 they are summed on the GPU."""
    if sums_in_fp32(job.recipe) or job.recipe.zero_stage == 1:
        return ()
    n_bytes = where(job.micro_batches > 1, job.element * job.touched, 0)
    reason = "gradients summed over micro-batches, of every parameter that reaches into this rank's share, each whole"
    return (Line(Kind.GRADIENTS, n_bytes, reason, f"{job.element}·M·G_p", f"{STAGE12}, accumulated_grads_in_cpu"),)


def _beyond(job: Job) -> Int:
    """Return the size of pinned blocks beyond their tensors. Each block exists from its first use on. [bytes]"""
    share, one = job.partition, job.element * largest_parameter(job.whole)
    total = 2 * rounding(job.master * share) + rounding(job.element * share) + rounding(one)
    if sums_in_fp32(job.recipe) or job.recipe.zero_stage == 1:
        return total
    summed = for_each_value(lambda partition: _rounded_sums(job.whole, job.element, partition), share)
    return total + where(job.micro_batches > 1, summed, 0)


@lru_cache(maxsize=256)
def _rounded_sums(whole: Row, element: int, partition: int) -> int:
    sizes = [element * (each.end - each.start) for each in whole.placed if each.start < partition]
    return sum(block_bytes(size) - size for size in sizes)


def host_symbols(job: Job) -> tuple[Symbol, ...]:
    """Return the symbols in the formulas of this module."""
    if not offloads_optimizer(job.recipe):
        return ()
    return (
        Symbol("G_big", largest_parameter(job.whole), "elements of the largest parameter"),
        beyond_symbol(_beyond(job)),
    )
