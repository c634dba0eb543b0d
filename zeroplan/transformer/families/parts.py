"""What lines of a block have in common: their kinds, tags that engines know them by, and the source of the residual stream."""

from typing import TypeAlias

from zeroplan.ledger import Kind, Module, Role, Tag

SAVED = Kind.ACTIVATIONS
GRADIENT = Kind.ACTIVATION_GRADIENTS
TEMPORARY = Kind.TEMPORARY
HEAD_INPUT = Tag(Role.OPERAND, Module.HEAD)
"""What the head's product saves, and lets go of before its gradient is handed on."""
HELD_NORM = Tag(Role.NAMED, Module.FINAL_NORM)
"""What the model's forward holds by name until it is over."""
OF_THE_BATCH = Tag(Role.BATCH)
"""Ids and positions, which context-parallel ranks share out."""
BLOCK_INPUT, INCOMING = Tag(Role.BLOCK_INPUT), Tag(Role.INCOMING)

LAYER = "transformers 5.23, models/llama/modeling_llama.py, LlamaDecoderLayer.forward"

#: Names of modules.
Names: TypeAlias = tuple[str, ...]
ATTENTION_MODULES: Names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")


def gated_modules(name: str) -> Names:
    """A gated MLP's, as they run."""
    return (name, f"{name}.gate_proj", f"{name}.act_fn", f"{name}.up_proj", f"{name}.down_proj")


def before_and_after(attention: Names, mlp: Names) -> Names:
    """A block's whose norms are before attention and before the MLP."""
    return ("input_layernorm", "self_attn", *attention, "post_attention_layernorm", *mlp)


GATED_MODULES = before_and_after(ATTENTION_MODULES, gated_modules("mlp"))
