"""The moments of the optimizer's step under ZeRO-3, which takes one sub-group of parameters after the other."""

from functools import lru_cache

from zeroplan.engines.deepspeed.flat import Row, largest_parameter
from zeroplan.engines.deepspeed.sources import FP64, STAGE3
from zeroplan.engines.deepspeed.stage3.job import Job, staying_lines
from zeroplan.engines.deepspeed.stage3.states import persistent_line
from zeroplan.engines.formulas import times
from zeroplan.engines.optimizers import LocalTensor, step_temporary_lines
from zeroplan.ledger import Kind, Line, Moment, Phase
from zeroplan.numeric import Int, ceil_div, for_each_value
from zeroplan.spec.recipe import OptimizerImpl


def largest_group(job: Job) -> Int:
    """Elements of this rank's shares in the largest sub-group. [elements]"""
    size = job.recipe.deepspeed.sub_group_size
    return for_each_value(lambda n_ranks: max(_groups_of(job.whole, size, n_ranks)), job.n_ranks)


def group_count(job: Job) -> Int:
    """How many sub-groups there are."""
    size = job.recipe.deepspeed.sub_group_size
    return for_each_value(lambda n_ranks: len(_groups_of(job.whole, size, n_ranks)), job.n_ranks)


@lru_cache(maxsize=4096)
def _groups_of(whole: Row, size: int, n_ranks: int) -> tuple[int, ...]:
    """Elements of this rank's shares in each sub-group.

    A group takes whole parameters, in their order, and is closed by the one whose share reaches ``size``. Source: DeepSpeed
    0.19.8, ``stage3.py``, ``_create_fp16_sub_groups``.
    """
    filled, groups = 0, list[int]()
    for each in whole.placed:
        filled += ceil_div(each.end - each.start, n_ranks)
        if filled >= size:
            groups.append(filled)
            filled = 0
    return (*groups, filled) if filled else tuple(groups)


def step_temporaries(job: Job, impl: OptimizerImpl) -> tuple[Line, ...]:
    """What the optimizer takes for the largest sub-group."""
    tensors = (LocalTensor((largest_group(job),), in_block=False),)
    return step_temporary_lines(job.recipe.optimizer, impl, tensors, job.master, symbol="G_g")


def step_away_moments(job: Job) -> tuple[Moment, ...]:
    """The CPU takes the step."""
    return (
        Moment("optimizer step: begun", Phase.STEP, (*staying_lines(job), persistent_line(job))),
        Moment("optimizer step: on the CPU", Phase.STEP, staying_lines(job)),
        Moment("after the step: persistent parameters gathered", Phase.STEP, (persistent_line(job),)),
    )


def step_moments(job: Job, temporary: tuple[Line, ...]) -> tuple[Moment, ...]:
    """All parameters are released first; then norm, and one sub-group after the other."""
    part: Int = ceil_div(largest_parameter(job.whole), job.n_ranks)
    group = largest_group(job)
    largest = "G_max" if job.every is job.whole else "G_one"
    norm = Line(Kind.OPTIMIZER_TEMPORARY, FP64 * part, "largest share of a gradient in fp64", f"8·ceil({largest}/N)",
                f"{STAGE3}, get_grad_norm_direct")  # fmt: skip
    flat = Line(
        Kind.OPTIMIZER_TEMPORARY, job.kept * group, "gradients of a sub-group, laid flat", times(job.kept, "G_g"), STAGE3
    )
    taken = Line(Kind.GRADIENTS, job.master * group, "gradients of a sub-group, as the optimizer takes them",
                 times(job.master, "G_g"), f"{STAGE3}, _prepare_fp32_grad_for_sub_group")  # fmt: skip
    return (
        Moment("gradient norm", Phase.STEP, (norm,)),
        Moment("optimizer step: gradients flattened", Phase.STEP, (flat, taken) if job.kept != job.master else (taken,)),
        Moment("optimizer step: update", Phase.STEP, (taken, *temporary)),
        Moment("after the step: persistent parameters gathered", Phase.STEP, (persistent_line(job),)),
    )
