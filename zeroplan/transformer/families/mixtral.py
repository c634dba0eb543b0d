"""Mixtral, Qwen3-MoE, OLMoE and MiniMax-M2: a router, and experts on this rank or spread over several."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

from zeroplan.spec.family import TRAITS
from zeroplan.spec.model import ModelSpec, MoeSpec
from zeroplan.spec.recipe import PRIME_RL
from zeroplan.transformer.families.attention import Attended
from zeroplan.transformer.families.decoder import HALF, LLAMA_NORM, Attention, Layer, layer, rotated
from zeroplan.transformer.families.definition import HALF_TABLES, Block, Definition, Program
from zeroplan.transformer.families.experts import routed_experts, router
from zeroplan.transformer.families.keys import DIVIDED, JITTER, WITH_EXPERTS, WITH_NUM_EXPERTS
from zeroplan.transformer.families.llama import WITH_NORMS, attention
from zeroplan.transformer.families.module_names import ATTENTION_MODULES, before_and_after, gated_modules
from zeroplan.transformer.families.sharded import own_share
from zeroplan.transformer.families.tape import Tape, Value
from zeroplan.transformer.parameters import Layout
from zeroplan.transformer.params_gated import attention_of, gate_and_experts, head_norms, joint_norms, with_experts
from zeroplan.transformer.params_modules import Parameters, linear

MIXTRAL = "transformers 5.23, models/mixtral/modeling_mixtral.py, MixtralDecoderLayer.forward"
OLMOE = "transformers 5.23, models/olmoe/modeling_olmoe.py"
MINIMAX = "transformers 5.23, models/minimax_m2/modeling_minimax_m2.py"
QWEN3 = "transformers 5.23, models/qwen3_moe/modeling_qwen3_moe.py, Qwen3MoeDecoderLayer.forward"


def mlp(tape: Tape, normal: Value, block: Block) -> Value:
    """Run router and experts."""
    if PRIME_RL in tape.mode.fused:
        from zeroplan.transformer.families.prime_rl import moe  # noqa: PLC0415  few jobs have it

        return moe(tape, normal, block)
    if block.looped and block.training is not None:
        from zeroplan.transformer.families.looped_experts import looped_experts  # noqa: PLC0415  only adapters need it

        return looped_experts(tape, normal, block.training, block.looped)
    with nullcontext() if block.family in _GATHERED_APART else tape.owning(leaf=True):
        narrowed = not TRAITS[block.family].routes_in_32_bits
        sigmoid, divided = block.family == "minimax_m2", block.family != "olmoe"
        with tape.owning(leaf=True):
            routing = router(tape, normal, narrowed=narrowed, sigmoid=sigmoid, divided=divided)
        made = routed_experts(tape, normal, routing.weights, block)
        tape.drop(routing.indices)
        tape.release(routing.weights, routing.logits)
    return own_share(tape, made, "output of the MLP") if block.sharded else made


#: Families whose MLP is no leaf module of DeepSpeed's, so that router and experts are gathered one after the other (DeepSpeed
#: 0.19.8, runtime/zero/leaf_module_config.py).
_GATHERED_APART = ("olmoe", "minimax_m2")

_OLMOE_ATTENTION = Attention(f"{OLMOE}, OlmoeAttention.forward", norm=LLAMA_NORM, norm_at_once=True, norm_over_heads=True)
_MINIMAX_ATTENTION = Attention(
    f"{MINIMAX}, MiniMaxM2Attention.forward", norm=LLAMA_NORM, norm_at_once=True, norm_over_heads=True, joined=True,
    rotated=partial(rotated, source=f"{MINIMAX}, apply_rotary_pos_emb", partly=HALF),
)  # fmt: skip


def _layer(source: str, attention: Callable[[Tape, Value, Block], Attended] = attention) -> Program:
    return layer(Layer(LLAMA_NORM, attention, mlp, source))


# --- parameters, and the keys of config.json ---------------------------------------------------------------------------------


def _mixtral(model: ModelSpec) -> Layout:
    def routed(moe: MoeSpec) -> Parameters:
        return _single(model, moe) if moe.separate else gate_and_experts(model, moe)

    return with_experts(model, attention_of(model), routed)


def _single(model: ModelSpec, moe: MoeSpec) -> Parameters:
    """Return router and each expert's three layers, as transformers before 5 has them."""
    hidden, width = model.hidden_size, moe.moe_intermediate_size
    gate = linear("mlp.gate", hidden, moe.num_experts)
    shapes = (("w1", hidden, width), ("w2", width, hidden), ("w3", hidden, width))
    every = ((f"mlp.experts.{one}.{name}", n_in, n_out) for one in range(moe.num_experts) for name, n_in, n_out in shapes)
    return (*gate, *(parameter for name, n_in, n_out in every for parameter in linear(name, n_in, n_out)))


