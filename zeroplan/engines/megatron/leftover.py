"""How many bytes are the hidden states that schedule and graphs keep although nothing needs them any more?"""

from zeroplan.engines.megatron.chunks import Behind, chunks_per_rank, layers_of_a_checkpoint, left_behind, runs_of
from zeroplan.engines.megatron.rank import Rank
from zeroplan.engines.megatron.schedule import Left, Stage, left_lines, left_of, lines_of, own_state
from zeroplan.ledger import Line
from zeroplan.numeric import Int, ceil_div, maximum, minimum
from zeroplan.spec.described import Job
from zeroplan.transformer.megatron import ROUTED
from zeroplan.transformer.params import is_frozen

DISPATCHER = "Megatron-LM 2026-08, megatron/core/transformer/moe/token_dispatcher.py, dispatch_preprocess"
LEAF = "mcore-bridge 1.6.5, model/gpt_model.py, GPTModel._preprocess"
_EMBEDDED = "the frozen embedding's output and its gradient, of the micro-batch before"
GRAPHS = "inputs of layers with experts and their gradients, until these run again"


def left_by_schedule(rank: Rank, job: Job) -> dict[str, tuple[Line, ...]]:
    """Return the lines of the hidden states that the schedule keeps, by the names of :class:`Left`. [bytes]"""
    return left_lines(left_by(rank, job), job)


def left_by_graphs(rank: Rank, job: Job) -> dict[str, tuple[Line, ...]]:
    """Return the lines of the hidden states that dispatchers' graphs keep, by the names of :class:`Behind`. [bytes]"""
    counts = behind_by(rank, job)._asdict()
    found = lines_of(counts, "J", GRAPHS, DISPATCHER, own_state(job))
    if rank.at == 0 and is_frozen(job.model, "embedding"):
        for when, lines in _embedded(job).items():
            found[when] = (*found[when], *lines)
    return found


def _embedded(job: Job) -> dict[str, tuple[Line, ...]]:
    """Return the lines of a frozen embedding's output and its gradient, which a micro-batch's graph keeps. [bytes]

    The schedule refers to that graph until the next micro-batch's forward returns, and dispatchers do until their layer runs again.
    """
    own, later = own_state(job), minimum(1, job.batch.grad_accum_steps - 1)
    dispatched = int(job.model.moe is not None and job.recipe.recompute != "full")
    counts: dict[str, Int] = {"forward": 2 * maximum(dispatched, later), "loss": 2 * later, "step": 2 * dispatched}
    several = {"forward": "2" if dispatched else "2·min(1, B-1)", "loss": "2·min(1, B-1)", "step": "2"}
    return {
        when: tuple(line._replace(formula=f"{several[when]}·{own[1]}") for line in lines)
        for when, lines in lines_of(counts, "", _EMBEDDED, LEAF, own).items()
    }


def left_by(rank: Rank, job: Job) -> Left:
    """Return how many hidden states the pipeline's schedule keeps longer than it needs them."""
    pp = int(job.mesh.pp)
    group = job.recipe.megatron.microbatch_group_size_per_virtual_pipeline_stage or pp
    stage = Stage(rank.at, pp, chunks_per_rank(job), job.batch.grad_accum_steps, group)
    return left_of(stage, overlapped=job.recipe.megatron.overlap_p2p_comm)


def behind_by(rank: Rank, job: Job) -> Behind:
    """Return how many hidden states the token dispatchers' graphs keep after full recomputation."""
    if job.recipe.recompute != "full" or job.model.moe is None:
        return Behind()
    kinds, together = [run.kind in ROUTED for run in runs_of(job)], layers_of_a_checkpoint(job.recipe)
    layers = tuple(sum(ceil_div(count, together) for count in counts) for counts in rank.each)
    routed = tuple(
        sum(ceil_div(count, together) for count, has in zip(counts, kinds, strict=True) if has) for counts in rank.each
    )
    found = left_behind(rank.schedule, layers, routed, job.batch.grad_accum_steps, received=not rank.has_head)
    given = [chunk for chunk in range(len(layers)) if rank.at or chunk]  # ``left_by`` counts the inputs of these chunks
    return found._replace(step=found.step - sum(routed[chunk] == layers[chunk] > 0 for chunk in given))
