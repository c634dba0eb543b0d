"""How much do collectives add to a step, given what each engine lets go on beside its computing?"""

from typing import NamedTuple

from zeroplan.engines.fsdp2.traffic import EXPERTS, KEYS, REPLICAS, ROOT
from zeroplan.ledger import Collective
from zeroplan.numeric import Float, Int, longest, shortest
from zeroplan.spec.batch import Batch
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.steptime.compute import Computing
from zeroplan.steptime.links import (
    SOURCE,
    Group,
    Links,
    crosses,
    neighbours,
    seconds,
    strided,
    to_the_next,
)
from zeroplan.steptime.parts import Part


class _Sent(NamedTuple):
    """What goes over the links in one window of the step. [s]"""

    inside: Float = 0.0
    """On the links within a node."""
    across: Float = 0.0
    """Over the network."""
    bare: Float = 0.0
    """Of both, what has nothing to hide behind."""

    @property
    def takes(self) -> Float:
        return longest(self.inside, self.across)

    def and_of(self, time: Float, group: Group, bare: Float) -> "_Sent":
        """Add a collective, which goes over one of the two links."""
        over = crosses(group)
        return _Sent(self.inside + (1 - over) * time, self.across + over * time, self.bare + bare)


def exposed(
    calls: tuple[Collective, ...], model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch, here: Links, busy: Computing
) -> tuple[Part, ...]:
    """The parts of a step in which a GPU waits for others, in forward, backward and after it. [s]

    Traffic within nodes and between them goes on at once, in different groups.
    """
    passes = batch.grad_accum_steps
    windows = {"forward": _Sent(), "backward": _Sent(), "step": _Sent()}
    for call in calls:
        group = group_of(call, recipe, mesh, here)
        time = _time(call, group, model, recipe, here)
        window, bare = _placed(call, recipe)
        windows[window] = windows[window].and_of(time, group, _uncovered(time, call, bare, passes))
    beside = {
        "forward": busy.forward_s,
        "backward": busy.backward_s * _share_beside(recipe, passes),
        "step": 0.0 * busy.forward_s,
    }
    return tuple(_part(name, windows[name], beside[name]) for name in windows)


_NAMES = {
    "forward": ("waiting for all-gathers in forward", "gathered ahead of the block that needs it"),
    "backward": ("waiting for collectives in backward", "gathered ahead, reduced behind"),
    "step": ("collectives around the optimizer step", "nothing goes on beside it"),
}


def _part(name: str, sent: _Sent, beside: Float) -> Part:
    takes = sent.takes
    waits = longest(takes - beside, shortest(sent.bare, takes))
    title, reason = _NAMES[name]
    return Part(title, waits, takes - waits, reason, SOURCE)


def group_of(call: Collective, recipe: RecipeSpec, mesh: Mesh, here: Links) -> Group:
    """Where a collective's ranks are: those that split the model are neighbours, those of a sequence and of shards ``tp`` apart."""
    if recipe.engine == "fsdp2" and call.what.endswith(KEYS):
        shared = strided(call.group, mesh.tp, here.per_node)
        return to_the_next(shared) if call.operation == "all_to_all" else shared
    if recipe.engine != "fsdp2" or call.near:
        return neighbours(call.group, here.per_node)
    if EXPERTS in call.what and not call.what.startswith(REPLICAS):
        return strided(call.group, mesh.ep, here.per_node)
    stride = mesh.tp * mesh.cp * mesh.dp_shard if call.what.startswith(REPLICAS) else mesh.tp
    return strided(call.group, stride, here.per_node)


def _time(call: Collective, group: Group, model: ModelSpec, recipe: RecipeSpec, here: Links) -> Float:
    """Time of a collective; DDP's, which stands for as many as there are buckets, has the latency of each."""
    if recipe.engine == "ddp" and call.what.startswith("gradients"):
        from zeroplan.engines.ddp import bucket_count  # noqa: PLC0415  the others' answers need not wait for it

        buckets = bucket_count(model, 4)
        return seconds(call._replace(calls=buckets * call.calls), group, here)
    return seconds(call, group, here)


def _placed(call: Collective, recipe: RecipeSpec) -> tuple[str, str]:
    """The window of the step a collective is in, and what of it hides: ``none``, all but the ``first`` call or a ``bucket``."""
    when = call.when
    if "step" in when:
        return "step", "none"
    window = "forward" if "forward" in when else "backward"
    if call.operation == "all_to_all":
        return window, "none"  # the experts wait for their tokens
    if recipe.engine == "fsdp2" and call.near:
        return window, "none"  # the next matrix waits for it
    if recipe.engine == "fsdp2":
        return window, "none" if ROOT in call.what else "first"
    if recipe.engine == "ddp":
        return (window, "bucket") if window == "backward" else (window, "none")
    return window, "first" if _hides(call, recipe) else "none"


def _hides(call: Collective, recipe: RecipeSpec) -> bool:
    """Whether DeepSpeed lets a collective of a pass go on beside the computing.

    Source: DeepSpeed 0.19, runtime/zero/partitioned_param_coordinator.py, ``fetch_sub_module``, which gathers ahead for a bucket
    that is not of size 0 alone.
    """
    options = recipe.deepspeed
    if call.operation == "all_gather":
        return options.stage3_prefetch_bucket_size > 0 or options.stage3_allgather_sequential or recipe.zero_stage < 3
    return recipe.zero_stage == 3 if options.overlap_comm is None else options.overlap_comm


def _uncovered(time: Float, call: Collective, bare: str, passes: Int) -> Float:
    """Of a collective's time what nothing can hide."""
    if bare == "none":
        return time
    if bare == "bucket":  # the last, which is reduced when the backward is over
        from zeroplan.engines.ddp import BUCKET_BYTES  # noqa: PLC0415  the others' answers need not wait for it

        return time * (1.0 * BUCKET_BYTES / longest(1.0 * call.n_bytes, 1.0 * BUCKET_BYTES))
    return time * (passes / longest(1.0 * call.calls, 1.0 * passes))


def _share_beside(recipe: RecipeSpec, passes: Int) -> Float:
    """Share of the step's backwards beside which gradients are reduced: all, or the last micro-batch's."""
    if recipe.sync_every_micro_batch and not (recipe.engine == "deepspeed" and recipe.zero_stage < 2):
        return 1.0
    if recipe.engine == "fsdp2":  # parameters are gathered in every backward
        return 1.0
    return 1.0 / passes
