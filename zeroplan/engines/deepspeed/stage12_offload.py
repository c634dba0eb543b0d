"""What does ZeRO-Offload change at stages 1 and 2 of DeepSpeed, on the GPU and in host memory?

The weights stay on the GPU, and so does the reduce bucket. A gradient that is reduced goes to the host at once: its norm is
taken in fp64 on the way, and it is cast to fp32. Over several micro-batches it is summed up by way of the GPU, in a buffer of the
size of the largest parameter.
"""

from functools import lru_cache

from zeroplan.engines.account import Symbol
from zeroplan.engines.deepspeed.gradients import sums_in_fp32
from zeroplan.engines.deepspeed.offload import offloads_optimizer
from zeroplan.engines.deepspeed.sources import SHARE, STAGE12
from zeroplan.engines.deepspeed.stage12_lines import Job
from zeroplan.engines.formulas import times
from zeroplan.engines.pinned import beyond, beyond_symbol, block_bytes, rounding
from zeroplan.engines.rows import Row, largest_parameter
from zeroplan.ledger import Kind, Line
from zeroplan.numeric import Int, for_each_value, where

_BUFFER = f"{STAGE12}, temp_grad_buffer_for_gpu_offload"
_WAY_THERE = f"{STAGE12}, param_buffer_of_bit16_for_cpu_offload_groups"


def way_back(job: Job) -> tuple[Line, ...]:
    """Return the buffer on the GPU through which gradients summed on the host come back; it is there in any case."""
    if not offloads_optimizer(job.recipe):
        return ()
    reason = "buffer through which gradients summed on the host come back, as large as the largest parameter"
    return (Line(Kind.REDUCE, job.element * largest_parameter(job.whole), reason, times(job.element, "G_big"), _BUFFER),)


def host_lines(job: Job, states: tuple[Line, ...], temporary: tuple[Line, ...]) -> tuple[Line, ...]:
    """Return what is in host memory from the second step on, with what the step takes there. [bytes]

    ``states`` are the weights of the share and the optimizer's states; ``temporary`` what a step of torch's own optimizer takes.
    """
    if not offloads_optimizer(job.recipe):
        return ()
    element, share = job.element, job.partition
    buffer = "weights of this rank's share on their way to the GPU"
    return (
        *states,
        Line(Kind.GRADIENTS, job.master * share, "gradients of this rank's share, as the optimizer takes them",
             times(job.master, SHARE), f"{STAGE12}, initialize_optimizer_states"),
        Line(Kind.PARAMETERS, element * share, buffer, times(element, SHARE), _WAY_THERE),
        Line(Kind.GRADIENTS, element * largest_parameter(job.whole), "buffer for one gradient, as large as the largest parameter",
             times(element, "G_big"), f"{STAGE12}, temp_grad_buffer_for_cpu_offload"),
        *_sums(job),
        *temporary,
        *((beyond(_beyond(job)),) if job.recipe.deepspeed.offload_optimizer_pin_memory else ()),
    )  # fmt: skip


def _sums(job: Job) -> tuple[Line, ...]:
    """Gradients summed over micro-batches at stage 2; at stage 1 they are summed on the GPU."""
    if sums_in_fp32(job.recipe) or job.recipe.zero_stage == 1:
        return ()
    n_bytes = where(job.micro_batches > 1, job.element * job.touched, 0)
    reason = "gradients summed over micro-batches, of every parameter that reaches into this rank's share, each whole"
    return (Line(Kind.GRADIENTS, n_bytes, reason, f"{job.element}·M·G_p", f"{STAGE12}, accumulated_grads_in_cpu"),)


def _beyond(job: Job) -> Int:
    """Bytes that pinned memory takes beyond its tensors: each is there from its first use on."""
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
    """Return what the formulas of this module count."""
    if not offloads_optimizer(job.recipe):
        return ()
    return (
        Symbol("G_big", largest_parameter(job.whole), "elements of the largest parameter"),
        beyond_symbol(_beyond(job)),
    )
