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
from zeroplan.transformer.families.gpt2 import gpt2_block
from zeroplan.transformer.families.llama import llama_block
from zeroplan.transformer.families.mixtral import mixtral_block
from zeroplan.transformer.families.widths import Widths, widths

Block = Callable[[ModelSpec, Widths], BlockPass]


class Treatment(NamedTuple):
    """Which formulas a family's blocks go through, and where those only approximate the real module, as what."""

    dense: Block
    moe: Block = mixtral_block
    approximation: str = ""


_LIKE_LLAMA = "is treated as llama"
_LIKE_GPT2 = "is treated as gpt2 with its own widths"

#: The one place where a family meets its formulas; an exact family has no approximation.
TREATMENTS: dict[str, Treatment] = {
    "llama": Treatment(llama_block),
    "mistral": Treatment(llama_block),
    "qwen2": Treatment(llama_block),
    "qwen3": Treatment(llama_block),
    "gpt2": Treatment(gpt2_block),
    "mixtral": Treatment(llama_block),
    "phi3": Treatment(llama_block, approximation=f"phi3 {_LIKE_LLAMA}: its joint qkv and gate-up projections are taken apart."),
    "gemma2": Treatment(llama_block, approximation=f"gemma2 {_LIKE_LLAMA}: its two further norms are left out."),
    "gemma3_text": Treatment(llama_block, approximation=f"gemma3_text {_LIKE_LLAMA}: its two further norms are left out."),
    "qwen3_moe": Treatment(llama_block, approximation="qwen3_moe is treated as mixtral with norms over queries and keys."),
    "deepseek_v3": Treatment(
        llama_block, approximation="deepseek_v3 is treated as mixtral with the widths of its latent attention."
    ),
    "gpt_oss": Treatment(llama_block, approximation="gpt_oss is treated as mixtral: its sinks and biases are left out."),
    "gpt_neox": Treatment(gpt2_block, approximation=f"gpt_neox {_LIKE_GPT2}: rotary positions are left out."),
    "opt": Treatment(gpt2_block, approximation=f"opt {_LIKE_GPT2}: ReLU keeps less than GELU does."),
    "bloom": Treatment(gpt2_block, approximation=f"bloom {_LIKE_GPT2}: ALiBi is left out."),
}


def block_pass(model: ModelSpec, kind: str, compute: Compute, batch: Batch) -> BlockPass:
    """What one block of ``kind`` (``dense`` or ``moe``) costs in one forward and backward pass.

    Follows CUDA where the CPU differs. Leaves out: dropout (off, as in pre-training), padding (causal attention without an
    explicit mask), compiled graphs and fused kernels, which change every number.
    """
    treatment = TREATMENTS[model.family]
    block = treatment.moe if kind == "moe" else treatment.dense
    return block(model, widths(model, compute, batch))


def is_approximate(model: ModelSpec) -> str:
    """Why this model's activations are approximate, in one sentence; empty where they are exact."""
    return TREATMENTS[model.family].approximation
