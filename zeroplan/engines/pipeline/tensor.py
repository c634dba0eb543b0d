"""A pipeline stage on tensor-parallel ranks: DTensor's differences while gradients accumulate until the step ends.

Hidden states go from stage to stage sharded along the sequence, from each rank to the rank with the same shard (torchtitan:
stages take and return local tensors). A vocabulary-parallel embedding's gradient stays whole on every rank until it is reduced
(torch 2.13, ``torch/distributed/fsdp/_fully_shard/_fsdp_param.py``, ``_get_grad_inner_tensor``).
"""

from zeroplan.engines.formulas import product
from zeroplan.engines.fsdp2.groups import Group
from zeroplan.engines.fsdp2.plan import ACCUMULATE, REDUCE, Plan
from zeroplan.ledger import Kind, Line, Moment, Phase
from zeroplan.trace import Trace
from zeroplan.transformer.blocks import AtEmbedding
from zeroplan.transformer.families.tags import HELD_NORM


def whole_embedding(plan: Plan) -> int:
    """Return the elements by which the embedding's unreduced gradient exceeds this rank's shard of it."""
    return (
        0 if plan.at_embedding is None else int(plan.at_embedding.whole.n_bytes) // plan.width.compute - plan.embedding_elements
    )


def elements_of(plan: Plan, group: Group) -> int:
    """Return the elements of a unit's unreduced gradients outside the blocks; the first unit has the embedding."""
    return group.numel + (whole_embedding(plan) if group is plan.trained_outside[0] else 0)


def embedding_backward(at: AtEmbedding, trace: Trace, flow: Line) -> None:
    """Gather the gradient of the embedding's output, and make the whole embedding's gradient from it."""
    trace.at("backward of the embedding: gathering", Phase.BACKWARD)
    trace.put("gathered gradient", at.gathered)
    trace.pass_by(at.by_rank, flow)
    trace.at("backward of the embedding", Phase.BACKWARD)
    trace.pass_by(at.whole)
    trace.drop("gathered gradient")


def taking_its_share(plan: Plan, alive: tuple[Line, ...]) -> Moment:
    """Return the moment when a rank copies its shard of the embedding's gradient, while the root group is still unsharded."""
    reduced, (group, *_) = plan.reduce_bytes, plan.outside
    unsharded, gradients = plan.width.compute * group.padded, elements_of(plan, plan.trained_outside[0])
    share = reduced * plan.embedding_elements
    lines = (
        Line(Kind.UNSHARDED_PARAMETERS, unsharded, "the root group, unsharded", product(1, unsharded), REDUCE),
        Line(Kind.UNSHARDED_GRADIENTS, reduced * gradients, "the root group's, of the whole embedding",
             product(reduced, gradients), ACCUMULATE),
        Line(Kind.UNSHARDED_GRADIENTS, share, "this rank's share of the embedding's", product(1, share), REDUCE),
    )  # fmt: skip
    return Moment("reducing the root group: this rank's share", Phase.BACKWARD, (*alive, *lines))


def head_forward(plan: Plan, by_rank: Line, trace: Trace) -> None:
    """Gather the final norm's output along the sequence, then make this rank's logits. A variable holds this rank's shard."""
    named = tuple(line for line in plan.head.loss_forward if line.tag == HELD_NORM)
    trace.at("head, forward: gathering", Phase.FORWARD)
    trace.pass_by(*named, by_rank)
    trace.at("head, forward", Phase.FORWARD)
    trace.pass_by(*named, *plan.head.output)
