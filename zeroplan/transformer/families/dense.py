"""Blocks of the Llama kind: Llama, Mistral, Qwen2 and Qwen3."""

from zeroplan.transformer.families.attend import Attended
from zeroplan.transformer.families.gated import LLAMA_NORM, Branches, gated_mlp, three_projections, two_branches
from zeroplan.transformer.families.program import Block, Program
from zeroplan.transformer.families.tape import Tape, Value

LAYER = "transformers 5.23, models/llama/modeling_llama.py, LlamaDecoderLayer.forward"
ATTENTION = "transformers 5.23, models/llama/modeling_llama.py, LlamaAttention.forward"
HEAD_NORMS = "transformers 5.23, models/qwen3/modeling_qwen3.py, Qwen3Attention.forward"
MLP = "transformers 5.23, models/llama/modeling_llama.py, LlamaMLP.forward"


def dense(tape: Tape, given: Value, block: Block) -> Value:
    """One decoder layer; the classes of these families differ in biases and in norms over each head alone."""
    return two_branches(tape, given, block, _PARTS)


def attention(tape: Tape, normal: Value, block: Block) -> Attended:
    """Attention of these families, and of those with experts in place of the MLP."""
    if block.head_norms:
        return three_projections(tape, normal, block, HEAD_NORMS, LLAMA_NORM)
    return three_projections(tape, normal, block, ATTENTION)


def _mlp(tape: Tape, normal: Value, block: Block) -> Value:
    return gated_mlp(tape, normal, block, MLP)


_PARTS = Branches(LLAMA_NORM, attention, _mlp, LAYER)


PROGRAMS = dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), Program(dense, LAYER, LLAMA_NORM))
