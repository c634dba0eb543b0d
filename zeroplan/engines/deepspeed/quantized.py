"""Where do ZeRO++'s quantized weights (qwZ) work, and what do they depend on? What a gather then takes is in ``gathers.py``.

Source: Wang et al. 2023 (arXiv:2306.10209), section 3.1.
"""

from zeroplan.engines.deepspeed.gathers import Sharing
from zeroplan.engines.deepspeed.offload import offloads_parameters
from zeroplan.engines.precisions import widths
from zeroplan.errors import SpecError
from zeroplan.numeric import Int
from zeroplan.spec.recipe import RecipeSpec


def refuse_quantized(recipe: RecipeSpec) -> None:
    """Refuse what DeepSpeed does not take, and what is not modelled."""
    options = recipe.deepspeed
    if not options.zero_quantized_weights:
        return
    if recipe.zero_stage != 3:
        raise SpecError(f"zero_quantized_weights needs ZeRO stage 3; leave it out at stage {recipe.zero_stage}")
    if options.offloads:
        raise SpecError("zero_quantized_weights with offload is not modelled; leave one of them out")


def sharing_of(recipe: RecipeSpec, n_ranks: Int) -> Sharing:
    """What of the ranks a gather depends on; refuses a column of several numbers of them where it does depend on those."""
    quantized, copied = recipe.deepspeed.zero_quantized_weights, offloads_parameters(recipe)
    if not quantized and not copied:
        return Sharing()
    ranks = n_ranks if isinstance(n_ranks, int) else int(n_ranks.min())
    if not isinstance(n_ranks, int) and ranks != n_ranks.max():
        raise SpecError(
            "gathers of quantized or offloaded parameters depend on the number of ranks; ask for one number after the other"
        )
    if not quantized or ranks == 1:
        return Sharing(ranks, copied)
    return Sharing(ranks, copied, widths(recipe.precision).compute, half=recipe.precision == "fp16-mixed")
