"""GLM-4 MoE (GLM-4.5 to 4.7), dots.llm1, Solar Open, Hunyuan 3, K-EXAONE: grouped-query attention with DeepSeek-V3's experts.

GLM-4 MoE rotates half of each head; its larger models also normalise queries and keys over each head. Every layer of Solar Open
has experts. Hunyuan 3 adds the outputs of routed and shared experts in fp32. In K-EXAONE every fourth layer has full attention
without rotary positions, and all other layers have a sliding window.
"""

from functools import partial

from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.attention import Attended
from zeroplan.transformer.families.decoder import HALF, LLAMA_NORM, Attention, Layer, gated_mlp, layer, rotated
from zeroplan.transformer.families.deepseek import CONFIG, EXPERT_MODULES, logits_of, mlp, routed_and_shared
from zeroplan.transformer.families.definition import HALF_TABLES, Around, Block, Definition
from zeroplan.transformer.families.experts import Routing, biased_router, routed_experts
from zeroplan.transformer.families.keys import SIZES
from zeroplan.transformer.families.llama import WITH_NORMS, attention
from zeroplan.transformer.families.module_names import ATTENTION_MODULES, WITH_LATE_NORMS, before_and_after, gated_modules
from zeroplan.transformer.families.tape import Site, Tape, Value
from zeroplan.transformer.parameters import Layout
from zeroplan.transformer.params_gated import attention_of, gated, head_norms, patterned, two_norms, with_experts
from zeroplan.transformer.symbols import m, n

GLM4_MOE = "transformers 5.23, models/glm4_moe/modeling_glm4_moe.py"
SOLAR = "transformers 5.23, models/solar_open/modeling_solar_open.py"
HY3 = "transformers 5.23, models/hy_v3/modeling_hy_v3.py"
EXAONE = "transformers 5.23, models/exaone_moe/modeling_exaone_moe.py"
DOTS1 = "transformers 5.23, models/dots1/modeling_dots1.py"
_PLAIN = Attention(
    f"{GLM4_MOE}, Glm4MoeAttention.forward", joined=True,
    rotated=partial(rotated, source=f"{GLM4_MOE}, apply_rotary_pos_emb", partly=HALF),
)  # fmt: skip


def _attention(tape: Tape, normal: Value, block: Block) -> Attended:
    return (_PLAIN._replace(norm=LLAMA_NORM) if block.head_norms else _PLAIN).run(tape, normal, block)


# --- Hunyuan 3 ---------------------------------------------------------------------------------------------------------------

_OF_EXAONE = Attention(f"{EXAONE}, ExaoneMoeAttention.forward", norm=LLAMA_NORM)
_OF_HUNYUAN = Attention(f"{HY3}, HYV3Attention.forward", norm=LLAMA_NORM)


def _hunyuan_mlp(tape: Tape, normal: Value, block: Block) -> Value:
    """Run the MLP. Routed and shared experts and the router read one view; fp32 copies of both outputs are added."""
    source = f"{HY3}, HYV3MoE.forward"
    if not block.routed:
        return gated_mlp(tape, normal, block, f"{HY3}, HYV3MLP.forward")
    flat = op.view(tape, normal, Site("experts: their input", source))
    routing = _hunyuan_router(tape, flat, block)
    routed = routed_experts(tape, flat, routing.weights, block)
    first = op.cast(tape, routed, 4, Site("output of the routed experts", source))
    shared = gated_mlp(tape, flat, block, source, width=n * m, prefix="shared experts: ")
    second = op.cast(tape, shared, 4, Site("output of the shared experts", source))
    tape.release(shared)
    total = op.add(tape, first, second, "output of all experts, fp32", source)
    tape.release(first, second)
    made = op.cast(tape, total, normal.dtype, Site("output of routed and shared experts", source))
    tape.drop(routing.indices)
    tape.release(total, flat, routed, routing.weights, routing.logits)
    return made


def _hunyuan_router(tape: Tape, flat: Value, block: Block) -> Routing:
    """Run the router. It picks experts by sigmoid plus bias, and divides the sigmoids by their sum, not in place."""
    source = f"{HY3}, HYV3TopKRouter.forward"
    logits = logits_of(tape, flat, block)
    return biased_router(tape, logits, block, source)


# --- parameters, and the keys of config.json ---------------------------------------------------------------------------------


def _tensors(model: ModelSpec) -> Layout:
    output_bias = False if model.family in ("glm4_moe", "solar_open") else None
    norms = head_norms(model) if model.head_norms else ()
    return with_experts(
        model,
        (*attention_of(model, bias=model.attention_bias, output_bias=output_bias), *norms),
        partial(routed_and_shared, model),
    )


def _hy_v3(model: ModelSpec) -> Layout:
    attention = (*attention_of(model, bias=model.attention_bias), *head_norms(model))
    return with_experts(model, attention, partial(routed_and_shared, model, router_first=True))


