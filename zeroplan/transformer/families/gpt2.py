"""GPT-2: LayerNorm, one joint projection for q, k and v, an MLP of two matrices. Dropout is off."""

from functools import partial

from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.attention import Attended, Heads
from zeroplan.transformer.families.decoder import LAYER_NORM, two_layer_mlp
from zeroplan.transformer.families.definition import Around, Block, Definition, Held, Program
from zeroplan.transformer.families.keys import ConfigKeys
from zeroplan.transformer.families.tags import AT_ATTENTION_NORM, AT_MLP_NORM, OF_THE_BATCH
from zeroplan.transformer.families.tape import Site, Tape, Value
from zeroplan.transformer.parameters import BlockRun, Layout
from zeroplan.transformer.params_modules import conv1d, embedding, layer_norm, whole
from zeroplan.transformer.symbols import T, c, h, k, q, r, s, v

GPT2 = "transformers 5.23, models/gpt2/modeling_gpt2.py"
MODEL = f"{GPT2}, GPT2Model.forward"
LAYER = f"{GPT2}, GPT2Block.forward"
ATTENTION = f"{GPT2}, GPT2Attention.forward"
_mlp = partial(two_layer_mlp, source=f"{GPT2}, GPT2MLP.forward", addmm=True, layers=("c_fc", "c_proj"))


def _layer(tape: Tape, given: Value, block: Block) -> Value:
    """Run one layer. Its variables hold attention's output, and eager attention's weights, until it returns."""
    normal = op.norm(tape, given, "norm before attention", LAYER_NORM, place=AT_ATTENTION_NORM)
    attended, weights = _attention(tape, normal, block)
    middle = op.add(tape, attended, given, "residual stream between attention and MLP", LAYER)
    tape.release(normal)
    normal = op.norm(tape, middle, "norm before the MLP", LAYER_NORM, place=AT_MLP_NORM)
    branch = _mlp(tape, normal, block)
    made = op.add(tape, middle, branch, "block output", LAYER)
    tape.release(branch, normal, middle, attended, weights)
    return made


def _attention(tape: Tape, normal: Value, block: Block) -> Attended:
    joint = op.linear(
        tape, normal, (q + k + v), Site("joint q, k and v projection", ATTENTION, layer="c_attn"), bias=True, addmm=True
    )
    query, key, value = op.chunk(tape, joint, (T * q, T * k, T * v), Site("parts q, k and v", ATTENTION))
    context, weights = block.attend(tape, Heads(query, key, value, grouped=False, one_key=False, joint=True))
    made = op.linear(tape, context, h, Site("output projection", ATTENTION, layer="c_proj"), reads=c, bias=True, addmm=True)
    tape.release(joint, query, key, value, context)
    return Attended(made, weights)


def _tensors(model: ModelSpec) -> Layout:
    hidden = model.hidden_size
    block = (
        *layer_norm("ln_1", hidden),
        *conv1d("attn.c_attn", hidden, 3 * hidden),
        *conv1d("attn.c_proj", hidden, hidden),
        *layer_norm("ln_2", hidden),
        *conv1d("mlp.c_fc", hidden, model.intermediate_size),
        *conv1d("mlp.c_proj", model.intermediate_size, hidden),
    )
    token, position = "transformer.wte", "transformer.wpe"
    return whole(
        model,
        embeddings=(*embedding(token, model.vocab_size, hidden), *embedding(position, model.positions, hidden)),
        runs=(BlockRun("dense", model.num_hidden_layers, block),),
        norm=layer_norm("transformer.ln_f", hidden),
        tied_to=f"{token}.weight",
    )


_CONFIG = ConfigKeys(
    defaults={"tie_word_embeddings": True},
    fixed={"add_cross_attention": False, "attention_bias": True, "mlp_bias": True},
    required=("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings"),
    keys={
        "hidden_size": ("n_embd", "hidden_size"),
        "intermediate_size": ("n_inner",),
        "num_hidden_layers": ("n_layer", "num_hidden_layers"),
        "num_attention_heads": ("n_head", "num_attention_heads"),
        "max_position_embeddings": ("n_positions", "max_position_embeddings"),
    },
    activation="activation_function",
    dropout={"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    only={"reorder_and_upcast_attn": (False,)},
    harmless={
        "a scale is a number, which is multiplied with whatever it is": (
            "scale_attn_weights", "scale_attn_by_inverse_layer_idx",
        ),
        "for models with another head": (
            "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
        ),
        "read by no decoder of these families": ("n_ctx", "n_special", "predict_special_tokens", "afn", "gradient_checkpointing"),
    },
)  # fmt: skip
_MODULES = (
    "ln_1", "attn", "attn.c_attn", "attn.c_proj", "attn.resid_dropout", "ln_2", "mlp", "mlp.c_fc", "mlp.act", "mlp.c_proj",
    "mlp.dropout",
)  # fmt: skip
_AROUND = Around(
    kept=(Held(8 * s, "position ids, int64", MODEL, OF_THE_BATCH),),
    named=(
        Held(r * T * h, "token embeddings, held by name", MODEL),
        Held(r * s * h, "position embeddings, held by name", MODEL),
    ),
    names_input=False,
)
FAMILIES = {"gpt2": Definition(Program(_layer, LAYER, LAYER_NORM), _tensors, _CONFIG, _MODULES, tables=None, around=_AROUND)}
