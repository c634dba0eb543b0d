"""The moments of the forward under ZeRO-3: of each kind of block the last one, and earlier ones where more is gathered."""

from collections.abc import Iterator
from functools import lru_cache

from zeroplan.engines.deepspeed.notes import rising
from zeroplan.engines.deepspeed.stage3.job import Job, gathered_line
from zeroplan.engines.passes import (
    Passes,
    RunPass,
    before_experts_instant,
    forward_instant,
    head_forward_instant,
    head_gathering_instant,
    loss_instant,
    norm_instants,
)
from zeroplan.ledger import Moment


def forward_moments(job: Job, these: Passes) -> tuple[Moment, ...]:
    """Return the moments of the forward: of each kind of block the last one, and earlier ones where more is gathered."""
    moments: list[Moment] = []
    for run in these.runs:
        for block, held in _highest_forward(job.trace.forward, run.first, run.n_blocks):
            at = forward_instant(these, run, block)
            moments.append(Moment(at.name, at.phase, (*at.lines, gathered_line(job, held))))
        if job.trace.before_experts[run.first]:
            moments += _experts_first_gathered(job, these, run)
    before, head, loss = head_gathering_instant(these), head_forward_instant(these), loss_instant(these)
    return (
        *moments,
        *(Moment(at.name, at.phase, (*at.lines, gathered_line(job, job.trace.norm_forward))) for at in norm_instants(these)),
        Moment(before.name, before.phase, (*before.lines, gathered_line(job, job.trace.head_gathering))),
        Moment(head.name, head.phase, (*head.lines, gathered_line(job, job.trace.head_forward))),
        Moment(loss.name, loss.phase, (*loss.lines, gathered_line(job, job.trace.loss)), of_forward=True),
    )


def _experts_first_gathered(job: Job, these: Passes, run: RunPass) -> Iterator[Moment]:
    """Return the moments at which experts are gathered for their forward, before they have made anything."""
    for block, held in _highest_forward(job.trace.before_experts, run.first, run.n_blocks):
        at = before_experts_instant(these, run, block)
        yield Moment(at.name, at.phase, (*at.lines, gathered_line(job, held)))


@lru_cache(maxsize=256)
def _highest_forward(most: tuple[int, ...], first: int, n_blocks: int) -> tuple[tuple[int, int], ...]:
    """Return the last block, and earlier ones where more is gathered in the forward; with the elements gathered."""
    return rising(first, n_blocks, lambda block: most[block])
