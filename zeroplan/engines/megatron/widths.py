"""How many bytes does a parameter take: its weight, gradient and fp32 copy, and temporary copies in the step?"""

from typing import NamedTuple

from zeroplan.errors import SpecError
from zeroplan.spec.megatron import PRECISIONS
from zeroplan.spec.recipe import Precision, RecipeSpec

#: Megatron-FSDP's stages: ``optim_grads`` and ``optim_grads_params``.
GRADIENTS_TOO, WEIGHTS_TOO = 2, 3


class Bytes(NamedTuple):
    """Bytes per parameter."""

    weight: int
    gradient: int
    """In the buffer that accumulates the gradients of all micro-batches."""
    master: int
    """The optimizer's copy of the weights in fp32."""
    at_step: int
    """Temporary fp32 copies: of fp16 gradients, or of the precision-aware optimizer's narrow states."""
    name: str


_NARROW = Bytes(2, 2, 4, 4, "bf16")
"""bf16 with ``--grad-reduce-in-bf16``."""
_WITHOUT_MAIN_WEIGHTS = Bytes(2, 2, 0, 0, "bf16")
"""bf16 in nanotron without ``accumulate_grad_in_fp32``."""
_BYTES: dict[Precision, Bytes] = {
    "bf16-mixed": Bytes(2, 4, 4, 0, "bf16"),
    "fp16-mixed": Bytes(2, 2, 4, 4, "fp16"),
    "fp32": Bytes(4, 4, 0, 0, "fp32"),
}
WIDTHS = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}


def bytes_of(recipe: RecipeSpec) -> Bytes:
    """Return the bytes per parameter. Raises SpecError for a precision that is not modelled.

    A search calls this before it builds jobs; the check of a job refuses the same precisions.
    """
    options = recipe.megatron
    if recipe.precision not in _BYTES:
        known = ", ".join(PRECISIONS)
        raise SpecError(f"engine 'megatron' with precision {recipe.precision!r} is not modelled; use one of {known}")
    if options.use_precision_aware_optimizer:
        return _aware(recipe)
    if not options.main_weights:
        return _WITHOUT_MAIN_WEIGHTS
    found = _NARROW if recipe.precision == "bf16-mixed" and options.grad_reduce_in_bf16 else _BYTES[recipe.precision]
    return found._replace(master=4) if recipe.zero_stage >= GRADIENTS_TOO else found  # Megatron-FSDP also copies fp32 weights


def _aware(recipe: RecipeSpec) -> Bytes:
    """Return the bytes per parameter with the precision-aware optimizer.

    During the step it casts moments and main weights that are not fp32 to fp32. Two bf16 moments stay as they are.
    """
    options, plain = recipe.megatron, _BYTES[recipe.precision]
    narrow = recipe.precision == "fp16-mixed" or options.grad_reduce_in_bf16 or options.main_grads_dtype == "bf16"
    if options.optimizer_offload_fraction:  # HybridDeviceOptimizer: fp32 states, and fp32 copies of narrow gradients
        return plain._replace(gradient=2 if narrow else 4, master=4, at_step=4 * narrow)
    # with FP8 weights that have scales of their own the main weights are whole (use_precision_aware_optimizer_no_fp8_or_ds_fp8)
    whole = options.fp8_format is not None and options.fp8_recipe != "delayed"
    halved = (recipe.precision == "bf16-mixed" and not whole) or options.main_params_dtype == "fp16"
    moments = (options.exp_avg_dtype, options.exp_avg_sq_dtype)
    widened = 0 if moments == ("bf16", "bf16") else sum(dtype != "fp32" for dtype in moments)
    widened += options.main_params_dtype != "fp32"
    return plain._replace(gradient=2 if narrow else 4, master=2 if halved else 4, at_step=4 * widened)
