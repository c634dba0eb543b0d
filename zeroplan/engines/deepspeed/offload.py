"""DeepSpeed's offload: which lines leave the GPU, and which recipes are refused."""

from zeroplan.errors import SpecError
from zeroplan.ledger import Line
from zeroplan.spec.recipe import OptimizerImpl, RecipeSpec


def refuse(recipe: RecipeSpec) -> None:
    """Raise SpecError for offload that DeepSpeed refuses or ignores, or that is not modelled."""
    options, stage = recipe.deepspeed, recipe.zero_stage
    if options.offload_param != "none" and stage != 3:
        raise SpecError(f"offload_param needs ZeRO stage 3; at stage {stage} every rank has all parameters")
    if options.offload_optimizer == "none":
        return
    if stage == 0:
        raise SpecError("offload_optimizer needs ZeRO stage 1, 2 or 3 with engine 'deepspeed'")
    if recipe.precision == "bf16":
        raise SpecError("precision 'bf16' with offload_optimizer is not modelled; use 'bf16-mixed'")
    if not options.compute_grad_norm:
        raise SpecError("compute_grad_norm=False with offload_optimizer is refused by DeepSpeed; leave one of them out")


def offloads_optimizer(recipe: RecipeSpec) -> bool:
    """Whether the optimizer's weights, gradients and states are in host memory, where the CPU runs the step."""
    return recipe.deepspeed.offload_optimizer != "none"


def offloads_parameters(recipe: RecipeSpec) -> bool:
    """Whether this rank's shard of the weights is in host memory."""
    return recipe.deepspeed.offload_param != "none"


def kept_as(recipe: RecipeSpec, impl: OptimizerImpl) -> OptimizerImpl:
    """Return the implementation that decides on states. The host's has no step counters on a GPU, a fused one has."""
    return "forloop" if offloads_optimizer(recipe) else impl


def on_host(line: Line) -> Line:
    """Return the GPU's line for a tensor in host memory: 0 bytes."""
    return line._replace(n_bytes=0, reason=f"{line.reason}, offloaded", formula="0")


def note(recipe: RecipeSpec) -> tuple[str, ...]:
    """Return the note on the location of states and parameters."""
    place = {"none": "on the GPU", "cpu": "in host memory", "nvme": "on NVMe, but for what has room in host memory"}
    places = [
        words
        for words, offloaded in (
            (
                f"the optimizer's weights, gradients and states are {place[recipe.deepspeed.offload_optimizer]}; the CPU steps",
                offloads_optimizer(recipe),
            ),
            (
                f"this rank's share of the parameters is {place[recipe.deepspeed.offload_param]}",
                offloads_parameters(recipe),
            ),
        )
        if offloaded
    ]
    return ("; ".join(places),) if places else ()
