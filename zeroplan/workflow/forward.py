"""The memory of a forward without gradients, for scoring models and teachers.

A block needs the same memory as in a checkpoint's forward, which saves nothing either. The head is TRL's, which computes
log-probabilities in tiles.
"""

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

from zeroplan.engines.precisions import compute_of
from zeroplan.estimator import Estimate, estimate
from zeroplan.ledger import Kind, Line, Moment, Phase
from zeroplan.spec.job import JobSpec
from zeroplan.transformer.head import named_embeddings, scored_forward

_STATES = frozenset({Kind.GRADIENTS, Kind.OPTIMIZER_STATE, Kind.UNSHARDED_GRADIENTS, Kind.REDUCE, Kind.OPTIMIZER_TEMPORARY})
_OF_WEIGHTS = frozenset({Kind.PARAMETERS, Kind.WEIGHT_CASTS, Kind.GATHER, Kind.UNSHARDED_PARAMETERS})


class Forward(NamedTuple):
    """The peak of a forward without gradients."""

    moment: str
    lines: tuple[Line, ...]
    """The memory of the forward itself, without resident parameters."""


def without_gradients(
    job: JobSpec, weights: tuple[Line, ...] | None = None, *, head: bool = True, at_head: tuple[Line, ...] = ()
) -> Forward:
    """Return the peak of a forward of the job's model without gradients that computes log-probabilities. [bytes]

    ``weights``: the gathered weights, instead of those that the job's engine gathers. Without a ``head`` the forward ends with the
    last norm; ``at_head``: further lines while the head computes.
    """
    recipe = replace(job.recipe, recompute="full", recompute_layers=None, keep_logits=False)
    answer = estimate(replace(job, recipe=recipe, batch=replace(job.batch, grad_accum_steps=1)))
    named = named_embeddings(job.model, compute_of(job.recipe), job.batch)
    moments = [_unsaved(moment, named) for moment in answer.engine_moments if moment.phase is Phase.FORWARD]
    moments += [_of_the_head(answer, at_head)] if head else []
    if weights is not None:
        moments = [moment._replace(lines=_reading(moment.lines, weights)) for moment in moments]
    highest = max(moments, key=lambda one: one.total_bytes)
    return Forward(highest.name, tuple(line for line in highest.lines if line.kind is not Kind.PARAMETERS))


def _reading(lines: tuple[Line, ...], weights: tuple[Line, ...]) -> tuple[Line, ...]:
    return (*(line for line in lines if line.kind is Kind.PARAMETERS or line.kind not in _OF_WEIGHTS), *weights)


def _unsaved(moment: Moment, named: tuple[Line, ...]) -> Moment:
    """The moment without training states and without the blocks' saved tensors.

    After the first block a variable still holds the embeddings. In training, the block's checkpoint counts as their holder.
    """
    kept = tuple(line for line in moment.lines if line.kind not in _STATES and not line.tag.blocks)
    is_first = not any(line.n_bytes for line in moment.lines if line.tag.blocks)
    return moment._replace(lines=kept if is_first else (*kept, *named))


def _of_the_head(answer: Estimate, beside: tuple[Line, ...]) -> Moment:
    job = answer.job
    loss = next(moment for moment in answer.engine_moments if moment.of_forward and moment.phase is Phase.LOSS)
    weights = tuple(line for line in loss.lines if line.kind in _OF_WEIGHTS)
    made = scored_forward(job.model, compute_of(job.recipe), job.batch)
    return Moment("log-probabilities", Phase.LOSS, (*weights, *made, *beside))


def held_after_forward(answer: Estimate) -> tuple[Line, ...]:
    """Return the lines alive between forward and backward of a training step: states and saved tensors. [bytes]

    They are alive both in the loss's forward and in the loss's backward. The backward moment with most lines in common counts.
    Logits that stay through the whole backward (``keep_logits``) have another reason in the forward, and count too.
    """
    moments = answer.engine_moments
    at = next(at for at, one in enumerate(moments) if one.of_forward and one.phase is Phase.LOSS)
    backward = [Counter(one.lines) for one in moments[at + 1 :] if not one.of_forward and one.phase is not Phase.STEP]
    forward = Counter(moments[at].lines)
    shared = max((forward & one for one in backward), key=lambda lines: lines.total())
    stay = (line for line in backward[0] if line.kind is Kind.LOGITS and all(line in one for one in backward))
    return (*shared.elements(), *(line for line in stay if line not in shared))
