"""The architectures that zeroplan counts exactly, and their traits.

A family has a row here and a file in ``zeroplan/transformer/families``: the forward of its block, its tensors, and the keys of
its ``config.json``. Source of every row: ``modeling_<family>.py`` and ``configuration_<family>.py`` of transformers 5.23.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Final, Literal, get_args

from zeroplan.spec.traits import MLP, Activation, Layers, Modelled, Traits

#: Families by their ``model_type``.
Family = Literal[
    "llama", "mistral", "ministral3", "cwm", "qwen2", "qwen3", "seed_oss", "smollm3", "hunyuan_v1_dense", "arcee", "jais2",
    "helium", "stablelm", "gemma", "gemma2", "gemma3_text", "gemma4_text", "phi3", "olmo2", "olmo3", "exaone4", "granite",
    "ernie4_5", "glm", "glm4", "cohere", "cohere2", "hyperclovax", "starcoder2", "gpt2", "gpt_neox", "phi",
    "opt", "bloom", "mixtral", "granitemoe", "olmoe", "minimax_m2", "minimax", "hunyuan_v1_moe", "ernie4_5_moe", "qwen2_moe",
    "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "llama4_text", "granitemoehybrid", "nemotron_h", "bamba",
    "falcon_h1", "deepseek_v2", "deepseek_v3", "kimi_linear", "deepseek_v32", "glm_moe_dsa", "mistral4", "glm4_moe_lite",
    "glm4_moe", "dots1", "solar_open", "hy_v3", "exaone_moe", "gpt_oss", "lfm2", "lfm2_moe", "apertus", "falcon",
    "olmo_hybrid", "internlm3", "youtu",
]  # fmt: skip

#: The names of an expert's layers of Mixtral in transformers 4.
OF_MIXTRAL: Final = ("w1", "w3", "w2")
_JOINT, _ALONE = Layers(mlp=("gate_up_proj", "down_proj")), Layers(mlp=())
_GATED_DELTA = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
_LATENT = Layers(("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"))
_UNGATED = Layers(mlp=("up_proj", "down_proj"))
_JOINT_QKV = Layers(("query_key_value", "dense"), ("dense_h_to_4h", "dense_4h_to_h"))
_SHORT = Layers(("q_proj", "k_proj", "v_proj", "out_proj"), ("w1", "w3", "w2"), ("in_proj",))
MAMBA = Layers(others=("in_proj", "out_proj"))
#: Nemotron 3's projections around its experts, where these have a latent.
LATENT_OF_EXPERTS = ("fc1_latent_proj", "fc2_latent_proj")
#: Gemma 4's layers around the embedding of each layer, and the one before the blocks that all layers read (E2B and E4B).
OF_EMBEDDINGS, TO_ALL_LAYERS = ("per_layer_input_gate", "per_layer_projection"), "per_layer_model_projection"
#: NeMo AutoModel's projection in front of a prediction's attention.
JOINING = "eh_proj"
_OF_DELTA, OF_MAMBA = "flash-linear-attention and causal-conv1d", "mamba_ssm and causal-conv1d"

_IN_ONE_DTYPE: frozenset[Modelled] = frozenset({"adapters", "quantised adapters"})
_LORA: frozenset[Modelled] = _IN_ONE_DTYPE | {"adapters under autocast"}
_WITH_EXPERTS: frozenset[Modelled] = _LORA | {"experts' adapters under autocast"}
_DENSE: frozenset[Modelled] = _LORA | {"float8", "offloaded activations"}
_LLAMA_LIKE: frozenset[Modelled] = _DENSE | {
    "adapters everywhere", "frozen parts", "older releases", "split", "compiled blocks", "pipeline", "rounded weights", "megatron",
    "megatron adapters", "liger",
}  # fmt: skip

TRAITS: Mapping[str, Traits] = {
    "llama": Traits("llama", peft_targets="q_proj,v_proj", modelled=_LLAMA_LIKE | {"automodel", "automodel blocks"}),
    "mistral": Traits("llama", window=True, peft_targets="q_proj,v_proj", modelled=_LLAMA_LIKE),
    "ministral3": Traits("llama", window=True, modelled=_DENSE | {"automodel", "automodel blocks"}),
    "cwm": Traits("llama", window=True, global_every=4, global_first=True, modelled=_DENSE),
    "qwen2": Traits(
        "llama", biased_output=False, window=True, late_window=True, peft_targets="q_proj,v_proj",
        modelled=_LLAMA_LIKE | {"automodel", "automodel blocks"},
    ),
    "qwen3": Traits(
        "llama", head_norms=True, window=True, late_window=True, peft_targets="q_proj,v_proj",
        modelled=(_LLAMA_LIKE - {"older releases"}) | {"automodel blocks"},
    ),
    "seed_oss": Traits("llama", biased_output=False, modelled=_DENSE | {"adapters everywhere", "split", "pipeline"}),
    "smollm3": Traits("llama", global_every=4, global_without_rotary=True, modelled=_DENSE | {"adapters everywhere", "liger"}),
    "hunyuan_v1_dense": Traits("llama", head_norms=True, modelled=_DENSE),
    "arcee": Traits("llama", "relu2", gated=False, layers=_UNGATED, modelled=_DENSE),
    "jais2": Traits(
        "llama", "relu2", layer_norms=True, gated=False, layers=_UNGATED,
        modelled=_IN_ONE_DTYPE | {"float8", "offloaded activations"},
    ),
    "helium": Traits("helium", biased_output=False, heads_fill_hidden=True, modelled=_DENSE),
    "stablelm": Traits(
        "stablelm", biased_output=False, heads_fill_hidden=True, rotary_divisor=4, layer_norms=True,
        modelled=_IN_ONE_DTYPE | {"float8", "offloaded activations"},
    ),
    "gemma": Traits("gemma", "gelu_pytorch_tanh", embedding_scale=True, modelled=_LORA | {"offloaded activations", "liger"}),
    "gemma2": Traits(
        "gemma", "gelu_pytorch_tanh", window=True, global_every=2, sdpa=False, caps_scores=True, caps_logits=True, norms=4,
        embedding_scale=True, peft_targets="q_proj,v_proj",
        modelled=_DENSE | {"adapters everywhere", "liger"},
    ),
    "gemma3_text": Traits(
        "gemma", "gelu_pytorch_tanh", window=True, global_every=6, head_norms=True, angles_of_kinds=True,
        norms=4, embedding_scale=True, peft_targets="q_proj,v_proj", modelled=_DENSE | {"adapters everywhere"},
    ),
    "gemma4_text": Traits(
        "gemma4", "gelu_pytorch_tanh", window=True, global_every=6, head_norms=True, angles_of_kinds=True,
        experts="on this rank", may_be_dense=True, caps_logits=True, norms=4, embedding_scale=True,
        layers=Layers(others=("proj", *OF_EMBEDDINGS, TO_ALL_LAYERS)),
        modelled=_LORA,
    ),
    "phi3": Traits(
        "phi3", window=True, layers=Layers(("qkv_proj", "o_proj"), ("gate_up_proj", "down_proj")),
        modelled=_DENSE | {"pipeline", "liger"},
    ),
    "olmo2": Traits("olmo2", modelled=_DENSE | {"adapters everywhere", "frozen parts", "liger"}),
    "olmo3": Traits("olmo2", window=True, global_every=4, angles_of_kinds=True, modelled=_DENSE),
    "exaone4": Traits("olmo2", window=True, global_every=4, global_without_rotary=True, head_norms=True, modelled=_DENSE),
    "granite": Traits(
        "llama", divides_logits=True, modelled=_DENSE | {"adapters everywhere", "frozen parts", "older releases"},
    ),
    "hyperclovax": Traits("llama", divides_logits=True, norms=4, modelled=_DENSE),
    "ernie4_5": Traits("ernie4_5", modelled=_LORA | {"float8"}),
    "glm": Traits("glm4", rotary_divisor=2, biased_output=False, layers=_JOINT, modelled=_DENSE),
    "glm4": Traits("glm4", rotary_divisor=2, biased_output=False, norms=4, layers=_JOINT, modelled=_DENSE),
    "cohere": Traits("cohere", divides_logits=True, head_norms=None, modelled=_DENSE),
    "cohere2": Traits(
        "cohere", heads_fill_hidden=True, window=True, global_every=4, global_without_rotary=True, divides_logits=True,
        modelled=_DENSE,
    ),
    "starcoder2": Traits(
        "starcoder2", "gelu_pytorch_tanh", window=True, layer_norms=True, gated=False, layers=Layers(mlp=("c_fc", "c_proj")),
        modelled=_IN_ONE_DTYPE | {"float8", "offloaded activations"},
    ),
    "gpt2": Traits(
        "gpt2", "gelu_new", learned_positions=True, plain_heads=True, layer_norms=True, gated=False,
        layers=Layers(("c_attn", "c_proj"), ("c_fc", "c_proj")),
        modelled=frozenset({"adapters", "offloaded activations", "megatron"}),
    ),
    "gpt_neox": Traits(
        "gpt_neox", "gelu", plain_heads=True, rotary_divisor=4, layer_norms=True, gated=False, layers=_JOINT_QKV,
        modelled=_IN_ONE_DTYPE | {"offloaded activations", "pipeline"},
    ),
    "phi": Traits(
        "phi", "gelu_new", plain_heads=True, rotary_width=32, head_bias=True,
        layer_norms=True, gated=False, layers=Layers(("q_proj", "k_proj", "v_proj", "dense"), ("fc1", "fc2")),
        modelled=_IN_ONE_DTYPE,
    ),
    "opt": Traits(
        "opt", "relu", learned_positions=True, plain_heads=True,
        layer_norms=True, gated=False, layers=Layers(("q_proj", "k_proj", "v_proj", "out_proj"), ("fc1", "fc2")),
        modelled=_IN_ONE_DTYPE | {"offloaded activations"},
    ),
    "bloom": Traits(
        "bloom", "gelu_new", other_activations=False, alibi=True, plain_heads=True, sdpa=False, layer_norms=True, gated=False,
        layers=_JOINT_QKV,
        modelled=_IN_ONE_DTYPE | {"megatron"},
    ),
    "mixtral": Traits(
        "mixtral", other_activations=False, window=True, experts="dispatched", one_width=True, routes_in_32_bits=True,
        layers=Layers(mlp=OF_MIXTRAL), converted=OF_MIXTRAL, peft_targets="q_proj,v_proj",
        modelled=_WITH_EXPERTS | {"quantised adapters under fsdp1", "offloaded activations", "older releases", "split",
        "pipeline", "megatron", "megatron adapters", "liger"},
    ),
    "granitemoe": Traits(
        "granitemoe", other_activations=False, experts="dispatched", one_width=True, divides_logits=True, layers=_ALONE,
        stacked=True, modelled=_WITH_EXPERTS,
    ),
    "olmoe": Traits(
        "mixtral", other_activations=False, heads_fill_hidden=True, experts="dispatched", one_width=True, converted=MLP,
        modelled=_IN_ONE_DTYPE,
    ),
    "minimax_m2": Traits(
        "mixtral", other_activations=False, experts="dispatched", one_width=True, routes_in_32_bits=True, rotary_divisor=2,
        router_bias="model's dtype", layers=Layers(mlp=OF_MIXTRAL), converted=OF_MIXTRAL,
        modelled=_WITH_EXPERTS | {"pipeline", "automodel", "automodel blocks"},
    ),
    "minimax": Traits(
        "minimax", other_activations=False, linear=True, pattern="M*", experts="dispatched", one_width=True,
        routes_in_32_bits=True,
    ),
    "hunyuan_v1_moe": Traits(
        "hunyuan_moe", other_activations=False, experts="dispatched", one_width=True, head_norms=True, wide_router="yes",
    ),
    "ernie4_5_moe": Traits(
        "ernie4_5", other_activations=False, experts="dispatched", shared_experts=True, dense_layers=True, wide_router="yes",
    ),
    "qwen2_moe": Traits(
        "qwen3_next", other_activations=False, experts="dispatched", shared_experts=True, biased_output=False,
        layers=Layers(others=("shared_expert_gate",)), stacked=True, modelled=_WITH_EXPERTS | {"megatron"},
    ),
    "qwen3_moe": Traits(
        "mixtral", other_activations=False, window=True, experts="dispatched", head_norms=True, dense_layers=True,
        converted=MLP, modelled=_WITH_EXPERTS | {"quantised adapters under fsdp1", "prime-rl", "offloaded activations", "split",
        "pipeline", "megatron", "megatron adapters", "liger", "automodel", "automodel blocks"},
    ),
    "qwen3_next": Traits(
        "qwen3_next", other_activations=False, global_every=4, linear=True, experts="dispatched", shared_experts=True,
        rotary_divisor=4, layers=Layers(others=("in_proj_qkvz", "in_proj_ba", "out_proj", "shared_expert_gate")), converted=MLP,
        kernels=_OF_DELTA, modelled=_WITH_EXPERTS,
    ),
    "qwen3_5_text": Traits(
        "qwen3_next", other_activations=False, global_every=4, linear=True, rotary_divisor=4, layers=Layers(others=_GATED_DELTA),
        kernels=_OF_DELTA, modelled=_LORA,
    ),
    "qwen3_5_moe_text": Traits(
        "qwen3_next", other_activations=False, global_every=4, linear=True, experts="dispatched", shared_experts=True,
        rotary_divisor=4, one_width=True, layers=Layers(others=(*_GATED_DELTA, "shared_expert_gate")), stacked=True,
        kernels=_OF_DELTA, modelled=_WITH_EXPERTS,
    ),
    "llama4_text": Traits(
        "llama4", other_activations=False, window=True, pattern="LGD", global_without_rotary=True, experts="on this rank",
        head_norms=None, layers=Layers(others=("router",)), modelled=_IN_ONE_DTYPE,
    ),
    "granitemoehybrid": Traits(
        "granitemoehybrid", other_activations=False, linear=True, pattern="M*", experts="dispatched", may_be_dense=True,
        rotary_optional=True, divides_logits=True, layers=Layers(mlp=("input_linear", "output_linear"), others=MAMBA.others),
        kernels=OF_MAMBA, modelled=_LORA,
    ),
    "nemotron_h": Traits(
        "nemotron_h", "relu2", other_activations=False, linear=True, pattern="M*-E", experts="dispatched", shared_experts=True,
        may_be_dense=True, rotary_optional=True, one_module=True, biased_output=False,
        gated=False, router_bias="model's dtype",
        layers=_UNGATED._replace(others=(*MAMBA.others, *LATENT_OF_EXPERTS, JOINING)), adapted_output=False,
        kernels=OF_MAMBA,
        modelled=_LORA | {"automodel"},
        wide_router="since 5.24",
    ),
    "bamba": Traits(
        "bamba", other_activations=False, linear=True, pattern="M*", rotary_divisor=2, layers=MAMBA, kernels=OF_MAMBA,
        modelled=_LORA,
    ),
    "falcon_h1": Traits(
        "falcon_h1", other_activations=False, linear=True, pattern="HN", one_kind=True, divides_logits=True, layers=MAMBA,
        adapted_output=False, kernels=OF_MAMBA, modelled=_LORA,
    ),
    "deepseek_v2": Traits(
        "deepseek", other_activations=False, experts="dispatched", shared_experts=True, dense_layers=True, latent=True,
        layers=_LATENT, converted=MLP, modelled=_IN_ONE_DTYPE,
        wide_router="since 5.24",
    ),
    "deepseek_v3": Traits(
        "deepseek", other_activations=False, experts="dispatched", shared_experts=True, dense_layers=True, latent=True,
        router_bias="model's dtype", layers=_LATENT, converted=MLP,
        modelled=_IN_ONE_DTYPE | {"pipeline", "megatron", "automodel", "automodel blocks"},
        wide_router="since 5.24",
    ),
    "kimi_linear": Traits(
        "kimi_linear", other_activations=False, linear=True, pattern="Mm*D", experts="dispatched", shared_experts=True,
        latent=True, router_bias="model's dtype", kernels=_OF_DELTA,
        wide_router="since 5.24",
    ),
    "deepseek_v32": Traits(
        "deepseek_sparse", other_activations=False, experts="dispatched", shared_experts=True, dense_layers=True, latent=True,
        indexed=True, router_bias="fp32", layers=_LATENT, converted=MLP, modelled=frozenset({"adapters"}),
        wide_router="since 5.24",
    ),
    "glm_moe_dsa": Traits(
        "deepseek_sparse", other_activations=False, experts="dispatched", shared_experts=True, dense_layers=True, latent=True,
        indexed=True, router_bias="fp32", layers=_LATENT, converted=MLP, modelled=frozenset({"adapters", "pipeline"}),
        wide_router="since 5.24",
    ),
    "mistral4": Traits(
        "deepseek", other_activations=False, experts="dispatched", shared_experts=True, dense_layers=True, latent=True,
        layers=_LATENT, modelled=_IN_ONE_DTYPE,
    ),
    "glm4_moe_lite": Traits(
        "deepseek", other_activations=False, experts="dispatched", shared_experts=True, dense_layers=True, latent=True,
        router_bias="fp32", layers=_LATENT, converted=MLP, modelled=_LORA | {"automodel", "automodel blocks"},
        wide_router="since 5.24",
    ),
    "glm4_moe": Traits(
        "glm4_moe", other_activations=False, experts="dispatched", shared_experts=True, dense_layers=True, head_norms=None,
        biased_output=False, rotary_divisor=2, router_bias="fp32", converted=MLP,
        modelled=_LORA | {"prime-rl", "pipeline", "automodel", "automodel blocks"},
        wide_router="since 5.24",
    ),
    "dots1": Traits(
        "glm4_moe", other_activations=False, experts="dispatched", shared_experts=True, dense_layers=True, head_norms=True,
        router_bias="model's dtype", converted=MLP, modelled=_IN_ONE_DTYPE | {"pipeline"},
        wide_router="since 5.24",
    ),
    "solar_open": Traits(
        "glm4_moe", other_activations=False, experts="dispatched", shared_experts=True, biased_output=False, one_width=True,
        router_bias="fp32", converted=MLP, modelled=_IN_ONE_DTYPE,
        wide_router="since 5.24",
    ),
    "hy_v3": Traits(
        "glm4_moe", other_activations=False, experts="dispatched", shared_experts=True, dense_layers=True, head_norms=True,
        router_bias="model's dtype", modelled=_IN_ONE_DTYPE | {"pipeline"},
        wide_router="since 5.24",
    ),
    "exaone_moe": Traits(
        "glm4_moe", other_activations=False, window=True, pattern="LGD", global_without_rotary=True, experts="dispatched",
        shared_experts=True, head_norms=True, router_bias="model's dtype", converted=MLP, modelled=_IN_ONE_DTYPE,
        wide_router="since 5.24",
    ),
    "gpt_oss": Traits(
        "gpt_oss", other_activations=False, window=True, experts="dispatched", one_width=True, sdpa=False, layers=_ALONE,
        stacked=True, transposed=True, modelled=_WITH_EXPERTS | {"automodel", "automodel blocks"},
    ),
    "lfm2": Traits(
        "lfm2", other_activations=False, pattern="C*", head_norms=True, layers=_SHORT,
        modelled=_LORA | {"offloaded activations"},
    ),
    "internlm3": Traits("llama", modelled=_LORA | {"offloaded activations"}),
    "youtu": Traits("deepseek", other_activations=False, latent=True, layers=_LATENT, modelled=_IN_ONE_DTYPE),
    "olmo_hybrid": Traits(
        "olmo_hybrid", other_activations=False, global_every=4, linear=True, rotary_optional=True,
        layers=Layers(others=("a_proj", "b_proj", "g_proj")), kernels=_OF_DELTA, modelled=_LORA,
    ),
    "apertus": Traits(
        "apertus", other_activations=False, head_norms=True, gated=False, layers=_UNGATED,
        modelled=frozenset({"adapters", "offloaded activations"}),
    ),
    "falcon": Traits(
        "falcon", "gelu", heads_fill_hidden=True, masks_all=True, layer_norms=True, gated=False, layers=_JOINT_QKV,
        modelled=frozenset({"adapters"}),
    ),
    "lfm2_moe": Traits(
        "lfm2", other_activations=False, pattern="C*cD", head_norms=True, experts="dispatched", router_bias="fp32",
        layers=_SHORT, modelled=_LORA,
    ),
}  # fmt: skip
FAMILIES: tuple[str, ...] = get_args(Family)
_OF_A_PROFILE = Traits("")


def traits_of(family: str) -> Traits:
    """Return a family's traits, for a profile those of a family of which nothing is known."""
    return TRAITS.get(family, _OF_A_PROFILE)


