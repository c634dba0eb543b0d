"""The memory of one block of a run under a recipe, whose backward recomputes the block or not."""

from zeroplan.spec.batch import Batch
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import Recompute
from zeroplan.transformer.activations import block_pass
from zeroplan.transformer.blocks import BlockPass, Compute
from zeroplan.transformer.parameters import BlockRun


def recompute_of(run: BlockRun, compute: Compute) -> Recompute:
    """Return how the backward recomputes the blocks of a run."""
    return "none" if run.plain else compute.recompute


def run_pass(model: ModelSpec, run: BlockRun, compute: Compute, batch: Batch) -> BlockPass:
    """Return one block of a run in one forward and backward pass."""
    if run.plain:
        compute = compute._replace(recompute="none")
    recomputed = compute.recompute == "full"  # full recomputation stops at the last saved tensor, selective runs to the end
    return block_pass(model, run.kind, compute, batch, recomputed=recomputed)
