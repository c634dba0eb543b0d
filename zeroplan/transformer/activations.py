"""What does one transformer block keep and use in one forward and backward pass?

Exact, tensor by tensor, for the module that transformers builds: equal to what autograd saves on a real run, and to the
allocations of its backward at every point where they peak.
"""

from zeroplan.memo import as_key, recalled
from zeroplan.spec.batch import Batch
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.blocks import BlockPass, Compute
from zeroplan.transformer.families.widths import widths


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
    return recalled(
        lambda: (block_pass, model, kind, compute, as_key(batch.micro_batch_size), as_key(batch.seq_len), recomputed),
        lambda: _made(model, kind, compute, batch, recomputed=recomputed),
    )


def _made(model: ModelSpec, kind: str, compute: Compute, batch: Batch, *, recomputed: bool) -> BlockPass:
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
    from zeroplan.transformer.families.traced import traced_block  # noqa: PLC0415  a profile's answers need not wait for it

    return traced_block(model, kind, compute, widths(model, compute, batch), "full" if recomputed else compute.recompute)


def approximation(model: ModelSpec, compute: Compute) -> str:
    """Why a model's activations are approximate, in sentences; empty where they are exact, as every family's are.

    A profile may be exact in one manner of execution and not in another.
    """
    if model.profile is None:
        return ""
    from zeroplan.transformer.profiled import profile_of, profiled_remarks  # noqa: PLC0415  only a profile pays for it

    return profiled_remarks(profile_of(model), compute)
