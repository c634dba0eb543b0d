"""Which gradients in 16 bits has a backward of nanotron made so far? Its end adds them up in fp32."""

from zeroplan.engines.megatron.chunks import layers_of_a_checkpoint, runs_of
from zeroplan.engines.megatron.parameters import elements_of, ends_of, has_tied_head, table_of
from zeroplan.engines.megatron.rank import Rank, kinds_backward
from zeroplan.ledger import Kind, Line
from zeroplan.numeric import Int
from zeroplan.spec.described import Job

NANOTRON = "nanotron 2411b022, optim/gradient_accumulator.py, FP32GradientAccumulator.backward, and trainer.py, _init_model"


def made_gradients(rank: Rank, job: Job) -> dict[str, Int]:
    """Return the gradients in 16 bits that a backward has made, by moment: of the head, of each kind's first layer, end. [elements]

    The gradients of a running layer are counted whole. At the end an untied embedding has none yet. With several chunks of layers
    or a hybrid pattern, all are counted at every moment, which is the most.
    """
    recipe = job.recipe
    if not recipe.megatron.gradients_beside or not recipe.megatron.main_weights:
        return {}
    order, (embedding, end) = kinds_backward(rank, job), ends_of(job)
    kinds, tied = dict.fromkeys(order), table_of(job) if has_tied_head(job) else 0
    everything = rank.elements + rank.experts
    if len(rank.each) > 1 or recipe.megatron.hybrid_layer_pattern is not None:
        return dict.fromkeys(("head", *kinds, "end"), everything)
    made = {"head": end + tied if rank.has_head else 0}
    for kind in kinds:
        done = order[: order.index(kind) + layers_of_a_checkpoint(recipe)]
        counts = tuple(done.count(run.kind) for run in runs_of(job))
        beside, experts, _ = elements_of(job, counts)
        made[kind] = made["head"] + beside + experts
    return {**made, "end": everything - (embedding if rank.at == 0 and not has_tied_head(job) else 0)}


def made_lines(at: str, rank: Rank, job: Job) -> tuple[Line, ...]:
    """Return the line of these gradients at a moment of the backward, if there are any. [bytes]"""
    made = made_gradients(rank, job)
    reason = "gradients in 16 bits, until the backward of the micro-batch ends"
    return (Line(Kind.UNSHARDED_GRADIENTS, 2 * made[at], reason, f"2·A_{at}", NANOTRON),) if made else ()