def _exaone(model: ModelSpec) -> Layout:
    attention, both = (*attention_of(model), *head_norms(model)), two_norms(model)
    dense = (*attention, *gated("mlp", model, model.intermediate_size), *both)
    if model.moe is None:
        return patterned(model, {"dense": dense})
    routed = (*attention, *routed_and_shared(model, model.moe), *both)
    return patterned(model, {"local": routed, "global": routed, "dense": dense})


_REQUIRED = (*SIZES, "num_experts", "num_experts_per_tok", "moe_intermediate_size", "num_shared_experts", "num_dense_layers")
_GLM = CONFIG._replace(
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8},
    required=_REQUIRED,
    only={"norm_topk_prob": (True,), "partial_rotary_factor": (0.5,)},
    read=("use_qk_norm",),
)
_DOTS = CONFIG._replace(
    defaults={
        "max_position_embeddings": 2048, "sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 62,
        "num_dense_layers": 0,
    },
    required=_REQUIRED[:-1],
    optional_window=True,
    only={"scoring_func": ("noaux_tc", "sigmoid")},
    counted_as={
        **CONFIG.counted_as, "norm_topk_prob": (True, "without the division the router saves some bytes per token less"),
    },
    assumed={"norm_topk_prob": False},
)  # fmt: skip
_HY3 = CONFIG._replace(
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 128, "num_shared_experts": 1},
    required=_REQUIRED[:-2],
    keys={"num_experts": ("num_experts", "num_local_experts")},
    only={"enable_moe_fp32_combine": (True,), "mlp_bias": (False,)},
    read=("mlp_layer_types",),
    harmless={
        "numbers in a formula, which change no tensor": ("router_scaling_factor",),
        "multi-token prediction, which transformers does not build": ("num_nextn_predict_layers", "num_mtp_layers"),
    },
)
_EXAONE = CONFIG._replace(
    defaults={
        "max_position_embeddings": 2048, "num_key_value_heads": 32, "sliding_window": 4096, "num_shared_experts": 1,
    },
    fixed={"attention_bias": False, "mlp_bias": False},
    required=_REQUIRED[:-2],
    keys={},
    only={"norm_topk_prob": (True,), "sliding_window_pattern": (4, "LLLG")},
    not_null=("sliding_window",),
    read=("mlp_layer_types", "first_k_dense_replace"),
    harmless={
        **{why: keys for why, keys in CONFIG.harmless.items() if "made of" not in why},
        "of LG's own code": ("is_moe_layer", "first_last_k_dense_replace", "scoring_func", "topk_method"),
    },
)  # fmt: skip
_SOLAR = CONFIG._replace(
    defaults={
        "max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "num_shared_experts": 1, "intermediate_size": 1280,
    },
    required=tuple(size for size in SIZES if size != "intermediate_size"),
    keys={**CONFIG.keys, "intermediate_size": ("moe_intermediate_size",)},
    only={"norm_topk_prob": (True,), "first_k_dense_replace": (0,), "use_qk_norm": (False,), "partial_rotary_factor": (1.0,)},
    harmless={**CONFIG.harmless, "read by no layer of the class": ("intermediate_size",)},
)  # fmt: skip
FAMILIES = {
    "glm4_moe": Definition(
        layer(Layer(LLAMA_NORM, _attention, mlp, f"{GLM4_MOE}, Glm4MoeDecoderLayer.forward")), _tensors, _GLM,
        before_and_after(WITH_LATE_NORMS, gated_modules("mlp")), before_and_after(WITH_LATE_NORMS, EXPERT_MODULES), HALF_TABLES,
    ),
    "dots1": Definition(
        layer(Layer(LLAMA_NORM, attention, mlp, f"{DOTS1}, Dots1DecoderLayer.forward")), _tensors, _DOTS,
        before_and_after(WITH_NORMS, gated_modules("mlp")), before_and_after(WITH_NORMS, EXPERT_MODULES),
    ),
    "hy_v3": Definition(
        layer(Layer(LLAMA_NORM, _OF_HUNYUAN.run, _hunyuan_mlp, f"{HY3}, HYV3DecoderLayer.forward")), _hy_v3, _HY3,
        before_and_after(WITH_LATE_NORMS, gated_modules("mlp")), before_and_after(WITH_LATE_NORMS, EXPERT_MODULES),
    ),
    "exaone_moe": Definition(
        layer(Layer(LLAMA_NORM, _OF_EXAONE.run, mlp, f"{EXAONE}, ExaoneMoeDecoderLayer.forward")), _exaone, _EXAONE,
        before_and_after(WITH_LATE_NORMS, gated_modules("mlp")), before_and_after(WITH_LATE_NORMS, EXPERT_MODULES),
        around=Around(masks=2),
    ),
    "solar_open": Definition(
        layer(Layer(LLAMA_NORM, attention, mlp, f"{SOLAR}, SolarOpenDecoderLayer.forward")), _tensors, _SOLAR,
        expert_modules=before_and_after(ATTENTION_MODULES, EXPERT_MODULES),
    ),
}  # fmt: skip
