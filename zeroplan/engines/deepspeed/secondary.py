"""ZeRO++'s hierarchical partitioning (hpZ) at stage 3 of DeepSpeed: its memory and traffic.

When a parameter is released, a second partition of it stays, split over the few ranks of a group. They gather it from there
until the optimizer changes it. Source: Wang et al. 2023 (arXiv:2306.10209), section 3.2; DeepSpeed 0.19.8,
``_partition_param_sec``.
"""

from zeroplan.engines.formulas import times
from zeroplan.errors import SpecError
from zeroplan.ledger import Collective, Kind, Line
from zeroplan.numeric import Int
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.recipe import RecipeSpec

_SECOND = "DeepSpeed 0.19.8, runtime/zero/partition_parameters.py, _partition_param_sec"


def refuse_second(recipe: RecipeSpec, mesh: Mesh) -> None:
    """Raise SpecError for second partitions that DeepSpeed refuses or that are not modelled."""
    size = recipe.deepspeed.zero_hpz_partition_size
    if size == 1:
        return
    if recipe.zero_stage != 3:
        raise SpecError(f"zero_hpz_partition_size={size} needs ZeRO stage 3; leave it out at stage {recipe.zero_stage}")
    if recipe.deepspeed.offloads:
        raise SpecError(f"zero_hpz_partition_size={size} with offload is not modelled; leave one of them out")
    if isinstance(mesh.dp_shard, int) and mesh.dp_shard % size:
        raise SpecError(f"zero_hpz_partition_size={size} does not divide the {mesh.dp_shard} ranks; use a divisor of them")


def second_partition(recipe: RecipeSpec, element: int, share: Int, n_ranks: Int) -> tuple[Line, ...]:
    """Return the second partition of all parameters, which exists when the optimizer steps. [bytes]

    ``share``: elements of one rank's shard of all parameters.
    """
    size = recipe.deepspeed.zero_hpz_partition_size
    if size == 1:
        return ()
    formula = f"{times(element, 'G_r')}·N/{size}"
    reason = "second partition of the weights, split over the ranks of a group (hpZ)"
    return (Line(Kind.GATHER, element * share * n_ranks // size, reason, formula, _SECOND),)


def within_group(recipe: RecipeSpec, call: Collective, micro: Int, *, forward: bool) -> tuple[Collective, ...]:
    """Return a pass's gathers: within the group, but for the first forward of a step, which gathers from all ranks.

    Leaves out that a step's first forward finds other parameters still gathered than later ones: all passes count as equal.
    """
    size = recipe.deepspeed.zero_hpz_partition_size
    if size == 1:
        return (call,)
    elements, payload = call.volume_elements, call.payload_bytes
    sent = (size - 1) * payload // size
    inside = call._replace(group=size, sent_bytes=sent, what=f"{call.what}, within {size} ranks", near=True)
    if not forward:
        return (inside,)
    first = call._replace(
        calls=call.calls // micro,
        sent_bytes=call.sent_bytes // micro,
        volume_elements=elements // micro,
        of_all=payload // micro,
    )
    later = inside._replace(
        calls=inside.calls - first.calls,
        sent_bytes=sent - sent // micro,
        volume_elements=elements - elements // micro,
        of_all=payload - payload // micro,
    )
    return first, later
