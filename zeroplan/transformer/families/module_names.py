"""The names of a block's modules, in the order in which they run."""

from typing import TypeAlias

Names: TypeAlias = tuple[str, ...]
ATTENTION_MODULES: Names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
#: The same with norms of queries and keys, which run after all projections.
WITH_LATE_NORMS: Names = (*ATTENTION_MODULES[:3], "self_attn.q_norm", "self_attn.k_norm", ATTENTION_MODULES[3])


def gated_modules(name: str) -> Names:
    """Return the modules of the gated MLP ``name``."""
    return (name, f"{name}.gate_proj", f"{name}.act_fn", f"{name}.up_proj", f"{name}.down_proj")


def before_and_after(attention: Names, mlp: Names) -> Names:
    """Return the modules of a block with one norm before attention and one before the MLP."""
    return ("input_layernorm", "self_attn", *attention, "post_attention_layernorm", *mlp)


GATED_MODULES = before_and_after(ATTENTION_MODULES, gated_modules("mlp"))
