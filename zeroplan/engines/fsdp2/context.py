"""The traffic among context-parallel ranks: keys and values, and their gradients."""

from zeroplan.engines.fsdp2.plan import Plan
from zeroplan.engines.fsdp2.traffic import KEYS
from zeroplan.ledger import Among, Collective, Phase
from zeroplan.numeric import Int
from zeroplan.spec.batch import Batch
from zeroplan.spec.mesh import Split
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.families.ring import BACKWARD, FORWARD


def exchanged(plan: Plan, batch: Batch, model: ModelSpec, mesh: Split) -> tuple[Collective, ...]:
    """Return the gathers of keys and values in forward, recomputation and backward, and the fp32 ring of their gradients.

    ``batch`` is one rank's. Each tensor-parallel rank has its heads, and exchanges them with the ranks that have the same
    heads. A selective recomputation keeps attention's outputs, and gathers nothing.
    """
    ranks, heads = int(mesh.cp), model.num_key_value_heads // int(mesh.tp)
    calls: Int = batch.grad_accum_steps * sum(plan.every_layer)
    elements = 2 * batch.micro_batch_size * batch.seq_len * heads * model.head_dim
    twice = sum(run.layers for run in plan.runs if not run.plain) if plan.recipe.recompute == "full" else 0
    again: Int = calls + batch.grad_accum_steps * twice
    payload: Int = plan.width.compute * ranks * elements
    each: Int = payload // ranks * (ranks - 1)
    round_trip: Int = 4 * elements
    return (
        Collective(
            "all_gather", KEYS, "forward", ranks, calls, payload, calls * each, calls * ranks * elements, FORWARD, near=True,
            phase=Phase.FORWARD, among=Among.SEQUENCE,
        ),
        Collective(
            "all_gather", KEYS, "backward", ranks, again, payload, again * each,
            again * ranks * elements, BACKWARD, near=True, among=Among.SEQUENCE,
        ),
        Collective(
            "all_to_all", f"gradients of {KEYS}", "backward", ranks, ranks * calls, round_trip, ranks * calls * round_trip,
            ranks * calls * elements, BACKWARD, near=True, among=Among.SEQUENCE,
        ),
    )  # fmt: skip
