"""The architectures that zeroplan counts exactly, and their traits.

A family has a row here and a file in ``zeroplan/transformer/families``: the forward of its block, its tensors, and the keys of
its ``config.json``. Source of every row: ``modeling_<family>.py`` and ``configuration_<family>.py`` of transformers 5.23.
"""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, get_args

#: Families by their ``model_type``.
Family = Literal[
    "llama", "mistral", "ministral3", "cwm", "qwen2", "qwen3", "seed_oss", "smollm3", "hunyuan_v1_dense", "arcee",
    "jais2", "helium", "stablelm", "gemma", "gemma2",
    "gemma3_text", "gemma4_text", "phi3", "olmo2", "olmo3", "exaone4", "granite", "ernie4_5", "glm", "glm4", "cohere",
    "cohere2", "starcoder2", "gpt2", "gpt_neox", "phi", "opt", "bloom", "mixtral", "granitemoe", "olmoe", "minimax_m2", "minimax",
    "hunyuan_v1_moe", "ernie4_5_moe", "qwen2_moe",
    "qwen3_moe", "qwen3_next",
    "qwen3_5_text", "qwen3_5_moe_text", "llama4_text", "granitemoehybrid", "nemotron_h", "bamba", "falcon_h1", "deepseek_v2",
    "deepseek_v3", "kimi_linear", "deepseek_v32", "glm_moe_dsa", "mistral4", "glm4_moe_lite", "glm4_moe", "dots1", "solar_open",
    "hy_v3", "exaone_moe",
    "gpt_oss", "lfm2", "lfm2_moe", "apertus", "falcon", "olmo_hybrid", "internlm3",
    "youtu",
]  # fmt: skip
#: Activation functions of an MLP that are modelled, by transformers' names (``activations.py``, ``ACT2CLS``).
Activation = Literal[
    "silu", "swish", "gelu", "gelu_pytorch_tanh", "gelu_new", "gelu_fast", "quick_gelu", "mish", "hardswish", "leaky_relu",
    "relu", "relu6", "relu2", "sigmoid", "tanh",
]  # fmt: skip
#: Activation functions that are one operator which saves only its input, like SiLU.
SAVES_ITS_INPUT: tuple[str, ...] = ("silu", "swish", "gelu", "gelu_pytorch_tanh", "mish", "hardswish", "leaky_relu", "relu6")


class Traits(NamedTuple):
    """The differences between a family and Llama."""

    file: str
    """Its file in ``zeroplan/transformer/families``."""
    activation: Activation = "silu"
    """The activation function of its published models, and its class's default."""
    other_activations: bool = True
    """A config may choose another activation function."""
    window: bool = False
    """It may have a sliding window."""
    global_every: int | None = None
    """The period of alternating layers: one layer per period has full attention, the others a window or linear attention."""
    global_first: bool = False
    """That layer is the first of each period, else the last."""
    linear: bool = False
    """Its other layers have linear attention."""
    pattern: str = ""
    """A config gives the kind of each layer; the letters of the kinds that it may have (``KINDS_OF_LETTERS``)."""
    one_module: bool = False
    """Each block is one module behind a norm: a state space, attention, an MLP, or experts."""
    one_kind: bool = False
    """All layers are of one kind: attention beside a state space, gated or normalised."""
    may_be_dense: bool = False
    """A model of the family may have no experts."""
    unturned_models: bool = False
    """A config may turn rotary positions off."""
    unturned: bool = False
    """That one layer per period has no rotary positions."""
    experts: Literal["none", "on this rank", "dispatched"] = "none"
    """Whether its blocks have experts; ``dispatched``: experts on several ranks are modelled too."""
    shared_experts: bool = False
    """It may have shared experts, which every token visits."""
    routes_in_32_bits: bool = False
    """The router's weights stay in fp32, and therefore the experts' weighted outputs as well."""
    wide_router: bool = False
    """The router's weights are fp32 in a model of 16 bits, unless the engine casts them."""
    dense_layers: bool = False
    """Its first layers may have a dense MLP."""
    one_width: bool = False
    """Its experts are as wide as ``intermediate_size``."""
    learned_positions: bool = False
    """A learned position embedding is added to the token's embedding."""
    biased_output: bool = True
    """If attention's projections have biases, the output projection has one too."""
    head_norms: bool | None = False
    """Queries and keys are normalised over each head; None: the config decides."""
    plain_heads: bool = False
    """The head width is hidden / heads, and there are as many key/value heads as query heads."""
    divides_logits: bool = False
    """The model divides its logits by a constant before the loss. Liger has no fused loss for that."""
    angles_of_kinds: bool = False
    """Layers with a window have their own rotary tables."""
    turned: int = 1
    """Rotary positions rotate 1/``turned`` of each head."""
    turned_width: int = 0
    """Or they rotate this many elements of each head."""
    head_bias: bool = False
    """The head has a bias."""
    latent: bool = False
    """It has multi-head latent attention."""
    indexed: bool = False
    """An indexer, which gets no gradient, picks the keys of each query (DeepSeek's sparse attention)."""
    masks_all: bool = False
    """Every layer gets a mask for ``scaled_dot_product_attention``, whatever the batch."""
    sdpa: bool = True
    """transformers runs it with ``scaled_dot_product_attention`` (``_supports_sdpa``), else with eager attention."""


