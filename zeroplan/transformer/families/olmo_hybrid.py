"""OLMo Hybrid: three blocks of linear attention per block of OLMo 3's full attention.

Linear attention is Qwen3-Next's (``delta_rule.py``), but each of its inputs has a matrix, its gate follows the recurrence, and beta
is doubled. Its blocks have a norm before each branch; those of full attention have norms behind both. Released models have no
rotary positions.
"""

from functools import partial

from zeroplan.expr import Size
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.attention import Attended
from zeroplan.transformer.families.decoder import Layer, gated_mlp
from zeroplan.transformer.families.definition import Block, Definition, Program
from zeroplan.transformer.families.keys import SIZES, ConfigKeys
from zeroplan.transformer.families.olmo2 import LAYER as FULL_LAYER
from zeroplan.transformer.families.olmo2 import MODULES, NORM, TABLES, of_block
from zeroplan.transformer.families.qwen3_next import convolved, decay_of, gated_norm, learning_rate, recurrence
from zeroplan.transformer.families.tape import Site, Tape, Value
from zeroplan.transformer.parameters import KINDS_IN_TURN, Layout, Parameter
from zeroplan.transformer.params_gated import alternating, gated, two_norms
from zeroplan.transformer.params_modules import Parameters, linear, rms_norm
from zeroplan.transformer.symbols import A, D, I, J, T, h

OLMO = "transformers 5.23, models/olmo_hybrid/modeling_olmo_hybrid.py"
LAYER = f"{OLMO}, OlmoHybridLinearAttentionDecoderLayer.forward"
LINEAR = f"{OLMO}, OlmoHybridGatedDeltaNet.forward"


def _layer(tape: Tape, given: Value, block: Block) -> Value:
    return FULL_LAYER.block(tape, given, block) if block.chunks == "none" else _LINEAR.run(tape, given, block)


def _linear_attention(tape: Tape, normal: Value, block: Block) -> Attended:
    """Run ``OlmoHybridGatedDeltaNet``. Variables hold beta, the decay and the recurrence's inputs until it returns."""
    given = op.without_padding(tape, normal, LINEAR, padded=block.padded)
    keys, values = J * D, A * I
    parts = tuple(
        _projected(tape, given, width, name) for width, name in ((keys, "q_proj"), (keys, "k_proj"), (values, "v_proj"))
    )
    joined = op.joined(tape, parts, "queries, keys and values, joined", T * (2 * keys + values), LINEAR)
    tape.release(*parts)
    mixed = convolved(tape, joined, block)
    learnt, logarithm = _doubled_rate(tape, given), _decay(tape, given)
    made, views = recurrence(tape, mixed, learnt, logarithm, block)
    gate = _projected(tape, given, values, "g_proj")
    normed = gated_norm(tape, made, gate)
    tape.release(made)
    out = op.linear(tape, normed, h, Site("output projection", LINEAR, layer="o_proj"), reads=values)
    tape.release(normed, gate, mixed, *views, learnt, logarithm, given)
    return Attended(out)


def _projected(tape: Tape, given: Value, width: Size, layer: str) -> Value:
    return op.linear(tape, given, width, Site(f"{layer} of linear attention", LINEAR, layer=layer))


def _doubled_rate(tape: Tape, given: Value) -> Value:
    """Return twice the sigmoid of beta, so that a state's eigenvalues may be negative."""
    beta = _projected(tape, given, A, "b_proj")
    learnt = learning_rate(tape, beta)
    tape.release(beta)
    return op.scaled(tape, learnt, "beta, doubled", LINEAR)


def _decay(tape: Tape, given: Value) -> Value:
    bare = _projected(tape, given, A, "a_proj")
    made = decay_of(tape, bare)
    tape.release(bare)
    return made


_LINEAR = Layer(NORM, _linear_attention, partial(gated_mlp, source=f"{OLMO}, OlmoHybridMLP.forward"), LAYER)

# --- parameters, and the keys of config.json ---------------------------------------------------------------------------------


def _tensors(model: ModelSpec) -> Layout:
    mlp = gated("mlp", model, model.intermediate_size)
    return alternating(model, KINDS_IN_TURN[1], (*mlp, *two_norms(model), *_of_linear(model)), of_block(model))


def _of_linear(model: ModelSpec) -> Parameters:
    assert model.linear is not None  # noqa: S101  the family always has it
    own, hidden = model.linear, model.hidden_size
    keys, values, rates = own.num_key_heads * own.key_head_dim, own.num_value_heads * own.value_head_dim, own.num_value_heads
    widths = {"q_proj": keys, "k_proj": keys, "v_proj": values, "a_proj": rates, "b_proj": rates, "g_proj": values}
    return (
        Parameter("linear_attn.A_log", (rates,)),
        Parameter("linear_attn.dt_bias", (rates,)),
        *(one for name, width in widths.items() for one in linear(f"linear_attn.{name}", hidden, width)),
        *linear("linear_attn.o_proj", values, hidden),
        Parameter("linear_attn.conv1d.weight", (2 * keys + values, 1, own.conv_kernel_dim), autocast=True),
        *rms_norm("linear_attn.o_norm", own.value_head_dim),
    )


_CONFIG = ConfigKeys(
    defaults={"max_position_embeddings": 65536, "linear_conv_kernel_dim": 4},
    fixed={"mlp_bias": False},
    required=SIZES,
    counted_as={"linear_allow_neg_eigval": (True, "without it one tensor with a number per token and head less is made")},
    harmless={
        "numbers from which weights begin": (
            "linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor",
        ),
    },
)  # fmt: skip
_MODULES = (
    "input_layernorm", "linear_attn", *(f"linear_attn.{name}_proj" for name in "qkvba"), "linear_attn.g_proj",
    "linear_attn.o_norm", "linear_attn.o_proj", *MODULES,
)  # fmt: skip
FAMILIES = {
    "olmo_hybrid": Definition(
        Program(_layer, LAYER, NORM), _tensors, _CONFIG, _MODULES, tables=lambda model: TABLES if model.rotary else None
    )
}
