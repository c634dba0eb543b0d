"""How much does one micro-batch ask of a GPU: operations in matrix multiplications and attention, bytes moved by the rest?"""

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

#: A matrix multiplication's backward multiplies twice.
MATRIX_BACKWARD = 2.0
#: A fused attention kernel multiplies five times in backward, twice in forward (Dao 2023, arXiv:2307.08691, section 4.1).
ATTENTION_BACKWARD = 2.5
#: A tensor that autograd saves is written once and read by the next operator; its backward reads it, reads the gradient that
#: comes in and writes the one that goes on.
SAVED_FORWARD, SAVED_BACKWARD = 2.0, 3.0


class Work(NamedTuple):
    """Of one forward of one micro-batch on one GPU."""

    blocks_flops: Float
    """Matrix multiplications of the blocks."""
    head_flops: Float
    attention_flops: Float
    """Scores and their product with the values; of a causal kernel, what it does not skip."""
    blocks_bytes: Float
    """What autograd saves in the blocks without recomputation."""
    head_bytes: Float
    """Logits and what the loss makes of them, at the most."""
    weights_bytes: Float
    """The matrices that are multiplied with, once."""
    core_bytes: Float = 0.0
    """Of what autograd saves in the blocks, what selective recomputation of attention alone writes once more."""

    @property
    def flops(self) -> Float:
        """Everything that is multiplied. [FLOPs]"""
        return self.blocks_flops + self.head_flops + self.attention_flops


def work(model: ModelSpec, recipe: RecipeSpec, batch: Batch, *, tp: int = 1, cp: int = 1, expert_ranks: int = 1) -> Work:
    """Count one micro-batch on one of ``tp`` ranks that split it, or of ``cp`` that share its sequences. [FLOPs, bytes]

    Experts count as often as tokens choose them, evenly spread. Leaves out: sliding windows, which only some kernels skip;
    weights that are frozen, whose gradients nobody takes; writing out weights in four bits.
    """
    compute = compute_of(recipe, tp=tp, ep=expert_ranks, cp=cp)
    numbers = batch.micro_batch_size, batch.seq_len
    return recalled(
        lambda: (work, model, compute, *map(as_key, numbers), recipe.loss),
        lambda: _profiled(model, recipe, batch) if model.profile is not None else _counted(model, recipe, batch, compute),
    )


def _counted(model: ModelSpec, recipe: RecipeSpec, batch: Batch, compute: Compute) -> Work:
    """The same of a model whose blocks have formulas."""
    whole, tp, cp = layout(_multiplied(model)), compute.tp, compute.cp
    tokens = 1.0 * batch.micro_batch_size * batch.seq_len
    in_blocks = block_matrices(whole)
    outside = matmul_parameters(model, whole) - in_blocks
    keys = batch.seq_len * 1.0 if recipe.attention == "eager" else (batch.seq_len + 1) / 2.0
    scores = 2.0 * attention_layers(model) * attention_widths(model)
    if cp > 1:
        from zeroplan.transformer.context import local_batch  # noqa: PLC0415  the others' answers need not wait for it

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
    """The same of a traced module: its operations as they were counted, and every parameter as a matrix that is read."""
    from zeroplan.transformer.profiled import profile_of, profiled_operations, without_recompute  # noqa: PLC0415  only a profile pays

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
    """The model as it is multiplied with: weights in four bits are first written out."""
    if model.adapter is None or model.adapter.quantize == "none":
        return model
    return replace(model, adapter=replace(model.adapter, quantize="none"))
