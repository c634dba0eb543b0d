"""The moments of the optimizer's step under ZeRO-3, which updates one sub-group of parameters after the other."""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from zeroplan.engines.account import Symbol
from zeroplan.engines.deepspeed.infinity import sub_groups
from zeroplan.engines.deepspeed.sources import FP64, STAGE3
from zeroplan.engines.deepspeed.stage3.job import Job, staying_lines
from zeroplan.engines.deepspeed.stage3.states import of_groups, persistent_line
from zeroplan.engines.formulas import times, unless_zero
from zeroplan.engines.optimizers import LocalTensor, step_temporary_lines
from zeroplan.engines.published_optimizers import PUBLISHED
from zeroplan.engines.rows import Row, largest_parameter
from zeroplan.ledger import Kind, Line, Moment, Phase, total_bytes
from zeroplan.numeric import Int, ceil_div, for_each_value, where
from zeroplan.spec.recipe import OptimizerImpl


class Group(NamedTuple):
    """A sub-group: elements of this rank's shards, and its number of parameters."""

    elements: int
    parameters: int


def largest_group(job: Job) -> Int:
    """Return the elements of this rank's shards in the largest sub-group. [elements]"""
    return _of_groups(job, lambda groups: max(group.elements for group in groups))


def largest_joined(job: Job) -> Int:
    """Return the same for sub-groups with more than one parameter; 0 if there is none. [elements]

    Only their gradients are copied to be flattened.
    """
    return _of_groups(job, lambda groups: max((group.elements for group in groups if group.parameters > 1), default=0))


def group_count(job: Job) -> Int:
    """Return the number of sub-groups."""
    return _of_groups(job, len)


def _of_groups(job: Job, measure: Callable[[tuple[Group, ...]], int]) -> Int:
    size = job.recipe.deepspeed.sub_group_size
    return for_each_value(lambda n_ranks: measure(groups_of(job.whole, size, n_ranks)), job.n_ranks)


@lru_cache(maxsize=4096)
def groups_of(whole: Row, size: int, n_ranks: int) -> tuple[Group, ...]:
    """Return this rank's shards in each sub-group."""
    return tuple([Group(sum(shares), len(shares)) for shares in sub_groups(whole, size, n_ranks)])


def step_temporaries(job: Job, impl: OptimizerImpl) -> tuple[Line, ...]:
    """Return the optimizer's temporaries for the sub-group that takes most."""
    if job.recipe.optimizer in PUBLISHED:  # torchao takes temporaries only where it quantises
        return of_groups(job, lambda groups: step_temporary_lines(job.recipe.optimizer, impl, groups, job.master))
    tensors = (LocalTensor((_largest_update(job, impl)[0],), in_block=False),)
    return step_temporary_lines(job.recipe.optimizer, impl, tensors, job.master, symbol="G_g")


def _largest_update(job: Job, impl: OptimizerImpl) -> tuple[Int, Int]:
    """Return the elements of the sub-group whose update takes most, and of the copy of its gradients. [elements]

    Gradients in the optimizer's dtype are copied only if several are flattened.
    """
    largest, joined = largest_group(job), largest_joined(job)
    if job.kept != job.master:
        return largest, largest

    def temporary_bytes(group: Int) -> Int:
        tensors = (LocalTensor((group,), in_block=False),)
        return total_bytes(step_temporary_lines(job.recipe.optimizer, impl, tensors, job.master, symbol="G_g"))

    copied = job.master * joined + temporary_bytes(joined) >= temporary_bytes(largest)
    return where(copied, joined, largest), where(copied, joined, 0)


def cpu_step_moments(job: Job) -> tuple[Moment, ...]:
    """Return the moments of a step on the CPU."""
    return (
        Moment("optimizer step: begun", Phase.STEP, (*staying_lines(job), persistent_line(job))),
        Moment("optimizer step: on the CPU", Phase.STEP, staying_lines(job)),
        Moment("after the step: persistent parameters gathered", Phase.STEP, (persistent_line(job),)),
    )


def step_moments(job: Job, impl: OptimizerImpl, temporary: tuple[Line, ...]) -> tuple[Moment, ...]:
    """Return the moments of a step: DeepSpeed releases all parameters, computes norms, and updates each sub-group."""
    part: Int = ceil_div(largest_parameter(job.whole), job.n_ranks)
    largest = "G_max" if job.every is job.whole else "G_one"
    norm = Line(Kind.OPTIMIZER_TEMPORARY, FP64 * part, "largest share of a gradient in fp64", f"8·ceil({largest}/N)",
                f"{STAGE3}, get_grad_norm_direct")  # fmt: skip
    joined = largest_joined(job)
    flat = Line(
        Kind.OPTIMIZER_TEMPORARY, job.kept * joined, "gradients of a sub-group, laid flat",
        unless_zero(joined, times(job.kept, "G_j")), STAGE3,
    )  # fmt: skip
    flattened = (
        (flat, _group_gradients(job, joined, "G_j")) if job.kept != job.master else (_group_gradients(job, joined, "G_j"),)
    )
    return (
        Moment("gradient norm", Phase.STEP, (norm,)),
        Moment("optimizer step: gradients flattened", Phase.STEP, flattened),
        Moment("optimizer step: update", Phase.STEP, (_group_gradients(job, _largest_update(job, impl)[1], "G_g"), *temporary)),
        Moment("after the step: persistent parameters gathered", Phase.STEP, (persistent_line(job),)),
    )


def _group_gradients(job: Job, elements: Int, symbol: str) -> Line:
    n_bytes, reason = job.master * elements, "gradients of a sub-group, as the optimizer takes them"
    formula = unless_zero(n_bytes, times(job.master, symbol))
    return Line(Kind.GRADIENTS, n_bytes, reason, formula, f"{STAGE3}, _prepare_fp32_grad_for_sub_group")


def stepped_symbols(job: Job, impl: OptimizerImpl) -> tuple[Symbol, ...]:
    """Return the symbols in the formulas of this module."""
    what = "elements that one step of the optimizer takes: whole shares, up to sub_group_size"
    return (
        Symbol("G_g", _largest_update(job, impl)[0], what),
        Symbol("G_j", largest_joined(job), "elements of the largest such step with several parameters"),
    )
