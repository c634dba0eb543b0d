"""Cohere's Command R and Command A: attention and MLP side by side behind one LayerNorm; positions of neighbours, in fp32.

In Command R7B and Command A three layers with a window come before one with full attention, which has no positions.
"""

from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.decoder import Attention, Rotated, gated_mlp
from zeroplan.transformer.families.definition import Around, Block, Definition, Program
from zeroplan.transformer.families.glm4 import Half, rotate
from zeroplan.transformer.families.keys import ConfigKeys
from zeroplan.transformer.families.module_names import WITH_LATE_NORMS, gated_modules
from zeroplan.transformer.families.operators import Norm
from zeroplan.transformer.families.tags import AT_ATTENTION_NORM
from zeroplan.transformer.families.tape import Site, Tape, Value
from zeroplan.transformer.parameters import Layout, Parameter
from zeroplan.transformer.params_gated import alike, dense_block
from zeroplan.transformer.symbols import k_2, q_2

COHERE = "transformers 5.23, models/cohere/modeling_cohere.py"
LAYER = f"{COHERE}, CohereDecoderLayer.forward"
ROTARY = f"{COHERE}, apply_rotary_pos_emb"
NORM = Norm("layer, written out", f"{COHERE}, CohereLayerNorm.forward")


def _layer(tape: Tape, given: Value, block: Block) -> Value:
    """Run one decoder layer. The attention weights live to the end."""
    normal = op.norm(tape, given, "norm before both branches", NORM, place=AT_ATTENTION_NORM)
    attended, weights = (_WITH_NORMS if block.head_norms else _ATTENTION).run(tape, normal, block)
    branch = gated_mlp(tape, normal, block, f"{COHERE}, CohereMLP.forward")
    both = op.add(tape, given, attended, "residual stream and attention", LAYER)
    made = op.add(tape, both, branch, "block output", LAYER)
    tape.release(both, normal, branch, attended, weights)
    return made


def _rotated(tape: Tape, query: Value, key: Value, _block: Block) -> Rotated:
    """Return queries and keys in their own dtype. Variables of the function hold fp32 copies of both, before and after rotation."""
    wide = [op.cast(tape, one, 4, Site(name, ROTARY)) for name, one in (("queries", query), ("keys", key))]
    both = [
        rotate(tape, one, (None, None), Half(name, half), "rotated", ROTARY)
        for name, one, half in (("queries", wide[0], q_2), ("keys", wide[1], k_2))
    ]
    made = [
        op.cast(tape, one, bare.dtype, Site(f"rotated {name}", ROTARY))
        for name, one, bare in (("queries", both[0], query), ("keys", both[1], key))
    ]
    tape.release(*wide, *both)
    return made[0], made[1]


_ATTENTION = Attention(f"{COHERE}, CohereAttention.forward", rotated=_rotated)
_WITH_NORMS = _ATTENTION._replace(norm=NORM, own_weights=True)


def _tensors(model: ModelSpec) -> Layout:
    widths = (("q", model.num_attention_heads), ("k", model.num_key_value_heads)) if model.use_qk_norm else ()
    norms = tuple(Parameter(f"self_attn.{name}_norm.weight", (heads, model.head_dim)) for name, heads in widths)
    return alike(model, dense_block(model, of_heads=norms, names=("input_layernorm",)))


_CONFIG = ConfigKeys(
    defaults={"max_position_embeddings": 8192, "tie_word_embeddings": True},
    fixed={"mlp_bias": False},
    not_null=("logit_scale",),
    read=("use_qk_norm",),
    harmless={"numbers in a formula, which change no tensor": ("logit_scale",)},
)
_WINDOWED = _CONFIG._replace(
    defaults={**_CONFIG.defaults, "sliding_window": 4096},
    read=(),
    only={
        "use_qk_norm": (False,),
        "sliding_window_pattern": (4,),
        "use_parallel_block": (True,),
        "use_parallel_embedding": (False,),
    },
    harmless={
        **_CONFIG.harmless,
        "made of other keys": ("order_of_interleaved_layers", "rotary_pct", "position_embedding_type"),
    },
)
_COHERE = Definition(
    Program(_layer, LAYER, NORM), _tensors, _CONFIG,
    ("input_layernorm", "self_attn", *WITH_LATE_NORMS, *gated_modules("mlp")),
)  # fmt: skip
FAMILIES = {"cohere": _COHERE, "cohere2": _COHERE._replace(config=_WINDOWED, around=Around(masks=2))}
