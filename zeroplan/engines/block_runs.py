"""What a block of a run costs as a recipe runs it: recomputed in its backward, or, after those that are, plain."""

from zeroplan.spec.batch import Batch
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import Recompute
from zeroplan.transformer.activations import block_pass
from zeroplan.transformer.blocks import BlockPass, Compute
from zeroplan.transformer.parameters import BlockRun


def recompute_of(run: BlockRun, compute: Compute) -> Recompute:
    """What the backward of a run's blocks runs again."""
    return "none" if run.plain else compute.recompute


def run_pass(model: ModelSpec, run: BlockRun, compute: Compute, batch: Batch) -> BlockPass:
    """One block of a run in one forward and backward pass."""
    if run.plain:
        compute = compute._replace(recompute="none")
    recomputed = compute.recompute == "full"  # up to the last tensor that is needed; selectively, to the end
    return block_pass(model, run.kind, compute, batch, recomputed=recomputed)
