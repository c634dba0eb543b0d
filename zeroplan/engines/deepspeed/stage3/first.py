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
from itertools import chain
from typing import NamedTuple

from zeroplan.engines.deepspeed.notes import gathered_at_first, more_at_first, most_at_first, most_noted_at_first
from zeroplan.engines.deepspeed.offload import offloads_parameters
from zeroplan.engines.deepspeed.stage3.job import Job, pass_of
from zeroplan.engines.deepspeed.stage3.training import Beside, Taken, Training
from zeroplan.engines.optimizers import states_from_the_start
from zeroplan.engines.passes import Passes
from zeroplan.ledger import Kind, Line, total_bytes
from zeroplan.numeric import Bool, Int
from zeroplan.spec.batch import Batch
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.trace import Entry, Trace


def before_the_first_step(recipe: RecipeSpec, states: tuple[Line, ...]) -> tuple[Line, ...]:
    """Return the lines that exist before the first step, of weights, their copy for the optimizer, gradients and its states."""
    return states if states_from_the_start(recipe.optimizer) else states[:3]


def first_moments(
    jobs: tuple[Job, ...], batch: Batch, these: Passes, taken: Taken, *, held: tuple[Line, ...], made_later: tuple[Line, ...],
    later: Sequence[Entry],
) -> tuple[Entry, ...]:  # fmt: skip
    """Return the moments of the first micro-batch; none if it provably is not the peak.

    ``jobs``: the job with the trace of later micro-batches; ``taken``: each flush's memory beside its bucket; ``held``: the lines
    that exist from the start; ``made_later``: the optimizer's states that do not; ``later``: the moments of later micro-batches.
    """
    job, missing = jobs[0], total_bytes(made_later)
    alone = isinstance(job.n_ranks, int) and job.n_ranks == 1
    if job.recipe.forward_only or (alone and not offloads_parameters(job.recipe)):
        return ()
    one = pass_of(job.every, job.recipe, job.n_ranks)
    bound = most_at_first(one)
    if bound is not None and _never(job.element * (bound - job.trace.persistent) > missing):
        return ()
    peak = _peak(later)
    if bound is not None and _is_below(peak, job.element * bound, missing):
        return ()
    traces = tuple(each.trace for each in jobs if each.applies is not False)
    more = max(more_at_first(one, each) for each in traces)
    if _never(job.element * more > missing) or _is_below(peak, job.element * most_noted_at_first(one), missing):
        return ()
    trace = Trace()
    trace.hold("states", *held)
    first = job._replace(trace=gathered_at_first(one), applies=True, ends_step=batch.grad_accum_steps == 1)
    least = missing if isinstance(missing, int) else int(missing.min())
    spare = least // job.element + job.trace.persistent
    in_forward = all(job.element * more_at_first(one, each, of_blocks_in_forward=True) <= least for each in traces)
    Training(trace, first, these, taken, later=Beside(traces, spare, in_forward)).run()
    found = trace.finished()
    highest = None if peak is None else _peak(found)
    return () if peak is not None and highest is not None and highest.total <= peak.total else found


def _never(condition: Bool) -> bool:
    return not (condition if isinstance(condition, bool) else condition.any())


class _Peak(NamedTuple):
    """The highest total of some moments, and the highest without gathered parameters. [bytes]"""

    total: int
    beside: int


def _peak(moments: Sequence[Entry]) -> _Peak | None:
    """Return the peak of a single job's moments; None for columns."""
    keys = [tuple(map(id, entry.alive)) for entry in moments]
    groups = dict(zip(chain.from_iterable(keys), chain.from_iterable([entry.alive for entry in moments]), strict=True))
    totals, others = dict[int, Int](), dict[int, Int]()
    for known, lines in groups.items():
        total: Int = 0
        gathered: Int = 0
        for kind, n_bytes, *_ in lines:
            total = total + n_bytes
            gathered = gathered + n_bytes if kind is Kind.GATHER else gathered
        totals[known], others[known] = total, total - gathered
    if not set(map(type, totals.values())) <= {int}:
        return None
    highest, beside = (max([sum(map(each.__getitem__, key)) for key in keys]) for each in (totals, others))
    return _Peak(int(highest), int(beside))


def _is_below(peak: _Peak | None, gathered_bytes: int, missing: Int) -> bool:
    """Whether a single job's first micro-batch is below the peak even if so much is gathered at its every moment."""
    return peak is not None and not _never(peak.beside - missing + gathered_bytes <= peak.total)
