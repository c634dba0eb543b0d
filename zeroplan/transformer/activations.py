"""The memory of one transformer block in one forward and backward pass. ``families/`` has the programs behind it.

It is exact, tensor by tensor, for the modules that transformers builds: it equals the tensors that autograd saves in a real
run, and the allocated memory at every peak of the backward.
"""

from zeroplan.memo import as_key, recalled
from zeroplan.spec.batch import Batch
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.blocks import BlockPass, Compute
from zeroplan.transformer.families.widths import widths
from zeroplan.transformer.vision import GATED_VISION, VISION, tower_block


def block_pass(model: ModelSpec, kind: str, compute: Compute, batch: Batch, *, recomputed: bool = False) -> BlockPass:
    """Return the memory of one block of ``kind`` (``dense`` or ``moe``; ``local`` or ``global``) in one forward and backward pass.

    ``recomputed``: the backward first runs the block's forward again, which changes a few points.

    Follows CUDA where a CPU differs: LayerNorm statistics are fp32, autocast runs ``pow`` and what follows in fp32, flash
    attention's backward has a workspace, and mixed-dtype additions make no copy. Assumes that ``sdpa`` runs its flash kernel. CUDA
    has none for fp32 and runs kernels that keep more. Assumes an MLP at least as wide as the hidden state, and attention at most
    about twice as wide.

    Families that transformers runs without ``scaled_dot_product_attention`` use eager attention.

    Leaves out dropout (off, as in pre-training); padding, which adds a mask and repeated keys; compiled graphs and fused kernels,
    which change every number.
    """
    return recalled(
        lambda: (block_pass, model, kind, compute, as_key(batch.micro_batch_size), as_key(batch.seq_len), recomputed),
        lambda: _made(model, kind, compute, batch, recomputed=recomputed),
    )


def _made(model: ModelSpec, kind: str, compute: Compute, batch: Batch, *, recomputed: bool) -> BlockPass:
    one = _kept_on_the_gpu(model, kind, compute, batch, recomputed=recomputed)
    if not compute.offloaded or one.on_host:
        return one
    from zeroplan.transformer.offloaded import with_offloaded_input  # noqa: PLC0415  keeps start-up fast

    return with_offloaded_input(one)


def _kept_on_the_gpu(model: ModelSpec, kind: str, compute: Compute, batch: Batch, *, recomputed: bool) -> BlockPass:
    """Return the memory of a block without offloaded activations."""
    if model.profile is not None:
        from zeroplan.transformer.profiled import profile_of, profiled_block  # noqa: PLC0415  keeps start-up fast

        return profiled_block(profile_of(model), kind, compute, batch)
    if kind in (VISION, GATED_VISION) and model.vision is not None:
        return tower_block(model, model.vision, compute, batch, gated=kind == GATED_VISION)
    from zeroplan.transformer.families.traced import traced_block  # noqa: PLC0415  keeps start-up fast

    own = model.of_kind(kind)
    return traced_block(own, kind, compute, widths(own, compute, batch), "full" if recomputed else compute.recompute)


def approximation(model: ModelSpec, compute: Compute) -> str:
    """Return why a model's activations are approximate, in sentences; empty if they are exact, as for every family.

    A profile may be exact for some settings and not for others.
    """
    if model.profile is None:
        return ""
    from zeroplan.transformer.profiled import profile_of, profiled_remarks  # noqa: PLC0415  keeps start-up fast

    return profiled_remarks(profile_of(model), compute)
