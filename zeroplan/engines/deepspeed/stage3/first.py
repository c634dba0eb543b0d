"""The first micro-batch of all under ZeRO-3, in which DeepSpeed's coordinator records the modules: when can it be the peak?

The coordinator has no trace yet. It prefetches nothing, and releases every parameter, small ones too, when its module ends. If the
graph holds a released tensor (experts' weights that a product took as a view; all weights of a recomputed block), the backward
gathers the parameter once more. Later micro-batches find it still gathered if its next use is near.

On the other hand the optimizer's states, if they are on the GPU, appear in the first step, after this micro-batch. Adagrad's exist
before. So the first micro-batch is the peak where it has more gathered than these states take: with offload, on many ranks, with
an optimizer of few states, or with few trained parameters.

Source: DeepSpeed 0.19.8, ``runtime/zero/partitioned_param_coordinator.py``, ``reset_step`` and ``release_sub_module``;
``runtime/zero/stage3.py``, ``initialize_optimizer_states``.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from zeroplan.engines.deepspeed.notes import (
    Gathered,
    gathered_at_first,
    gathered_at_second,
    more_than,
    most_at_first,
    most_noted,
)
from zeroplan.engines.deepspeed.offload import offloads_parameters
from zeroplan.engines.deepspeed.stage3.job import Job, pass_of
from zeroplan.engines.deepspeed.stage3.training import Beside, Taken, Training
from zeroplan.engines.optimizers import states_from_the_start
from zeroplan.engines.passes import Passes
from zeroplan.ledger import Kind, Line, total_bytes
from zeroplan.numeric import Bool, Int
from zeroplan.spec.batch import Batch
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.trace import Entry, Trace, highest_of, totals_of
from zeroplan.weights import ONE_POOL


def before_the_first_step(recipe: RecipeSpec, states: tuple[Line, ...]) -> tuple[Line, ...]:
    """Return the lines that exist before the first step, of weights, their copy for the optimizer, gradients and its states."""
    return states if states_from_the_start(recipe.optimizer) else states[:3]


def first_moments(
    jobs: tuple[Job, ...], batch: Batch, these: Passes, taken: Taken, *, held: tuple[Line, ...], made_later: tuple[Line, ...],
    later: Sequence[Entry],
) -> tuple[Entry, ...]:  # fmt: skip
    """Return the moments of the first micro-batch, and of the first step's second; none of one that provably is not the peak.

    ``jobs``: the job with the trace of later micro-batches; ``taken``: each flush's memory beside its bucket; ``held``: the lines
    that exist from the start; ``made_later``: the optimizer's states that do not; ``later``: the moments of later micro-batches.
    """
    job, missing, micro = jobs[0], total_bytes(made_later), batch.grad_accum_steps
    alone = isinstance(job.n_ranks, int) and job.n_ranks == 1
    if job.recipe.forward_only or (alone and not offloads_parameters(job.recipe)):
        return ()
    one, found = pass_of(job.every, job.recipe, job.n_ranks), list[Entry]()
    traces = tuple(each.trace for each in jobs if each.applies is not False)
    peak = _Later(later, missing, job.element, traces)
    bound = most_at_first(one)
    if bound is None or not peak.is_above(bound):
        first = job._replace(trace=gathered_at_first(one), applies=True, ends_step=micro == 1)
        found += _moments("first micro-batch", first, peak, these, taken, held)
    if job.trace.persistent and not _never(micro > 1):
        second = job._replace(trace=gathered_at_second(one), applies=micro > 1, ends_step=micro == 2)
        found += _moments("second micro-batch", second, peak, these, taken, held)
    return tuple(found)


def _moments(name: str, job: Job, later: "_Later", these: Passes, taken: Taken, held: tuple[Line, ...]) -> tuple[Entry, ...]:
    """Return the moments of an early micro-batch; none if it is below later ones."""
    early = job.trace
    more = max(more_than(early, each) for each in later.traces)
    if _never(job.element * more > later.missing) or later.is_above(most_noted(early)):
        return ()
    least = later.missing if isinstance(later.missing, int) else int(later.missing.min())
    in_forward = all(job.element * more_than(early, each, of_blocks_in_forward=True) <= least for each in later.traces)
    beside = Beside(name, later.traces, least // job.element + later.traces[0].persistent, in_forward)

    def written(applies: Bool) -> tuple[Entry, ...]:
        trace = Trace()
        trace.hold("states", *held)
        Training(trace, job._replace(applies=applies), these, taken, later=beside).run()
        return trace.finished()

    found = written(job.applies)
    highest = _peak(found)
    if later.peak is not None and highest is not None:
        return found if highest.total > later.peak.total else ()
    is_peak = highest_of(found, ONE_POOL).peak_bytes > later.highest_bytes
    # At places of a column where a later micro-batch is higher, these moments count nothing.
    return () if _never(is_peak) else written(is_peak & job.applies)


class _Later:
    """Later micro-batches: their moments and traces, and the optimizer's states that exist only then. [bytes]"""

    def __init__(self, moments: Sequence[Entry], missing: Int, element: int, traces: tuple[Gathered, ...]) -> None:
        self.moments, self.missing, self.element, self.traces = moments, missing, element, traces

    @cached_property
    def peak(self) -> "_Peak | None":
        """The peak; None for columns."""
        return _peak(self.moments)

    @cached_property
    def highest_bytes(self) -> Int:
        """The highest total; an int or a column. [bytes]"""
        return highest_of(self.moments, ONE_POOL).peak_bytes

    def is_above(self, gathered: int) -> bool:
        """Whether the peak is above a micro-batch without these states, even if so much is gathered at its every moment."""
        n_bytes = self.element * gathered
        if _never(n_bytes - self.element * self.traces[0].persistent > self.missing):
            return True
        return self.peak is not None and not _never(self.peak.beside - self.missing + n_bytes <= self.peak.total)


def _never(condition: Bool) -> bool:
    return not (condition if isinstance(condition, bool) else condition.any())


class _Peak(NamedTuple):
    """The highest total of some moments, and the highest without gathered parameters. [bytes]"""

    total: int
    beside: int


def _peak(moments: Sequence[Entry]) -> _Peak | None:
    """Return the peak of a single job's moments; None for columns."""
    found, beside = totals_of(moments), totals_of(moments, Kind.GATHER)
    return None if found is None or beside is None else _Peak(max(found), max(beside))
