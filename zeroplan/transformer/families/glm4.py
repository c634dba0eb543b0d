"""GLM and GLM-4: rotary positions on half of each head, one matrix for gate and up; GLM-4 adds norms after each branch."""

from typing import NamedTuple

from zeroplan.expr import Size
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.blocks import At, Place
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.decoder import Attention, Rotated, joint_mlp, layer, layer_of
from zeroplan.transformer.families.definition import Block, Definition, Tables
from zeroplan.transformer.families.keys import ConfigKeys
from zeroplan.transformer.families.module_names import ATTENTION_MODULES
from zeroplan.transformer.families.operators import Norm
from zeroplan.transformer.families.tape import Site, Store, Tape, Value
from zeroplan.transformer.parameters import Layout
from zeroplan.transformer.params_gated import TWO_NORMS, alike, dense_block
from zeroplan.transformer.params_modules import linear
from zeroplan.transformer.symbols import T, d_4, k_4, q_4, r, s

GLM4 = "transformers 5.23, models/glm4/modeling_glm4.py"
APPLY = f"{GLM4}, apply_rotary_pos_emb"
ROTARY = f"{GLM4}, Glm4RotaryEmbedding.forward"

# --- rotary positions: pairs of neighbours in the first half of each head -----------------------------------------------------


def _rotated(tape: Tape, query: Value, key: Value, _block: Block) -> Rotated:
    """Return queries and keys head by head. The tables are copied, each angle twice, and autograd saves the copies."""
    cos, sin = (tape.make(op.TENSOR, f"{name} of each pair", 2 * r * s * d_4, APPLY) for name in ("cos", "sin"))
    queries, keys = Half("queries", q_4), Half("keys", k_4)
    both = op.slices(tape, query, (queries.shape,) * 2, queries.site), op.slices(tape, key, (keys.shape,) * 2, keys.site)
    halves = [rotate(tape, one[0], (cos, sin), of, "half rotated") for one, of in zip(both, (queries, keys), strict=True)]
    query = op.joined(tape, (halves[0], both[0][1]), "queries", 2 * queries.shape, queries.site)
    tape.release(halves[0])
    key = op.joined(tape, (halves[1], both[1][1]), "keys", 2 * keys.shape, keys.site)
    tape.drop(cos, sin)
    tape.release(halves[1], *both[0], *both[1])
    return query, key


class Half(NamedTuple):
    """Half of each head of the queries or of the keys. ``quarter`` is the width of a quarter of all heads."""

    name: str
    quarter: Size

    @property
    def shape(self) -> Size:
        """Its number of elements."""
        return 2 * T * self.quarter

    @property
    def site(self) -> Site:
        """The operators that slice it."""
        return Site(f"halves of the {self.name}", APPLY)


def rotate(
    tape: Tape, value: Value, tables: tuple[Store | None, Store | None], of: Half, words: str, source: str = APPLY
) -> Value:  # fmt: skip
    """``x·cos + rotate_half(x)·sin``; ``tables``: the block's own cos and sin; ``words``: what the result is called."""
    direct = times_table(tape, value, tables[0], f"{of.name} times cos")
    exchanged = exchanged_pairs(tape, value, of)
    times_sin = times_table(tape, exchanged, tables[1], f"{of.name} times sin")
    tape.release(exchanged)
    made = op.add(tape, direct, times_sin, f"{of.name}, {words}", source)
    tape.release(direct, times_sin)
    return made


def times_table(tape: Tape, value: Value, table: Store | None, reason: str) -> Value:
    """Multiply by cos or sin. Autograd saves a block's own copy of the table."""
    saved, dtype, of = () if table is None else (table,), op.wider(tape, value.dtype, r), f"gradient through {reason}"
    return op.run(tape, value, reason, APPLY, dtype=dtype, saved=saved, gradient=of, widened=True)


def exchanged_pairs(tape: Tape, half: Value, of: Half) -> Value:
    """``stack((-x[1::2], x[::2]))``. The negative half is a new tensor; the gradients are views of one tensor."""
    site = Site(f"even and odd elements of the {of.name}", APPLY)
    even, odd = op.slices(tape, half, (T * of.quarter,) * 2, site)
    name = f"odd elements of the {of.name}, negative"
    negative = op.multiplied(tape, odd, name, site._replace(name=name))
    name = f"{of.name}, pairs exchanged"
    made = op.run(tape, (negative, even), name, APPLY, dtype=half.dtype, shape=half.shape)
    tape.release(negative, even, odd)
    return made


_NORM = Norm("cast, then weighted", f"{GLM4}, Glm4RMSNorm.forward")
_ATTENTION = Attention(f"{GLM4}, Glm4Attention.forward", rotated=_rotated, joined=True)
_GLM = layer_of(f"{GLM4}, Glm4", _NORM, _ATTENTION.run, joint_mlp)
_LAYER = layer(_GLM._replace(after=(Place(At.NORM), Place(At.NORM))))


# --- parameters, and the keys of config.json ---------------------------------------------------------------------------------


def _tensors(model: ModelSpec) -> Layout:
    hidden, width = model.hidden_size, model.intermediate_size
    mlp = (*linear("mlp.gate_up_proj", hidden, 2 * width), *linear("mlp.down_proj", width, hidden))
    after = ("post_self_attn_layernorm", "post_mlp_layernorm") if model.family == "glm4" else ()
    return alike(model, dense_block(model, output_bias=False, mlp=mlp, names=(*TWO_NORMS, *after)))


_TABLES = Tables(4 * r * s * d_4, "rotary cos and sin, of half of each head", ROTARY, copied=True)
_CONFIG = ConfigKeys(
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 2, "head_dim": 128, "attention_bias": True},
    fixed={"mlp_bias": False},
    only={"partial_rotary_factor": (0.5,)},
)
_MODULES = (
    "input_layernorm", "self_attn", *ATTENTION_MODULES, "post_self_attn_layernorm",
    "post_attention_layernorm", "mlp", "mlp.gate_up_proj", "mlp.activation_fn", "mlp.down_proj", "post_mlp_layernorm",
)  # fmt: skip
FAMILIES = {
    "glm": Definition(
        layer(_GLM),
        _tensors,
        _CONFIG,
        tuple(name for name in _MODULES if "post_self" not in name and "post_mlp" not in name),
        tables=_TABLES,
    ),
    "glm4": Definition(_LAYER, _tensors, _CONFIG, _MODULES, tables=_TABLES),
}
