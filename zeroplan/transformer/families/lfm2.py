"""LFM2 and LFM2-MoE: blocks of a short convolution between two gates, and blocks of attention, each followed by a gated MLP.

A depthwise convolution over three tokens takes the place of attention in most blocks. In LFM2-MoE all blocks but the first have
experts.
"""

from zeroplan.expr import NOTHING
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.attention import Attended
from zeroplan.transformer.families.decoder import LLAMA_NORM, Attention, Layer, gated_mlp, layer
from zeroplan.transformer.families.definition import Block, Definition
from zeroplan.transformer.families.experts import biased_router, routed_experts
from zeroplan.transformer.families.keys import WITH_EXPERTS, ConfigKeys
from zeroplan.transformer.families.module_names import Names
from zeroplan.transformer.families.tape import Site, Tape, Value
from zeroplan.transformer.parameters import Layout, Parameter
from zeroplan.transformer.params_gated import attention_of, fused_experts, head_norms, norms, patterned
from zeroplan.transformer.params_modules import Parameters, linear
from zeroplan.transformer.symbols import E, T, h

LFM2 = "transformers 5.23, models/lfm2/modeling_lfm2.py"
SHORT = f"{LFM2}, Lfm2ShortConv.forward"
MOE = "transformers 5.23, models/lfm2_moe/modeling_lfm2_moe.py"
_TAPS = 3
_ATTENTION = Attention(f"{LFM2}, Lfm2Attention.forward", norm=LLAMA_NORM, norm_at_once=True, output="out_proj")


def _mixed(tape: Tape, normal: Value, block: Block) -> Attended:
    if not block.short:
        return _ATTENTION.run(tape, normal, block)
    with tape.owning():  # the module that reads the convolution's weight
        return Attended(_short_convolution(tape, normal, block))


def _short_convolution(tape: Tape, normal: Value, block: Block) -> Value:
    """Return ``out(C * conv(B * x))``. Variables hold the joint projection and the convolution's output to the end."""
    given = op.without_padding(tape, normal, SHORT, padded=block.padded)
    joint = op.linear(tape, given, 3 * h, Site("joint projection of both gates and x", SHORT, layer="in_proj"))
    before, after, value = op.chunk(tape, joint, (T * h, T * h, T * h), Site("both gates and x", SHORT))
    entry = op.product(tape, before, value, "gated x, input of the convolution", SHORT)
    tape.release(given)
    short = op.convolution(tape, entry, h, NOTHING + _TAPS, Site("convolution", SHORT), is_called=False)
    tape.release(entry)
    inner = op.product(tape, after, short, "convolution times its gate", SHORT)
    made = op.linear(tape, inner, h, Site("output projection", SHORT, layer="out_proj"))
    tape.release(inner, joint, before, after, value, short)
    return made


def _mlp(tape: Tape, normal: Value, block: Block) -> Value:
    if not block.routed:
        return gated_mlp(tape, normal, block, f"{LFM2}, Lfm2MLP.forward", layers=("w1", "w3", "w2"))
    source = f"{MOE}, Lfm2MoeSparseMoeBlock.forward"
    flat = op.view(tape, normal, Site("experts: their input", source))
    with tape.owning(leaf=True):
        logits = op.linear(tape, flat, E, Site("router", f"{MOE}, Lfm2MoeTopKRouter.forward"))
        routing = biased_router(tape, logits, block, f"{MOE}, Lfm2MoeTopKRouter.forward")
    made = routed_experts(tape, flat, routing.weights, block)
    tape.drop(routing.indices)
    tape.release(flat, routing.weights, routing.logits)
    return made


_PROGRAM = layer(Layer(LLAMA_NORM, _mixed, _mlp, f"{LFM2}, Lfm2DecoderLayer.forward"))


def _tensors(model: ModelSpec) -> Layout:
    hidden, width, moe = model.hidden_size, model.intermediate_size, model.moe
    attention = [one._replace(name=one.name.replace("o_proj", "out_proj")) for one in attention_of(model)]
    mixers: dict[str, Parameters] = {
        "full": (*attention, *head_norms(model, ("q_layernorm", "k_layernorm"))),
        "short": (
            Parameter("conv.conv.weight", (hidden, 1, _TAPS), autocast=True),
            *linear("conv.in_proj", hidden, 3 * hidden),
            *linear("conv.out_proj", hidden, hidden),
        ),
    }
    ways = ("w1", hidden, width), ("w3", hidden, width), ("w2", width, hidden)
    dense = tuple([one for name, *sizes in ways for one in linear(f"feed_forward.{name}", *sizes)])
    gate = () if moe is None else linear("feed_forward.gate", hidden, moe.num_experts)
    often = dense if moe is None else (*fused_experts(model, moe, "feed_forward"), *gate)
    both = norms(model, ("operator_norm", "ffn_norm"))
    of_kinds = {kind: (*own, *often, *both) for kind, own in mixers.items()}
    of_kinds |= {"dense": (*mixers["full"], *dense, *both), "dense_short": (*mixers["short"], *dense, *both)}
    return patterned(model, of_kinds, ("model.embed_tokens", "model.embedding_norm"))


_CONFIG = ConfigKeys(
    defaults={"max_position_embeddings": 128000, "num_key_value_heads": 8, "tie_word_embeddings": True},
    fixed={"attention_bias": False, "mlp_bias": False},
    keys={
        "intermediate_size": ("intermediate_size", "block_ff_dim"), "tie_word_embeddings": ("tie_word_embeddings", "tie_embedding"),
        "layer_pattern": ("layer_types",),
    },
    only={"conv_L_cache": (_TAPS,), "conv_bias": (False,), "block_ffn_dim_multiplier": (1.0,), "block_use_swiglu": (True,)},
    not_null=("block_ffn_dim_multiplier",),
    dropout={},
    read=("full_attn_idxs", "block_auto_adjust_ff_dim", "block_multiple_of"),
    harmless={
        "a number in a formula of the norms": ("norm_eps",),
        "read by no code of the class": ("block_dim", "block_norm_eps", "conv_dim", "conv_dim_out", "conv_use_xavier_init",
            "block_use_xavier_init", "block_mlp_init_scale", "block_out_init_scale", "theta", "num_heads",
            "use_pos_enc"),
    },
)  # fmt: skip
_ROUTED = _CONFIG._replace(
    required=(*WITH_EXPERTS.required, "moe_intermediate_size", "layer_pattern"),
    only={"conv_L_cache": (_TAPS,), "conv_bias": (False,), "use_expert_bias": (True,), "norm_topk_prob": (True,)},
    not_null=(),
    counted_as=WITH_EXPERTS.counted_as,
    read=("num_dense_layers",),
).plus(harmless={"a number in a formula": ("routed_scaling_factor",)})
_MIXERS: Names = (
    "operator_norm", "conv", "conv.in_proj", "conv.conv", "conv.out_proj", "self_attn", "self_attn.q_proj", "self_attn.q_layernorm",
    "self_attn.k_proj", "self_attn.k_layernorm", "self_attn.v_proj", "self_attn.out_proj", "ffn_norm", "feed_forward",
)  # fmt: skip
_DENSE = (*_MIXERS, "feed_forward.w1", "feed_forward.w3", "feed_forward.w2")
FAMILIES = {
    "lfm2": Definition(_PROGRAM, _tensors, _CONFIG, _DENSE),
    "lfm2_moe": Definition(
        _PROGRAM, _tensors, _ROUTED, _DENSE, (*_MIXERS, "feed_forward.gate", "feed_forward.experts")
    ),
}  # fmt: skip