TRAITS: Mapping[str, Traits] = {
    "llama": Traits("llama"),
    "mistral": Traits("llama", window=True),
    "ministral3": Traits("llama", window=True),
    "cwm": Traits("llama", window=True, global_every=4, global_first=True),
    "qwen2": Traits("llama", biased_output=False, window=True),
    "qwen3": Traits("llama", head_norms=True, window=True),
    "seed_oss": Traits("llama", biased_output=False),
    "smollm3": Traits("llama", global_every=4, unturned=True),
    "hunyuan_v1_dense": Traits("llama", head_norms=True),
    "arcee": Traits("llama", "relu2"),
    "jais2": Traits("llama", "relu2"),
    "helium": Traits("helium", biased_output=False),
    "stablelm": Traits("stablelm", biased_output=False, turned=4),
    "gemma": Traits("gemma", "gelu_pytorch_tanh"),
    "gemma2": Traits("gemma", "gelu_pytorch_tanh", window=True, global_every=2, sdpa=False),
    "gemma3_text": Traits("gemma", "gelu_pytorch_tanh", window=True, global_every=6, head_norms=True, angles_of_kinds=True),
    "gemma4_text": Traits(
        "gemma4", "gelu_pytorch_tanh", window=True, global_every=6, head_norms=True, angles_of_kinds=True, experts="on this rank",
        may_be_dense=True,
    ),
    "phi3": Traits("phi3", window=True),
    "olmo2": Traits("olmo2"),
    "olmo3": Traits("olmo2", window=True, global_every=4, angles_of_kinds=True),
    "exaone4": Traits("olmo2", window=True, global_every=4, unturned=True, head_norms=True),
    "granite": Traits("llama", divides_logits=True),
    "ernie4_5": Traits("ernie4_5"),
    "glm": Traits("glm4", turned=2, biased_output=False),
    "glm4": Traits("glm4", turned=2, biased_output=False),
    "cohere": Traits("cohere", divides_logits=True, head_norms=None),
    "cohere2": Traits("cohere", window=True, global_every=4, unturned=True, divides_logits=True),
    "starcoder2": Traits("starcoder2", "gelu_pytorch_tanh", window=True),
    "gpt2": Traits("gpt2", "gelu_new", learned_positions=True, plain_heads=True),
    "gpt_neox": Traits("gpt_neox", "gelu", plain_heads=True, turned=4),
    "phi": Traits("phi", "gelu_new", plain_heads=True, turned_width=32, head_bias=True),
    "opt": Traits("opt", "relu", learned_positions=True, plain_heads=True),
    "bloom": Traits("bloom", "gelu_new", other_activations=False, plain_heads=True, sdpa=False),
    "mixtral": Traits(
        "mixtral", other_activations=False, window=True, experts="dispatched", one_width=True, routes_in_32_bits=True
    ),
    "granitemoe": Traits("granitemoe", other_activations=False, experts="dispatched", one_width=True, divides_logits=True),
    "olmoe": Traits("mixtral", other_activations=False, experts="dispatched", one_width=True),
    "minimax_m2": Traits(
        "mixtral", other_activations=False, experts="dispatched", one_width=True, routes_in_32_bits=True, turned=2
    ),
    "minimax": Traits(
        "minimax", other_activations=False, linear=True, pattern="M*", experts="dispatched", one_width=True, routes_in_32_bits=True
    ),
    "hunyuan_v1_moe": Traits(
        "hunyuan_moe", other_activations=False, experts="dispatched", one_width=True, head_norms=True, wide_router=True
    ),
    "ernie4_5_moe": Traits(
        "ernie4_5", other_activations=False, experts="dispatched", shared_experts=True, dense_layers=True, wide_router=True
    ),
    "qwen2_moe": Traits(
        "qwen3_next", other_activations=False, experts="dispatched", shared_experts=True, biased_output=False
    ),
    "qwen3_moe": Traits(
        "mixtral", other_activations=False, window=True, experts="dispatched", head_norms=True, dense_layers=True
    ),
    "qwen3_next": Traits(
        "qwen3_next", other_activations=False, global_every=4, linear=True, experts="dispatched", shared_experts=True, turned=4,
    ),
    "qwen3_5_text": Traits("qwen3_next", other_activations=False, global_every=4, linear=True, turned=4),
    "qwen3_5_moe_text": Traits(
        "qwen3_next", other_activations=False, global_every=4, linear=True, experts="dispatched", shared_experts=True, turned=4,
        one_width=True,
    ),
    "llama4_text": Traits(
        "llama4", other_activations=False, window=True, pattern="LGD", unturned=True, experts="on this rank", head_norms=None
    ),
    "granitemoehybrid": Traits(
        "granitemoehybrid", other_activations=False, linear=True, pattern="M*", experts="dispatched", may_be_dense=True,
        unturned_models=True, divides_logits=True,
    ),
    "nemotron_h": Traits(
        "nemotron_h", "relu2", other_activations=False, linear=True, pattern="M*-E", experts="dispatched", shared_experts=True,
        may_be_dense=True, unturned_models=True, one_module=True, biased_output=False,
    ),
    "bamba": Traits("bamba", other_activations=False, linear=True, pattern="M*", turned=2),
    "falcon_h1": Traits(
        "falcon_h1", other_activations=False, linear=True, pattern="HN", one_kind=True, divides_logits=True
    ),
    "deepseek_v2": Traits(
        "deepseek", other_activations=False, experts="dispatched", shared_experts=True, dense_layers=True, latent=True
    ),
    "deepseek_v3": Traits(
        "deepseek", other_activations=False, experts="dispatched", shared_experts=True, dense_layers=True, latent=True
    ),
    "kimi_linear": Traits(
        "kimi_linear", other_activations=False, linear=True, pattern="Mm*D", experts="dispatched", shared_experts=True, latent=True,
    ),
    "deepseek_v32": Traits(
        "deepseek_sparse", other_activations=False, experts="dispatched", shared_experts=True, dense_layers=True, latent=True,
        indexed=True,
    ),
    "glm_moe_dsa": Traits(
        "deepseek_sparse", other_activations=False, experts="dispatched", shared_experts=True, dense_layers=True, latent=True,
        indexed=True,
    ),
    "mistral4": Traits(
        "deepseek", other_activations=False, experts="dispatched", shared_experts=True, dense_layers=True, latent=True
    ),
    "glm4_moe_lite": Traits(
        "deepseek", other_activations=False, experts="dispatched", shared_experts=True, dense_layers=True, latent=True
    ),
    "glm4_moe": Traits(
        "glm4_moe", other_activations=False, experts="dispatched", shared_experts=True, dense_layers=True, head_norms=None,
        biased_output=False, turned=2,
    ),
    "dots1": Traits(
        "glm4_moe", other_activations=False, experts="dispatched", shared_experts=True, dense_layers=True, head_norms=True
    ),
    "solar_open": Traits(
        "glm4_moe", other_activations=False, experts="dispatched", shared_experts=True, biased_output=False, one_width=True
    ),
    "hy_v3": Traits(
        "glm4_moe", other_activations=False, experts="dispatched", shared_experts=True, dense_layers=True, head_norms=True
    ),
    "exaone_moe": Traits(
        "glm4_moe", other_activations=False, window=True, pattern="LGD", unturned=True, experts="dispatched", shared_experts=True,
        head_norms=True,
    ),
    "gpt_oss": Traits("gpt_oss", other_activations=False, window=True, experts="dispatched", one_width=True, sdpa=False),
    "lfm2": Traits("lfm2", other_activations=False, pattern="C*", head_norms=True),
    "internlm3": Traits("llama"),
    "youtu": Traits("deepseek", other_activations=False, latent=True),
    "olmo_hybrid": Traits("olmo_hybrid", other_activations=False, global_every=4, linear=True, unturned_models=True),
    "apertus": Traits("apertus", other_activations=False, head_norms=True),
    "falcon": Traits("falcon", "gelu", masks_all=True),
    "lfm2_moe": Traits("lfm2", other_activations=False, pattern="C*cD", head_norms=True, experts="dispatched"),
}  # fmt: skip
FAMILIES: tuple[str, ...] = get_args(Family)


