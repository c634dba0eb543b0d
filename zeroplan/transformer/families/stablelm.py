"""StableLM: Llama's block with LayerNorms, and positions on a quarter of each head."""

from functools import partial

from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.attention import Attended
from zeroplan.transformer.families.decoder import LAYER_NORM, Attention, Rotated, gated_mlp
from zeroplan.transformer.families.definition import Block, Definition, Program, Tables
from zeroplan.transformer.families.keys import ConfigKeys
from zeroplan.transformer.families.module_names import GATED_MODULES
from zeroplan.transformer.families.tags import AT_ATTENTION_NORM, AT_MLP_NORM
from zeroplan.transformer.families.tape import Site, Tape, Value
from zeroplan.transformer.parameters import Layout
from zeroplan.transformer.params_gated import alike, dense_block
from zeroplan.transformer.params_modules import layer_norm
from zeroplan.transformer.symbols import T, d_4, k_4, q_4, r, s

STABLELM = "transformers 5.23, models/stablelm/modeling_stablelm.py"
LAYER = f"{STABLELM}, StableLmDecoderLayer.forward"
ATTENTION = f"{STABLELM}, StableLmAttention.forward"
_TABLES = Tables(
    2 * r * s * d_4, "rotary cos and sin, of a quarter of each head", f"{STABLELM}, StableLmRotaryEmbedding.forward"
)


def _rotated(tape: Tape, query: Value, key: Value, _block: Block, *, held: list[Value]) -> Rotated:
    """Return queries and keys with the first quarter of each head rotated. ``held`` gets the parts, which variables keep."""
    parts = [
        op.slices(tape, one, (T * quarter, 3 * T * quarter), Site(f"parts of the {name}", ATTENTION))
        for one, name, quarter in ((query, "queries", q_4), (key, "keys", k_4))
    ]
    with_positions = [
        op.rotary(tape, rotating, Site(name, ATTENTION), per_token=d_4)
        for (rotating, _), name in zip(parts, ("queries", "keys"), strict=True)
    ]
    tape.release(*(rotating for rotating, _ in parts))
    query_whole, key_whole = (
        op.joined(tape, (one, rest), name, 4 * T * quarter, ATTENTION)
        for one, (_, rest), name, quarter in zip(with_positions, parts, ("queries", "keys"), (q_4, k_4), strict=True)
    )
    held += (*with_positions, *(rest for _, rest in parts))
    return query_whole, key_whole


def _attention(tape: Tape, normal: Value, block: Block) -> Attended:
    held = list[Value]()
    made = Attention(ATTENTION, rotated=partial(_rotated, held=held), joined=True).run(tape, normal, block)
    tape.release(*held)
    return made


def _layer(tape: Tape, given: Value, block: Block) -> Value:
    """Run one decoder layer. The first norm's result, attention's output and its weights live to the end."""
    normal = op.norm(tape, given, "norm before attention", LAYER_NORM, place=AT_ATTENTION_NORM)
    attended, weights = _attention(tape, normal, block)
    middle = op.add(tape, given, attended, "residual stream between attention and MLP", LAYER)
    second = op.norm(tape, middle, "norm before the MLP", LAYER_NORM, place=AT_MLP_NORM)
    branch = gated_mlp(tape, second, block, f"{STABLELM}, StableLmMLP.forward")
    tape.release(second)
    made = op.add(tape, middle, branch, "block output", LAYER)
    tape.release(middle, branch, normal, attended, weights)
    return made


def _tensors(model: ModelSpec) -> Layout:
    return alike(model, dense_block(model, output_bias=False, norm=layer_norm), layer_norm)


_CONFIG = ConfigKeys(
    defaults={"max_position_embeddings": 4096, "num_key_value_heads": 32},
    fixed={"mlp_bias": False},
    keys={"attention_bias": ("use_qkv_bias",)},
    dropout={"attention_dropout": 0.0, "hidden_dropout": 0.0},
    only={"partial_rotary_factor": (0.25,), "use_parallel_residual": (False,), "qk_layernorm": (False,)},
)
_MODULES = (*GATED_MODULES, "dropout")
FAMILIES = {"stablelm": Definition(Program(_layer, LAYER, LAYER_NORM), _tensors, _CONFIG, _MODULES, tables=_TABLES)}