def families(having: Callable[[Traits], object]) -> tuple[str, ...]:
    """Return the families whose traits satisfy a condition.

    >>> families(lambda one: one.learned_positions)
    ('gpt2', 'opt')
    """
    return tuple([name for name in FAMILIES if having(TRAITS[name])])


@cache
def modelled(what: Modelled) -> tuple[str, ...]:
    """Return the families for which this is modelled.

    >>> modelled("prime-rl")
    ('qwen3_moe', 'glm4_moe')
    """
    return families(lambda one: what in one.modelled)


USUAL_ACTIVATION: Mapping[str, Activation] = {name: one.activation for name, one in TRAITS.items()}
FREE_ACTIVATION = families(lambda one: one.other_activations)
WINDOWED_FAMILIES = families(lambda one: one.window)
SOME_WINDOWED = families(lambda one: one.late_window)
LEARNED_POSITIONS = families(lambda one: one.learned_positions)
#: Families without rotary positions.
UNROTATED = families(lambda one: one.learned_positions or one.alibi)
LINEAR_FAMILIES = families(lambda one: one.linear)
PATTERNED = families(lambda one: one.pattern)
LATENT_FAMILIES = families(lambda one: one.latent)
MASKS_ALL = families(lambda one: one.masks_all or one.indexed)
INDEXED_FAMILIES = families(lambda one: one.indexed)
SHARED_EXPERTS = families(lambda one: one.shared_experts)
#: Families whose shared expert has its own width.
WIDE_SHARED_EXPERTS = families(lambda one: one.shared_experts and (one.file == "qwen3_next" or one.one_module))
#: Families whose class always builds a shared expert; without a width it would be as wide as a dense MLP (HYV3MLP).
ALWAYS_SHARED_EXPERTS = (*WIDE_SHARED_EXPERTS, "hy_v3")
MAY_BE_DENSE = families(lambda one: one.may_be_dense)
ONE_WIDTH_FAMILIES = families(lambda one: one.one_width)
MOE_FAMILIES = families(lambda one: one.experts != "none")
DISPATCHED_FAMILIES = families(lambda one: one.experts == "dispatched")
DENSE_LAYERS = families(lambda one: one.dense_layers)
HEAD_NORMS = families(lambda one: one.head_norms)
PLAIN_HEADS = families(lambda one: one.plain_heads)
#: Families whose heads are as wide as ``hidden_size`` together.
FILLING_HEADS = families(lambda one: one.plain_heads or one.heads_fill_hidden)
DIVIDED_LOGITS = families(lambda one: one.divides_logits)
WITHOUT_SDPA = families(lambda one: not one.sdpa)
GLOBAL_LAYERS: Mapping[str, int] = {name: one.global_every for name, one in TRAITS.items() if one.global_every is not None}


def is_global(family: str, layer: int) -> bool:
    """Return whether a layer (the first is 0) is the one of its period with full attention.

    >>> [is_global("gemma2", layer) for layer in range(4)], [is_global("cwm", layer) for layer in range(5)]
    ([False, True, False, True], [True, False, False, False, True])
    """
    every = GLOBAL_LAYERS[family]
    return layer % every == (0 if TRAITS[family].global_first else every - 1)
