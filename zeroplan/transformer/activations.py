"""What does one transformer block keep and use in one forward and backward pass?

Exact, tensor by tensor, for the module that transformers builds: equal to what autograd saves on a real run, and to the
allocations of its backward at every point where they peak.
"""

from collections.abc import Callable
from typing import NamedTuple

from zeroplan.spec.batch import Batch
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.blocks import BlockPass, Compute
from zeroplan.transformer.families.gpt2 import gpt2_block
from zeroplan.transformer.families.llama import llama_block
from zeroplan.transformer.families.mixtral import mixtral_block
from zeroplan.transformer.families.traced import traced_block
from zeroplan.transformer.families.widths import WINDOWED, Widths, widths

Block = Callable[[ModelSpec, Widths], BlockPass]


class Treatment(NamedTuple):
    """Which formulas a family's blocks go through, and where those only approximate the real module, as what."""

    dense: Block
    moe: Block = mixtral_block
    approximation: str = ""


#: The one place where a family meets its formulas; an exact family has no approximation.
TREATMENTS: dict[str, Treatment] = {
    "llama": Treatment(llama_block),
    "mistral": Treatment(llama_block),
    "qwen2": Treatment(llama_block),
    "qwen3": Treatment(llama_block),
    "gpt2": Treatment(gpt2_block),
    "mixtral": Treatment(llama_block),
    "phi3": Treatment(traced_block),
    "gemma2": Treatment(traced_block),
    "gemma3_text": Treatment(traced_block),
    "qwen3_moe": Treatment(llama_block, approximation="qwen3_moe is treated as mixtral with norms over queries and keys."),
    "deepseek_v3": Treatment(
        llama_block,
        approximation="deepseek_v3 is treated as mixtral with shared experts: its low-rank projections save more than counted.",
    ),
    "gpt_oss": Treatment(llama_block, approximation="gpt_oss is treated as mixtral: its sinks and biases are left out."),
    "gpt_neox": Treatment(traced_block),
    "opt": Treatment(traced_block),
    "bloom": Treatment(traced_block),
}


def block_pass(model: ModelSpec, kind: str, compute: Compute, batch: Batch) -> BlockPass:
    """Return what one block of ``kind``, ``dense`` or ``moe``, costs in one forward and backward pass.

    Follows CUDA where a CPU differs: LayerNorm statistics are fp32, autocast runs ``pow`` and what follows in fp32, flash
    attention takes scratch in its backward, and mixed-dtype additions make no copy. Takes attention's ``sdpa`` for its
    flash kernel; fp32 on CUDA has none, and falls back to kernels that keep more. Takes an MLP at least as wide as the
    hidden state, and attention at most about twice as wide.

    Leaves out: dropout (off, as in pre-training); padding, and sliding windows shorter than the sequence, which both bring
    an explicit mask and repeated keys; compiled graphs and fused kernels, which change every number.
    """
    treatment = TREATMENTS[model.family]
    if treatment.dense is traced_block:
        return traced_block(model, widths(model, compute, batch), windowed=kind != "global" and model.family in WINDOWED)
    block = treatment.moe if kind == "moe" else treatment.dense
    return block(model, widths(model, compute, batch))


def is_approximate(model: ModelSpec) -> str:
    """Why this model's activations are approximate, in one sentence; empty where they are exact."""
    return TREATMENTS[model.family].approximation
