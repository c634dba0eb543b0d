"""What does one transformer block keep and use in one forward and backward pass?

Exact, tensor by tensor, for the module that transformers builds: equal to what autograd saves on a real run, and to the
allocations of its backward at every point where they peak.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from zeroplan.spec.batch import Batch
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.blocks import BlockPass, Compute
from zeroplan.transformer.families.llama import llama_block
from zeroplan.transformer.families.widths import Widths, widths


class Treatment(NamedTuple):
    """How a family's block is computed, and where that only approximates the real module, as what."""

    block: Callable[[ModelSpec, Widths], BlockPass]
    approximation: str = ""


#: The one place where a family meets its formulas.
TREATMENTS: dict[str, Treatment] = {
    "llama": Treatment(llama_block),
    "mistral": Treatment(llama_block),
    "qwen2": Treatment(llama_block),
}


def block_pass(model: ModelSpec, kind: str, compute: Compute, batch: Batch) -> BlockPass:
    """What one block of ``kind`` (``dense`` or ``moe``) costs in one forward and backward pass.

    Follows CUDA where the CPU differs. Leaves out: dropout (off, as in pre-training), padding (causal attention without an
    explicit mask), compiled graphs and fused kernels, which change every number.
    """
    treatment = TREATMENTS.get(model.family, TREATMENTS["llama"])
    return treatment.block(model, widths(model, compute, batch))


def is_approximate(model: ModelSpec) -> str:
    """Why this model's activations are approximate, in one sentence; empty where they are exact."""
    return TREATMENTS.get(model.family, TREATMENTS["llama"]).approximation
