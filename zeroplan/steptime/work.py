"""The work of one micro-batch on a GPU: operations of matrix products and attention, and bytes that other operators move."""

from dataclasses import replace
from typing import NamedTuple

from zeroplan.engines.precisions import compute_of
from zeroplan.ledger import total_bytes
from zeroplan.memo import as_key, recalled
from zeroplan.numeric import Float, together
from zeroplan.spec.batch import Batch
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.transformer.activations import block_pass
from zeroplan.transformer.blocks import Compute
from zeroplan.transformer.flops import (
    attention_layers,
    attention_widths,
    block_matrices,
    linear_attention_flops,
    matmul_parameters,
)
from zeroplan.transformer.head import head_pass
from zeroplan.transformer.params import layout

#: A matrix product's backward multiplies twice.
MATRIX_BACKWARD = 2.0
#: A fused attention kernel multiplies five times in backward, twice in forward (Dao 2023, arXiv:2307.08691, section 4.1).
ATTENTION_BACKWARD = 2.5
#: A saved tensor is written once and read by the next operator. Its backward reads it, reads the incoming gradient and writes
#: the outgoing one.
SAVED_FORWARD, SAVED_BACKWARD = 2.0, 3.0


class Work(NamedTuple):
    """The work of one micro-batch's forward on one GPU."""

    blocks_flops: Float
    """Matrix products of the blocks."""
    head_flops: Float
    attention_flops: Float
    """Scores and their product with the values; of a causal kernel without what it skips."""
    blocks_bytes: Float
    """What autograd saves in the blocks without recomputation."""
    head_bytes: Float
    """The largest total of logits and the loss's tensors."""
    weights_bytes: Float
    """The matrices, read once."""
    core_bytes: Float = 0.0
    """What selective recomputation of attention alone writes again of the blocks' saved tensors."""

    @property
    def flops(self) -> Float:
        """All operations. [FLOPs]"""
        return self.blocks_flops + self.head_flops + self.attention_flops


def work(model: ModelSpec, recipe: RecipeSpec, batch: Batch, *, tp: int = 1, cp: int = 1, expert_ranks: int = 1) -> Work:
    """Return the work of one micro-batch on one of ``tp`` or ``cp`` ranks that split it. [FLOPs, bytes]

    Experts count as often as tokens choose them, evenly. Leaves out sliding windows, which only some kernels skip; frozen
    weights, which have no gradients; and dequantising weights in four bits.
    """
    compute = compute_of(recipe, tp=tp, ep=expert_ranks, cp=cp)
    numbers = batch.micro_batch_size, batch.seq_len
    return recalled(
        lambda: (work, model, compute, *map(as_key, numbers), recipe.loss),
        lambda: _profiled(model, recipe, batch) if model.profile is not None else _counted(model, recipe, batch, compute),
    )


def _counted(model: ModelSpec, recipe: RecipeSpec, batch: Batch, compute: Compute) -> Work:
    """Return the work of a model with formulas."""
    whole, tp, cp = layout(_multiplied(model)), compute.tp, compute.cp
    tokens = 1.0 * batch.micro_batch_size * batch.seq_len
    in_blocks = block_matrices(whole)
    outside = matmul_parameters(model, whole) - in_blocks
    keys = batch.seq_len * 1.0 if recipe.attention == "eager" else (batch.seq_len + 1) / 2.0
    scores = 2.0 * attention_layers(model) * attention_widths(model)
    if cp > 1:
        from zeroplan.transformer.context import local_batch  # noqa: PLC0415  keeps start-up fast

        batch, tokens = local_batch(batch, cp), tokens / cp
    saved = together(1.0 * run.layers * total_bytes(block_pass(model, run.kind, compute, batch).saved) for run in whole.runs)
    head = head_pass(model, compute, batch, loss=recipe.loss)
    return Work(
        blocks_flops=(2.0 * in_blocks + linear_attention_flops(model)) * tokens / tp,
        head_flops=2.0 * outside * tokens / tp,
        attention_flops=scores * keys * tokens / tp,
        blocks_bytes=saved,
        head_bytes=1.0 * total_bytes((*head.saved, *head.loss_forward)),
        weights_bytes=1.0 * compute.element_bytes * (in_blocks + outside) / tp,
    )


def _profiled(model: ModelSpec, recipe: RecipeSpec, batch: Batch) -> Work:
    """Return the work of a traced module: its counted operations, with every parameter as a matrix."""
    from zeroplan.transformer.profiled import profile_of, profiled_operations, without_recompute  # noqa: PLC0415  keeps start-up fast

    profile, whole, compute = profile_of(model), layout(model), compute_of(recipe)
    done, plain = profiled_operations(profile, compute, batch), without_recompute(profile, compute)
    blocks = [(run.layers, block_pass(model, run.kind, plain, batch)) for run in whole.runs]
    head = head_pass(model, compute, batch, loss=recipe.loss)
    elements = sum(run.layers * one.numel for run in whole.runs for one in run.parameters) + sum(
        one.numel for one in whole.tail
    )
    return Work(
        blocks_flops=1.0 * done.blocks,
        head_flops=1.0 * done.outside,
        attention_flops=1.0 * done.attention,
        blocks_bytes=together(
            1.0 * layers * total_bytes(one.saved if plain.recompute == "none" else (*one.checkpoint, *one.selective))
            for layers, one in blocks
        ),
        head_bytes=1.0 * total_bytes((*head.saved, *head.loss_forward)),
        weights_bytes=1.0 * compute.element_bytes * elements,
    )


def _multiplied(model: ModelSpec) -> ModelSpec:
    """Return the model whose weights are multiplied: those in four bits are dequantised first."""
    if model.adapter is None or model.adapter.quantize == "none":
        return model
    return replace(model, adapter=replace(model.adapter, quantize="none"))
