"""What does one transformer block keep and use in one forward and backward pass?

Exact, tensor by tensor, for the module that transformers builds: equal to what autograd saves on a real run, and to the
allocations of its backward at every point where they peak.
"""

from collections.abc import Callable
from typing import NamedTuple

from zeroplan.spec.batch import Batch
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.blocks import BlockPass, Compute
from zeroplan.transformer.families.deepseek import deepseek_dense, deepseek_moe
from zeroplan.transformer.families.llama import llama_block
from zeroplan.transformer.families.mixtral import mixtral_block
from zeroplan.transformer.families.widths import PROGRAMMED, Widths, beyond_the_window, widths

Block = Callable[[ModelSpec, Widths], BlockPass]


class Treatment(NamedTuple):
    """Which formulas a family's blocks go through."""

    dense: Block
    moe: Block = mixtral_block


#: The formulas of each family that is not a program altogether.
TREATMENTS: dict[str, Treatment] = {
    "llama": Treatment(llama_block),
    "mistral": Treatment(llama_block),
    "qwen2": Treatment(llama_block),
    "qwen3": Treatment(llama_block),
    "mixtral": Treatment(llama_block),
    "qwen3_moe": Treatment(llama_block),
    "deepseek_v3": Treatment(deepseek_dense, deepseek_moe),
}


def block_pass(model: ModelSpec, kind: str, compute: Compute, batch: Batch, *, recomputed: bool = False) -> BlockPass:
    """Return what one block of ``kind`` (``dense`` or ``moe``; ``local`` or ``global``) costs in one forward and backward pass.

    ``recomputed`` says that the backward runs the block's forward again first; few points differ then.

    Follows CUDA where a CPU differs: LayerNorm statistics are fp32, autocast runs ``pow`` and what follows in fp32, flash
    attention takes scratch in its backward, and mixed-dtype additions make no copy. Takes attention's ``sdpa`` for its
    flash kernel; fp32 on CUDA has none, and falls back to kernels that keep more. Takes an MLP at least as wide as the
    hidden state, and attention at most about twice as wide.

    Families that transformers does not run through ``scaled_dot_product_attention`` write attention out instead.

    Leaves out: dropout (off, as in pre-training); padding, which brings an explicit mask and repeated keys; compiled graphs and
    fused kernels, which change every number.
    """
    one = _kept_on_the_gpu(model, kind, compute, batch, recomputed=recomputed)
    if not compute.offloaded:
        return one
    from zeroplan.transformer.offloaded import input_away  # noqa: PLC0415  the others' answers need not wait for it

    return input_away(one)


def _kept_on_the_gpu(model: ModelSpec, kind: str, compute: Compute, batch: Batch, *, recomputed: bool) -> BlockPass:
    """Do so for a block that has nothing in host memory."""
    if model.profile is not None:
        from zeroplan.transformer.profiled import profile_of, profiled_block  # noqa: PLC0415  only a profile pays for it

        return profiled_block(profile_of(model), kind, compute, batch)
    if (compute.tp > 1 or compute.cp > 1) and kind != "moe":
        from zeroplan.transformer.families.split import split_block  # noqa: PLC0415  the others' answers need not wait for it

        return split_block(model, compute, widths(model, compute, batch))
    if model.adapter is not None or _is_beside_frozen(model, kind, compute):
        from zeroplan.transformer.families.adapted import adapted_block  # noqa: PLC0415  the others' answers need not wait for it
        from zeroplan.transformer.families.frozen import frozen_block  # noqa: PLC0415

        return (adapted_block if model.adapter is not None else frozen_block)(
            model, kind, compute, widths(model, compute, batch)
        )
    if model.family in PROGRAMMED:
        from zeroplan.transformer.families.traced import traced_block  # noqa: PLC0415  the others' answers need not wait for it

        recompute = "full" if recomputed else compute.recompute
        return traced_block(model, widths(model, compute, batch), windowed=kind != "global", recompute=recompute)
    if kind == "moe" and compute.expert_ranks > 1:
        from zeroplan.transformer.families.traced import dispatched_block  # noqa: PLC0415  as above

        again = "full" if recomputed else compute.recompute
        return dispatched_block(model, widths(model, compute, batch), again, ring=compute.cp)
    return _by_formulas(model, kind, compute, batch, recomputed=recomputed)


def _by_formulas(model: ModelSpec, kind: str, compute: Compute, batch: Batch, *, recomputed: bool) -> BlockPass:
    """A block by its family's formulas; by its program where it has a mask, or these do not hold."""
    treatment, x = TREATMENTS[model.family], widths(model, compute, batch, recomputed=recomputed)
    block = treatment.moe if kind == "moe" else treatment.dense
    is_masked, is_written = beyond_the_window(model, x), _needs_its_program(model, kind, x)
    if is_masked is False and not is_written:
        return block(model, x)
    from zeroplan.transformer.families.traced import by_mask, written_block  # noqa: PLC0415  as above

    again = "full" if recomputed else compute.recompute

    def one(masked: bool) -> BlockPass:  # noqa: FBT001  by_mask's own
        return written_block(model, kind, x, again, masked=masked) if masked or is_written else block(model, x)

    return by_mask(is_masked, one)


def _needs_its_program(model: ModelSpec, kind: str, x: Widths) -> bool:
    """Whether formulas do not hold: a dense block, attention written out, DeepSeek's apart, or another activation function."""
    if model.mla is not None:
        return model.hidden_act is not None
    return kind != "moe" or model.hidden_act is not None or x.attention == "eager"


def _is_beside_frozen(model: ModelSpec, kind: str, compute: Compute) -> bool:
    """Whether a block is frozen, or the first that is trained and has an input without a gradient."""
    if model.frozen is None:
        return False
    return kind in ("frozen", "through") or (kind == "first" and compute.recompute == "none")


def approximation(model: ModelSpec, compute: Compute) -> str:
    """Why a model's activations are approximate, in sentences; empty where they are exact, as every family's are.

    A profile may be exact in one manner of execution and not in another.
    """
    if model.profile is None:
        return ""
    from zeroplan.transformer.profiled import profile_of, profiled_remarks  # noqa: PLC0415  only a profile pays for it

    return profiled_remarks(profile_of(model), compute)
