"""Bytes per element of parameters, gradients and optimizer state under each precision."""

from typing import NamedTuple

from zeroplan.spec.recipe import EVEN, LINEAR_KERNELS, Precision, RecipeSpec
from zeroplan.spec.releases import release_of
from zeroplan.transformer.blocks import Compute


class Widths(NamedTuple):
    """Element widths of one precision. [bytes]

    ``compute``: activations, and parameters while they compute; ``stored``: the parameters the optimizer updates;
    ``name``: the compute dtype.
    """

    compute: int
    stored: int
    name: str

    @property
    def mixed(self) -> bool:
        """Whether parameters compute in a narrower dtype than they are stored in."""
        return self.compute != self.stored


_WIDTHS: dict[str, Widths] = {
    "bf16-mixed": Widths(2, 4, "bf16"),
    "fp16-mixed": Widths(2, 4, "fp16"),
    "bf16": Widths(2, 2, "bf16"),
    "fp32": Widths(4, 4, "fp32"),
}


def widths(precision: Precision) -> Widths:
    """Return the element widths of a precision.

    >>> widths("bf16-mixed")
    Widths(compute=2, stored=4, name='bf16')
    """
    return _WIDTHS[precision]


def compute_of(recipe: RecipeSpec, *, tp: int = 1, ep: int = 1, cp: int = 1) -> Compute:
    """Return the settings with which an engine runs the module. DDP uses ``torch.autocast``, the others cast the weights.

    ``tp`` ranks split the module, ``ep`` ranks share its experts, ``cp`` ranks share a sequence.

    >>> compute_of(RecipeSpec(engine="ddp", zero_stage=0)).autocast, compute_of(RecipeSpec()).autocast
    (True, False)
    """
    width = widths(recipe.precision)
    autocast = recipe.engine == "ddp" and width.mixed
    by_kernels = (LINEAR_KERNELS,) if recipe.linear_attention == "kernels" else ()
    gathered = "-gathered" if recipe.fsdp2.float8_all_gather else ""
    return Compute(
        width.compute,
        autocast,
        recipe.attention,
        recipe.kernels,
        recipe.recompute,
        recipe.engine == "deepspeed" and recipe.zero_stage == 3,
        recipe.offload_activations,
        ep,
        tp,
        cp,
        recipe.engine == "fsdp2" and width.mixed,
        release_of(recipe.transformers),
        recipe.precision == "fp16-mixed" and recipe.kernels != "cpu",
        (*recipe.fused_parts, *by_kernels, *((f"float8-{recipe.float8_recipe}{gathered}",) if recipe.float8_recipe else ())),
        recipe.imbalance_in_thousandths if ep > 1 else EVEN,
        recipe.prompt_len,
        recipe.log_probs,
        recipe.padded,
        tp > 1 and not recipe.fsdp2.sequence_parallel,
    )
