"""What tensor-parallel ranks send among themselves in a step under FSDP2."""

from zeroplan.engines.fsdp2.plan import FINAL_NORM, REDUCE, Plan
from zeroplan.ledger import Among, Collective, Phase
from zeroplan.numeric import Int
from zeroplan.spec.batch import Batch
from zeroplan.transformer.families.ending import PARALLEL
from zeroplan.transformer.families.sharded import GATHER, SCATTER

#: What the collectives of tensor-parallel ranks are said to carry.
ACTIVATIONS, ROWS, NORMS = "activations", "sums over the vocabulary", "gradients of norms"


def split_collectives(
    plan: Plan, batch: Batch, ranks: int, *, reductions: Int, embeds: bool = True, ends: bool = True, accumulated: bool = False
) -> tuple[Collective, ...]:  # fmt: skip
    """What tensor-parallel ranks send among themselves in one optimizer step.

    Each block gathers and scatters what its two branches read and make; a recomputation does so again, up to the last tensor that
    is needed: not what the MLP has made, unless it keeps the outputs of every second product and so runs to the end. A stage of a
    pipeline may have no embedding (``embeds``), or no head and loss (``ends``), and its gradients are ``accumulated`` when norms'
    are summed up. Torch 2.15 sums them in the reduction's dtype (``FSDPParam.may_reduce_grad_outside_dp``).
    """
    layers, passes = sum(plan.every_layer), batch.grad_accum_steps
    tokens = batch.micro_batch_size * batch.seq_len
    whole, e = tokens * plan.parameters[0].shape[1], plan.width.compute
    twice = sum(run.layers for run in plan.runs if not run.plain)
    again = {"none": (0, 0), "full": (2 * twice, twice), "selective": (2 * twice, 2 * twice)}[plan.recipe.recompute]
    before, after = 2 * layers + embeds, 2 * layers + ends
    norms, elements = _norms(plan)
    reduced = plan.reduce_bytes if accumulated or plan.cast_on_arrival else e

    def of(operation: str, phase: Phase, calls: Int, source: str) -> Collective:
        return _among(operation, ACTIVATIONS, phase, ranks, calls, whole, e, source)

    return (
        of("all_gather", Phase.FORWARD, passes * after, GATHER),
        of("reduce_scatter", Phase.FORWARD, passes * before, SCATTER),
        _among("all_reduce", ROWS, Phase.FORWARD, ranks, 3 * passes * ends, tokens, 4, PARALLEL),
        of("all_gather", Phase.BACKWARD, passes * (before + again[0]), GATHER),
        of("reduce_scatter", Phase.BACKWARD, passes * (after + again[1]), SCATTER),
        _among("all_reduce", NORMS, Phase.BACKWARD, ranks, reductions * norms, elements // norms, reduced, REDUCE)._replace(
            of_all=reductions * reduced * elements
        ),
    )


def _norms(plan: Plan) -> tuple[int, int]:
    """How many norms there are, and the elements of their weights, which every rank holds whole."""
    in_blocks = [(run.layers, one) for run in plan.runs for one in run.parameters]
    outside = [(1, one) for one in plan.parameters if one.name.startswith(FINAL_NORM)]
    found = [(layers, one.numel) for layers, one in (*in_blocks, *outside) if "norm" in one.name]
    return sum(layers for layers, _ in found), sum(layers * numel for layers, numel in found)


def _among(
    operation: str, what: str, phase: Phase, ranks: int, calls: Int, elements: Int, width: int, source: str
) -> Collective:  # fmt: skip
    times = 2 if operation == "all_reduce" else 1
    payload: Int = width * elements
    sent: Int = times * calls * (payload // ranks) * (ranks - 1)
    return Collective(
        operation, what, phase.value, ranks, calls, payload, sent, times * calls * elements, source, near=True, phase=phase,
        among=Among.TENSOR,
    )  # fmt: skip