def _with_joint_norms(model: ModelSpec) -> Layout:
    """Return the layout of OLMoE or MiniMax-M2, which register the q and k norms after the output projection."""
    attention = (*attention_of(model, bias=model.attention_bias), *joint_norms(model))
    return with_experts(model, attention, partial(gate_and_experts, model))


def _qwen3_moe(model: ModelSpec) -> Layout:
    attention = (*attention_of(model, bias=model.attention_bias), *head_norms(model))
    return with_experts(model, attention, partial(gate_and_experts, model, gate_last=True))


_MIXTRAL = WITH_EXPERTS.plus(
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8},
    fixed={"attention_bias": False, "mlp_bias": False},
    counted_as=JITTER,
)
_QWEN3_MOE = WITH_NUM_EXPERTS._replace(
    required=(*WITH_EXPERTS.required, "moe_intermediate_size"),
    optional_window=True,
    assumed={"norm_topk_prob": False},
    read=("mlp_only_layers", "decoder_sparse_step"),
).plus(
    defaults={"max_position_embeddings": 32768, "num_key_value_heads": 4, "sliding_window": 4096},
    fixed={"decoder_sparse_step": 1, "mlp_bias": False},
    counted_as=DIVIDED,
    harmless={"read by no decoder of these families": ("max_window_layers",)},
)
_OLMOE = WITH_NUM_EXPERTS.plus(
    defaults={"max_position_embeddings": 4096},
    fixed={"mlp_bias": False},
    only={"clip_qkv": (), "norm_topk_prob": (False,)},
)
_MINIMAX = WITH_EXPERTS._replace(required=(*WITH_EXPERTS.required, "rotary_dim"), read=("rotary_dim",)).plus(
    defaults={"max_position_embeddings": 196608, "num_key_value_heads": 8, "head_dim": 128},
    fixed={"attention_bias": False, "mlp_bias": False},
    only={
        "use_qk_norm": (True,), "qk_norm_type": ("per_layer",), "scoring_func": ("sigmoid",), "use_routing_bias": (True,),
        "shared_intermediate_size": (0,), "partial_rotary_factor": (0.5,),
    },
    counted_as=JITTER,
    harmless={
        "multi-token prediction, which transformers does not build": ("use_mtp", "num_mtp_modules", "mtp_transformer_layers"),
        "attention of the older MiniMax models": ("attn_type_list",),
    },
)  # fmt: skip
_MODULES = ("mlp", "mlp.gate", "mlp.experts", "mlp.experts.act_fn")
FAMILIES = {
    "mixtral": Definition(
        _layer(MIXTRAL), _mixtral, _MIXTRAL, expert_modules=before_and_after(ATTENTION_MODULES, _MODULES)
    ),
    "olmoe": Definition(
        _layer(f"{OLMOE}, OlmoeDecoderLayer.forward", _OLMOE_ATTENTION.run), _with_joint_norms, _OLMOE,
        expert_modules=before_and_after(WITH_NORMS, _MODULES),
    ),
    "minimax_m2": Definition(
        _layer(f"{MINIMAX}, MiniMaxM2DecoderLayer.forward", _MINIMAX_ATTENTION.run), _with_joint_norms, _MINIMAX,
        expert_modules=before_and_after(WITH_NORMS, _MODULES), tables=HALF_TABLES,
    ),
    "qwen3_moe": Definition(
        _layer(QWEN3), _qwen3_moe, _QWEN3_MOE, before_and_after(WITH_NORMS, gated_modules("mlp")),
        before_and_after(WITH_NORMS, _MODULES),
    ),
}  # fmt: skip
