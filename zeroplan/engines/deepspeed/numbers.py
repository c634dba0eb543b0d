"""The scalars that DeepSpeed's ranks all-reduce in a step: a gradient norm, an overflow flag."""

from zeroplan.engines.deepspeed.gradients import collects
from zeroplan.ledger import Collective, Phase
from zeroplan.numeric import Int
from zeroplan.spec.recipe import RecipeSpec

_WHEN = "optimizer step"
_NORM = "gradient norm, one number"
_FLAG = "whether a gradient overflowed, one byte"
_ZERO = "DeepSpeed 0.19.8, runtime/zero"
_CLIP = "DeepSpeed 0.19.8, runtime/utils.py, clip_grad_norm_"


def numbers_unsharded(recipe: RecipeSpec, ranks: Int) -> tuple[Collective, ...]:
    """Return the scalars of stages 0 to 2: a 16-bit flag, and an fp32 norm if enabled. ``BF16_Optimizer`` needs neither.

    At stage 0 gradients are whole, so only plain fp32 training computes a norm, and only to clip gradients.
    """
    if recipe.zero_stage == 0:
        asks = recipe.precision == "fp32" and recipe.deepspeed.compute_grad_norm
        return (_reduced(_NORM, ranks, 1, 4, _CLIP),) if asks else ()
    if collects(recipe):
        return ()
    flag = _reduced(_FLAG, ranks, 1, 1, f"{_ZERO}/stage_1_and_2.py, has_overflow")
    groups = 2 if recipe.optimizer == "muon" else 1
    norm = _reduced(_NORM, ranks, groups, 4, f"{_ZERO}/stage_1_and_2.py, get_grad_norm_direct")
    return (
        *((flag,) if recipe.precision != "fp32" else ()),
        *((norm,) if recipe.deepspeed.compute_grad_norm else ()),
    )


def numbers_sharded(recipe: RecipeSpec, ranks: Int, groups: Int) -> tuple[Collective, ...]:
    """Return the scalars of stage 3: a flag in fp16 only, and always a norm of every one of ``groups`` sub-groups.

    The norm is in fp64, or in fp32 if the host has the gradients.
    """
    flag = _reduced(_FLAG, ranks, 1, 1, f"{_ZERO}/stage3.py, has_overflow")
    on_host = recipe.deepspeed.offload_optimizer != "none"
    how = "complete_grad_norm_calculation_for_cpu_offload" if on_host else "get_grad_norm_direct"
    norm = _reduced("gradient norm of a sub-group, one number", ranks, groups, 4 if on_host else 8, f"{_ZERO}/stage3.py, {how}")
    return (flag, norm) if recipe.precision == "fp16-mixed" else (norm,)


def _reduced(what: str, ranks: Int, calls: Int, n_bytes: int, source: str) -> Collective:
    """Return the all-reduce of a scalar, which is no part of the ZeRO paper's volume."""
    return Collective("all_reduce", what, _WHEN, ranks, calls, n_bytes, 2 * (ranks - 1) * n_bytes * calls // ranks, 0, source,
                      phase=Phase.STEP)  # fmt: skip