def families(having: Callable[[Traits], object]) -> tuple[str, ...]:
    """Return the families whose traits satisfy a condition.

    >>> families(lambda one: one.learned_positions)
    ('gpt2', 'opt')
    """
    return tuple([name for name in FAMILIES if having(TRAITS[name])])


USUAL_ACTIVATION: Mapping[str, Activation] = {name: one.activation for name, one in TRAITS.items()}
FREE_ACTIVATION = families(lambda one: one.other_activations)
WINDOWED_FAMILIES = families(lambda one: one.window)
#: Families whose ``max_window_layers`` gives the first layers full attention and the layers after them a sliding window.
SOME_WINDOWED: tuple[str, ...] = ("qwen2", "qwen3")
LEARNED_POSITIONS = families(lambda one: one.learned_positions)
#: Families without rotary positions: learned ones, or ALiBi (BLOOM).
UNROTATED = (*LEARNED_POSITIONS, "bloom")
LINEAR_FAMILIES = families(lambda one: one.linear)
PATTERNED = families(lambda one: one.pattern)
LATENT_FAMILIES = families(lambda one: one.latent)
MASKS_ALL = families(lambda one: one.masks_all or one.indexed)
INDEXED_FAMILIES = families(lambda one: one.indexed)
SHARED_EXPERTS = families(lambda one: one.shared_experts)
#: Families whose shared expert has its own width.
WIDE_SHARED_EXPERTS = families(lambda one: one.shared_experts and (one.file == "qwen3_next" or one.one_module))
MAY_BE_DENSE = families(lambda one: one.may_be_dense)
ONE_WIDTH_FAMILIES = families(lambda one: one.one_width)
MOE_FAMILIES = families(lambda one: one.experts != "none")
DISPATCHED_FAMILIES = families(lambda one: one.experts == "dispatched")
#: transformers' ``from_pretrained`` leaves their routers in fp32 (5.23, core_model_loading.py: a parameter's own dtype wins).
WIDE_ROUTERS = families(lambda one: one.wide_router)
DENSE_LAYERS = families(lambda one: one.dense_layers)
HEAD_NORMS = families(lambda one: one.head_norms)
PLAIN_HEADS = families(lambda one: one.plain_heads)
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
