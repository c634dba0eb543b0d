"""OPT: LayerNorm, three projections with biases, an MLP of two matrices with ReLU. Dropout is off."""

from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.attention import Attended, Heads
from zeroplan.transformer.families.decoder import LAYER_NORM, Layer, layer, two_layer_mlp
from zeroplan.transformer.families.definition import Around, Block, Definition, Held
from zeroplan.transformer.families.keys import SIZES, ConfigKeys
from zeroplan.transformer.families.tape import Site, Tape, Value
from zeroplan.transformer.parameters import BlockRun, Layout
from zeroplan.transformer.params_modules import embedding, layer_norm, linear, whole
from zeroplan.transformer.symbols import T, c, h, k, q, r, v

OPT = "transformers 5.23, models/opt/modeling_opt.py"
MODEL = f"{OPT}, OPTDecoder.forward"
LAYER = f"{OPT}, OPTDecoderLayer.forward"
ATTENTION = f"{OPT}, OPTAttention.forward"


def _attention(tape: Tape, normal: Value, block: Block) -> Attended:
    bare = op.linear(tape, normal, q, Site("q projection", ATTENTION, layer="q_proj"), bias=True)
    query = op.scaled(tape, bare, "queries, scaled", ATTENTION)
    key = op.linear(tape, normal, k, Site("k projection", ATTENTION, layer="k_proj"), bias=True)
    value = op.linear(tape, normal, v, Site("v projection", ATTENTION, layer="v_proj"), bias=True)
    context, weights = block.attend(tape, Heads(query, key, value, grouped=False, one_key=False))
    made = op.linear(tape, context, h, Site("output projection", ATTENTION, layer="out_proj"), reads=c, bias=True)
    tape.release(query, key, value, context)
    return Attended(made, weights)


def _mlp(tape: Tape, normal: Value, block: Block) -> Value:
    """Run the MLP on all tokens in one row."""
    normal.is_matrix = True
    return two_layer_mlp(tape, normal, block, LAYER, frees_input=True, layers=("fc1", "fc2"))


_LAYER = layer(Layer(LAYER_NORM, _attention, _mlp, LAYER, mlp_frees_input=True))


def _tensors(model: ModelSpec) -> Layout:
    """Return the layout. Positions are learned; the final norm is registered before the blocks."""
    hidden, token, position = model.hidden_size, "model.decoder.embed_tokens", "model.decoder.embed_positions"
    projections = ("k_proj", "v_proj", "q_proj", "out_proj")
    block = (
        *(parameter for name in projections for parameter in linear(f"self_attn.{name}", hidden, hidden, bias=True)),
        *layer_norm("self_attn_layer_norm", hidden),
        *linear("fc1", hidden, model.intermediate_size, bias=True),
        *linear("fc2", model.intermediate_size, hidden, bias=True),
        *layer_norm("final_layer_norm", hidden),
    )
    tables = (*embedding(token, model.vocab_size, hidden), *embedding(position, model.positions, hidden))
    return whole(
        model,
        embeddings=(*tables, *layer_norm("model.decoder.final_layer_norm", hidden)),
        runs=(BlockRun("dense", model.num_hidden_layers, block),),
        norm=(),
        tied_to=f"{token}.weight",
    )


_CONFIG = ConfigKeys(
    defaults={"tie_word_embeddings": True},
    fixed={
        "enable_bias": True, "layer_norm_elementwise_affine": True, "do_layer_norm_before": True,
        "_remove_final_layer_norm": False, "attention_bias": True, "mlp_bias": True,
    },
    required=(*SIZES, "max_position_embeddings"),
    keys={"intermediate_size": ("ffn_dim",)},
    activation="activation_function",
    dropout={"dropout": 0.1, "attention_dropout": 0.0, "layerdrop": 0.0},
)  # fmt: skip
_MODULES = (
    "self_attn_layer_norm", "self_attn", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj",
    "final_layer_norm", "fc1", "activation_fn", "fc2",
)  # fmt: skip
_AROUND = Around(
    kept=(
        Held(8 * T, "position ids with their offset, int64", MODEL),
        Held(12 * T, "position ids and a mask of ones, held by name", MODEL),
    ),
    named=(
        Held(r * T * h, "token embeddings, held by name", MODEL),
        Held(r * T * h, "position embeddings, held by name", MODEL),
    ),
    names_input=False,
)
FAMILIES = {"opt": Definition(_LAYER, _tensors, _CONFIG, _MODULES, tables=None, around=_AROUND)}
